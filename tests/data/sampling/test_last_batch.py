import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.data.position import LAST_BATCH_MODES, EpochBatches, batch_bounds, batch_indices
from dtrain.data.sample_order import ElasticSampler


def batches(size, batch, last_batch, start=0):
    every = []
    while (bounds := batch_bounds(start, size, batch, last_batch)) is not None:
        every.append(bounds)
        start = bounds[1]
    return every


@given(size=st.integers(1, 100), batch=st.integers(1, 120), last_batch=st.sampled_from(LAST_BATCH_MODES))
def test_sample_and_batch_counts_match_the_batch_bounds(size, batch, last_batch):
    bounds, epoch = batches(size, batch, last_batch), EpochBatches(size=size, global_batch_size=batch, last_batch=last_batch)
    assert sum(stop - first for first, stop in bounds) == epoch.samples_per_epoch
    assert len(bounds) == epoch.steps_per_epoch()


@pytest.mark.parametrize(
    ("last_batch", "expected"),
    [("short", [(3, 7), (7, 10)]), ("drop", [(3, 7)]), ("pad", [(3, 7), (7, 11)])],
    ids=LAST_BATCH_MODES,
)
def test_last_batch_modes_hold_after_the_batch_size_changed_in_an_epoch(last_batch, expected):
    """Batches of 4 from position 3 on: no batch is short with "drop" and "pad", at any position."""
    assert batches(10, 4, last_batch, start=3) == expected
    assert batches(10, 4, last_batch, start=2) == [(2, 6), (6, 10)]


@given(size=st.integers(1, 20), start=st.integers(0, 60), count=st.integers(0, 60))
def test_positions_beyond_the_epoch_wrap_to_its_start(size, start, count):
    order = ElasticSampler(size=size, seed=1)
    whole = order.indices(2, 0, size).tolist()
    expected = [whole[position % size] for position in range(start, start + count)]
    assert batch_indices(order, 2, start, start + count).tolist() == expected
