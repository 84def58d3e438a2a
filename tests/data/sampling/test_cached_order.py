from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data.sample_order import CachedOrder, ElasticSampler


class Counting:
    """An order that keeps the lengths of the stretches it is asked for."""

    streams = 1

    def __init__(self, size):
        self.inner, self.size, self.lengths = ElasticSampler(size=size), size, []

    def indices(self, epoch, start, stop):
        self.lengths.append(stop - start)
        return self.inner.indices(epoch, start, stop)


@given(asked=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5000), st.integers(0, 5000)), max_size=20))
@settings(max_examples=50, deadline=None)
def test_cached_indices_equal_the_indices_of_the_order(asked):
    order = ElasticSampler(size=5000, seed=2)
    prepared = CachedOrder(order)
    for epoch, one, other in asked:
        start, stop = min(one, other), max(one, other)
        assert prepared.indices(epoch, start, stop).equal(order.indices(epoch, start, stop))


def test_small_ascending_calls_use_few_growing_ranges():
    order = Counting(1_000_000)
    prepared = CachedOrder(order)
    for start in range(0, 400_000, 8):
        prepared.indices(0, start, start + 8)
    assert order.lengths[0] == 1024  # a resume waits for no more
    assert max(order.lengths) == 65_536
    assert len(order.lengths) < 15


def test_large_batches_use_few_ranges():
    order = Counting(1_000_000)
    prepared = CachedOrder(order)
    for start in range(0, 400_000, 4000):
        prepared.indices(0, start, start + 4000)
    assert len(order.lengths) < 15


def test_rank_with_strided_positions_keeps_long_ranges():
    order = Counting(1_000_000)
    prepared = CachedOrder(order)
    for start in range(0, 400_000, 4096):
        prepared.indices(0, start, start + 512)
    assert len(order.lengths) < 15


def test_rank_among_many_computes_little_beyond_its_share():
    order = Counting(1_000_000)
    prepared = CachedOrder(order)
    for start in range(0, 900_000, 90_000):
        prepared.indices(0, start, start + 900)
    assert set(order.lengths) == {1024}


def test_jump_resets_the_range_length():
    order = Counting(1_000_000)
    prepared = CachedOrder(order)
    for start in (0, 1024, 500_000):
        prepared.indices(0, start, start + 8)
    assert order.lengths == [1024, 2048, 1024]
