import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data.sample_order import BlockOrder, BlockShuffle, rank_positions, shard_order
from dtrain.errors import CheckpointMismatchError, ConfigError

OPTIONS = st.builds(
    BlockShuffle,
    block_size=st.integers(1, 9),
    unit=st.sampled_from(["shards", "samples"]),
    streams=st.sampled_from([1, 2, 3, 4, 8, 16]),
)
SIZES = st.lists(st.integers(0, 40) | st.integers(1000, 1100), min_size=1, max_size=20).filter(sum)


def whole(order, epoch=0):
    return order.indices(epoch, 0, order.size)


def shard_of(sizes, indices):
    return torch.bucketize(indices.contiguous(), torch.tensor(sizes).cumsum(0), right=True)


@given(sizes=SIZES, options=OPTIONS, seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_epoch_contains_every_sample_once_for_any_shard_sizes(sizes, options, seed, epoch):
    order = shard_order(sizes, seed=seed, shuffle=options)
    assert whole(order, epoch).sort().values.equal(torch.arange(sum(sizes)))


@given(sizes=SIZES, options=OPTIONS, data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_range_equals_the_same_range_of_the_whole_epoch(sizes, options, data):
    order = shard_order(sizes, seed=3, shuffle=options)
    start = data.draw(st.integers(0, order.size))
    stop = data.draw(st.integers(start, order.size))
    fresh = shard_order(sizes, seed=3, shuffle=options)
    assert fresh.indices(2, start, stop).equal(whole(order, 2)[start:stop])


@given(sizes=SIZES, options=OPTIONS)
@settings(max_examples=50, deadline=None)
def test_window_reads_no_more_than_its_number_of_shards(sizes, options):
    """Between two window borders a stream reads whole windows: at most ``block_size`` adjacent shards."""
    order = shard_order(sizes, seed=1, shuffle=replace(options, unit="shards"))
    for lane in range(order.streams):
        shards = shard_of(sizes, whole(order)[lane :: order.streams]).tolist()
        first, last = {}, {}
        for place, shard in enumerate(shards):
            first.setdefault(shard, place)
            last[shard] = place
        open_at = [sum(first[shard] <= place <= last[shard] for shard in first) for place in range(len(shards))]
        assert max(open_at, default=0) <= options.block_size


def test_rank_reads_only_the_shards_of_its_own_lanes():
    sizes = [50] * 64
    order = shard_order(sizes, seed=0, shuffle=BlockShuffle(block_size=2, streams=8))
    read = []
    for rank in range(4):
        mine = [order.indices(0, 0, 3200)[list(rank_positions(a, a + 160, rank, 4, 8))] for a in range(0, 3200, 160)]
        read.append(set(shard_of(sizes, torch.cat(mine)).tolist()))
    assert sum(map(len, read)) <= 64 + 7  # a shard at the border of two streams is read in both
    assert set.union(*read) == set(range(64))


def test_lanes_have_equal_lengths_for_any_shard_sizes():
    sizes = [1000, 1, 1, 1, 500, 3]
    order = shard_order(sizes, seed=0, shuffle=BlockShuffle(block_size=1, streams=4))
    lengths = [len(whole(order)[lane::4]) for lane in range(4)]
    assert max(lengths) - min(lengths) <= 1


def test_window_of_samples_bounds_each_sample_displacement():
    order = shard_order([100_000], seed=5, shuffle=BlockShuffle(block_size=2000, unit="samples", streams=2))
    for lane in range(2):
        mine = whole(order)[lane::2]
        first = (torch.arange(50_000) + lane * 1000) // 2000 * 2000 - lane * 1000  # the second lane's windows are staggered
        assert mine.ge(first + lane * 50_000).all()
        assert mine.lt(first + 2000 + lane * 50_000).all()
        assert (mine[1:] - mine[:-1]).abs().float().mean() > 500  # torn apart inside


def test_order_differs_by_epoch_and_seed():
    orders = [whole(shard_order([7] * 30, seed=seed, shuffle=True), epoch).tolist() for seed in range(3) for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 9


def test_order_without_shuffle_equals_the_dataset_order():
    order = shard_order([3, 0, 4], seed=1, shuffle=False)
    assert whole(order).tolist() == list(range(7))
    assert order.streams == 1


@pytest.mark.parametrize(
    ("sizes", "options", "expected"),
    [
        ([3000, 2000, 5], BlockShuffle(block_size=2, streams=2), [2426, 2849, 268, 2611, 2316, 2780]),
        ([30, 20, 5], BlockShuffle(block_size=9, unit="samples", streams=2), [1, 23, 50, 27, 0, 26]),
    ],
    ids=["large windows", "small windows"],
)
def test_order_never_changes_between_releases(sizes, options, expected):
    assert shard_order(sizes, seed=0, shuffle=options).indices(1, 4, 10).tolist() == expected


def test_order_within_a_window_is_uniform():
    """Count the 16th of its window in which each sample lands: 15 degrees of freedom, below 37.7 with p = 0.999."""
    order = shard_order([1600] * 40, seed=9, shuffle=BlockShuffle(block_size=1, streams=1))
    within = whole(order).view(40, 1600) % 1600
    for place in (0, 1, 800):
        counts = torch.bincount(within[:, place] // 100, minlength=16)
        assert ((counts - 2.5) ** 2 / 2.5).sum() < 37.7


def test_order_of_a_billion_samples_uses_bounded_memory():
    order = shard_order(torch.full((20_000,), 50_000), seed=0, shuffle=True)
    stretch = order.indices(3, 999_999_000, 1_000_000_000)
    assert len(stretch.unique()) == 1000
    line = order._latest
    assert line.shard_starts.nbytes + line.dataset_offsets.nbytes + line.window_starts.nbytes < 500_000


def test_an_order_can_be_pickled():
    order = shard_order([3, 4, 5], seed=0, shuffle=True)
    assert whole(pickle.loads(pickle.dumps(order))).equal(whole(order))


def test_a_state_of_the_same_order_is_accepted():
    order = shard_order([3, 4, 5], seed=0, shuffle=True)
    assert order.at_state({"epoch": 1, **order.state(1, 7)}, 1, 7) is order


@pytest.mark.parametrize(
    ("sizes", "seed", "shuffle", "named"),
    [
        ([3, 5, 4], 0, True, "shard_sizes"),
        ([3, 4, 6], 0, True, "size"),
        ([3, 9], 0, True, "shards"),
        ([3, 4, 5], 1, True, "seed"),
        ([3, 4, 5], 0, False, "shuffle"),
        ([3, 4, 5], 0, BlockShuffle(unit="samples"), "shuffle"),
        ([3, 4, 5], 0, BlockShuffle(block_size=5), "block_size"),
        ([3, 4, 5], 0, BlockShuffle(streams=2), "streams"),
    ],
)
def test_state_of_a_different_order_is_refused(sizes, seed, shuffle, named):
    state = shard_order([3, 4, 5], seed=0, shuffle=True).state(0, 5)
    with pytest.raises(CheckpointMismatchError, match=f"in a dataset with {named}="):
        shard_order(sizes, seed=seed, shuffle=shuffle).at_state(state, 0, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"streams": True}, "streams must be an integer of at least 1, got True"),
        ({"unit": "bytes"}, "unit must be 'shards' or 'samples', got 'bytes'"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        BlockShuffle(**options)


@pytest.mark.parametrize("sizes", [[], [0, 0], [3, -1]])
def test_shards_without_samples_are_refused(sizes):
    with pytest.raises(ConfigError, match="one sample at least"):
        shard_order(sizes, seed=0, shuffle=True)


def test_a_range_outside_of_the_epoch_is_refused():
    order = shard_order([5, 5], seed=0, shuffle=True)
    assert isinstance(order, BlockOrder)
    with pytest.raises(ConfigError, match="must fulfil 0 <= start <= stop <= 10"):
        order.indices(0, 4, 11)
