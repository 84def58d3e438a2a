import pickle
from bisect import bisect_right
from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data.mixture import build_tree, count_sources, mix, source_of
from dtrain.data.sample_order import BlockShuffle, rank_positions, shard_order
from dtrain.errors import CheckpointMismatchError, ConfigError

WEIGHT = st.fractions(0, 1000, max_denominator=10**6) | st.integers(0, 9).map(Fraction)
WEIGHTS = st.lists(WEIGHT, min_size=1, max_size=9).filter(any)
LIMITS = {1: 0, 2: 0.5, 3: 1, 4: 1.25}


class Recorded:
    """A dataset that records requested indices, and names its samples."""

    def __init__(self, name, size):
        self.name, self.size, self.asked, self.told, self.closed = name, size, [], [], 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return f"{self.name}{range(self.size)[index]}"

    def __getitems__(self, indices):
        self.asked.append(indices)
        return [self[index] for index in indices]

    def prefetch(self, indices):
        self.told.append(indices.tolist())

    def close(self):
        self.closed += 1


class Sharded:
    """A dataset with an order of its own."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __len__(self):
        return sum(self.sizes)

    def __getitem__(self, index):
        return index

    def order(self, seed, shuffle):
        return shard_order(self.sizes, seed=seed, shuffle=shuffle)


def three(**weights):
    sources = {"a": range(100), "b": range(37), "c": range(8)}
    return mix(sources, weights=weights or {"a": 0.5, "b": 0.3, "c": 0.2})


def drawn(mixture, order, epochs):
    """Own indices of each source, in the order in which they are drawn in whole epochs of the mixture."""
    indices = torch.cat([order.indices(epoch, 0, order.size) for epoch in range(epochs)]).tolist()
    return own(mixture, indices)


def own(mixture, indices):
    bounds = [0, *accumulate(len(source) for source in mixture.sources.values())]
    by_source, names = {name: [] for name in mixture.sources}, list(mixture.sources)
    for index in indices:
        source = bisect_right(bounds, index) - 1
        by_source[names[source]].append(index - bounds[source])
    return by_source


@given(weights=WEIGHTS, start=st.integers(0, 10**12), length=st.integers(0, 3000))
@settings(max_examples=150, deadline=None)
def test_every_range_has_the_proportions_within_the_bound(weights, start, length):
    tree, total = build_tree(weights), sum(weights)
    dealt = source_of(tree, start, start + length)
    before, after = count_sources(tree, len(weights), start), count_sources(tree, len(weights), start + length)
    limit = LIMITS.get(len(weights), 1.68)
    for index, weight in enumerate(weights):
        assert after[index] - before[index] == int((dealt == index).sum())
        assert abs(after[index] - (start + length) * weight / total) <= limit
        assert abs(after[index] - before[index] - length * weight / total) <= 2 * limit


@pytest.mark.parametrize("weights", [[1, 1e-12, 3.3333333333333], [Fraction(1, 3), Fraction(10**15, 10**15 + 7)]])
def test_proportions_are_exact_beyond_63_bits(weights):
    exact = [Fraction(repr(weight)) if isinstance(weight, float) else Fraction(weight) for weight in weights]
    tree, start = build_tree(exact), 10**12
    dealt = source_of(tree, start, start + 500)
    for index in range(len(weights)):
        assert (
            count_sources(tree, len(weights), start + 500)[index] - count_sources(tree, len(weights), start)[index]
            == (dealt == index).sum()
        )
    assert abs(count_sources(tree, len(weights), 10**30)[0] - 10**30 * exact[0] / sum(exact)) < 1


def test_source_counts_of_adjacent_ranges_join():
    tree = build_tree([Fraction(3), Fraction(5), Fraction(1, 7)])
    whole = source_of(tree, -1000, 200_000)
    assert (source_of(tree, -1000, 77_777) == whole[:78_777]).all()
    assert (source_of(tree, 77_777, 200_000) == whole[78_777:]).all()


def test_source_completes_its_own_epochs():
    mixture = three()
    lists = drawn(mixture, mixture.order(0, True), epochs=5)
    for name, dataset in mixture.sources.items():
        size, indices = len(dataset), lists[name]
        rounds = [indices[begin : begin + size] for begin in range(0, len(indices) - size + 1, size)]
        assert len(rounds) >= 3
        assert all(sorted(epoch) == list(range(size)) for epoch in rounds)
        assert len({tuple(epoch) for epoch in rounds}) == len(rounds)  # each in another order


def test_sources_without_shuffle_keep_their_order():
    mixture = three(a=2, b=1, c=1)
    lists = drawn(mixture, mixture.order(0, False), epochs=1)
    assert lists["a"][:3] == [0, 1, 2]
    assert lists["c"] == [position % 8 for position in range(len(lists["c"]))]


@given(start=st.integers(0, 145), stop=st.integers(0, 145), epoch=st.integers(0, 4))
@settings(max_examples=50, deadline=None)
def test_a_range_equals_the_same_range_of_the_whole_epoch(start, stop, epoch):
    start, stop = min(start, stop), max(start, stop)
    order = three().order(3, True)
    assert order.indices(epoch, start, stop).equal(order.indices(epoch, 0, order.size)[start:stop])


@given(
    weights=st.lists(st.tuples(*[st.integers(0, 20)] * 3).filter(any), min_size=1, max_size=10),
    steps=st.lists(st.integers(0, 400), min_size=10, max_size=10),
)
@settings(max_examples=50, deadline=None)
def test_weight_changes_at_resumes_lose_or_repeat_no_sample(weights, steps):
    """Every source continues at its own position: its draws are one walk through its epochs, for any weights."""
    walks, place, state, names = {"a": [], "b": [], "c": []}, 0, None, ("a", "b", "c")
    for parts, step in zip(weights, steps, strict=False):
        mixture = three(**dict(zip(names, parts, strict=True)))
        order = mixture.order(7, True)
        if state is not None:
            order = order.at_state(state, *divmod(place, order.size))
        while step:  # to the end of an epoch, at most
            epoch, start = divmod(place, order.size)
            stop = min(start + step, order.size)
            for name, indices in own(mixture, order.indices(epoch, start, stop).tolist()).items():
                walks[name] += indices
            place, step = place + stop - start, step - (stop - start)
        state = order.state(*divmod(place, order.size))
    for source in three().order(7, True).sources:
        walk = walks[source.name]
        epochs = -(-len(walk) // source.order.size)
        full = [index for epoch in range(epochs) for index in source.order.indices(epoch, 0, source.order.size).tolist()]
        assert walk == full[: len(walk)]


def test_resume_with_unchanged_weights_keeps_the_order_after_earlier_changes():
    first, later = three(a=1, b=1, c=1), three(a=5, b=1, c=0)
    order = later.order(0, True).at_state(first.order(0, True).state(1, 20), 1, 20)
    again = later.order(0, True).at_state({"epoch": 2, **order.state(2, 30)}, 2, 30)
    assert again.indices(2, 30, 145).equal(order.indices(2, 30, 145))
    fresh = later.order(0, True)
    assert not fresh.indices(2, 30, 145).equal(order.indices(2, 30, 145))  # the change is remembered


def test_new_weights_apply_after_the_resume():
    order = three(a=1, b=0, c=0).order(0, True).at_state(three().order(0, True).state(0, 50), 0, 50)
    assert order.indices(0, 50, 145).lt(100).all()
    order = three(a=0, b=0, c=1).order(0, True).at_state(order.state(0, 60), 0, 60)
    assert order.indices(0, 60, 145).ge(137).all()


def test_epoch_samples_sets_the_epoch_length():
    mixture = mix({"a": range(10), "b": range(1000)}, weights={"a": 1, "b": 1}, epoch_samples=64)
    assert mixture.order(0, True).size == 64
    assert len(mixture) == 1010
    assert len(set(drawn(mixture, mixture.order(0, True), epochs=10)["b"])) == 320  # continues over the ends of epochs


def test_a_block_shuffled_source_keeps_its_order_and_its_lanes():
    sharded = Sharded([50] * 32)
    mixture = mix({"s": sharded, "m": range(500)}, weights={"s": 3, "m": 1})
    options = BlockShuffle(block_size=2, streams=4)
    order = mixture.order(1, options)
    assert order.streams == 4
    walk = own(mixture, order.indices(0, 0, 2000).tolist())["s"]
    source = order.sources[0].order
    assert walk == source.indices(0, 0, len(walk)).tolist()
    lane_of = {index: position % 4 for position, index in enumerate(source.indices(0, 0, 1600).tolist())}
    for rank in range(4):
        mine = order.indices(0, 0, 1600)[list(rank_positions(0, 1600, rank, 4, order.streams))]
        assert {lane_of[index] for index in mine.tolist() if index < 1600} == {rank}


def test_proportions_hold_for_rows_of_lanes():
    """Half a row away from the share after whole rows, and at most one row that is not whole."""
    order = mix({"s": Sharded([50] * 32), "m": range(500)}, weights={"s": 3, "m": 1}).order(1, BlockShuffle(streams=4))
    drawn_from_s = order.indices(0, 0, 2100).lt(1600).cumsum(0)
    off = drawn_from_s - torch.arange(1, 2101) * 0.75
    assert off.abs().max() <= 4 * 0.5 + 4 * 0.75


@given(parts=st.lists(st.integers(1, 9), min_size=2, max_size=2), cut=st.integers(0, 2099))
@settings(max_examples=30, deadline=None)
def test_block_shuffled_source_keeps_its_position_when_weights_change(parts, cut):
    def mixture(s, m):
        return mix({"s": Sharded([50] * 32), "m": range(500)}, weights={"s": s, "m": m})

    before = mixture(3, 1).order(1, True)
    order = mixture(*parts).order(1, True).at_state(before.state(0, cut), 0, cut)
    indices = before.indices(0, 0, cut).tolist() + order.indices(0, cut, 2100).tolist()
    walk = own(mixture(1, 1), indices)["s"]
    source = before.sources[0].order
    assert walk == torch.cat([source.indices(epoch, 0, 1600) for epoch in (0, 1)])[: len(walk)].tolist()


def test_mixture_may_be_nested_as_a_source():
    inner = three()
    outer = mix({"inner": inner, "d": range(5)}, weights={"inner": 0.5, "d": 0.5})
    order = outer.order(0, True)
    state = order.state(0, 77)
    assert "inner.a.drawn" in state
    again = outer.order(0, True).at_state(state, 0, 77)
    assert again.indices(0, 77, 150).equal(order.indices(0, 77, 150))


def test_batch_reads_each_source_once_and_keeps_the_order():
    a, b = Recorded("a", 10), Recorded("b", 5)
    mixture = mix({"a": a, "b": b, "plain": [7, 8]}, weights={"a": 1, "b": 1, "plain": 1})
    assert mixture.__getitems__([12, 3, 16, 0, 14]) == ["b2", "a3", 8, "a0", "b4"]
    assert (a.asked, b.asked) == ([[3, 0]], [[2, 4]])
    assert mixture[12] == "b2"


@pytest.mark.parametrize("index", [-1, 15])
def test_index_out_of_range_is_refused(index):
    mixture = mix({"a": range(10), "b": range(5)}, weights={"a": 1, "b": 1})
    with pytest.raises(IndexError, match="not in 0 to 14"):
        mixture[index]


def test_mixture_forwards_prefetch_and_close_to_its_sources():
    a, b = Recorded("a", 10), Recorded("b", 5)
    mixture = mix({"a": a, "plain": [1], "b": b}, weights={"a": 1, "plain": 1, "b": 1})
    mixture.prefetch(torch.tensor([15, 0, 10, 11]))
    mixture.prefetch(torch.tensor([3]))
    mixture.close()
    assert (a.told, b.told) == ([[0], [3]], [[4, 0]])
    assert (a.closed, b.closed) == (1, 1)


def test_fingerprint_covers_all_sources_but_not_the_weights():
    assert three().fingerprint() == three(a=1, b=9, c=3).fingerprint()
    assert three().fingerprint() != mix({"a": range(100), "b": range(36), "c": range(9)}, weights=three().weights).fingerprint()


def test_mixture_can_be_pickled_and_has_a_readable_repr():
    mixture = pickle.loads(pickle.dumps(three()))
    assert mixture.order(0, True).indices(0, 0, 145).equal(three().order(0, True).indices(0, 0, 145))
    assert repr(mixture) == "Mixture(a: 100 at 0.5, b: 37 at 0.3, c: 8 at 0.2, epoch_samples=145)"


def test_float_weights_become_exact_decimal_fractions():
    assert three().weights == {"a": Fraction(1, 2), "b": Fraction(3, 10), "c": Fraction(1, 5)}


def test_order_never_changes_between_releases():
    assert three().order(0, True).indices(1, 5, 17).tolist() == [95, 123, 10, 143, 55, 109, 67, 140, 85, 125, 79, 110]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"a": 100, "b": 36, "c": 9}, "source 'b' of the mixture.*size=37, this one has size=36"),
        ({"a": 100, "b": 37}, "size=145, this one has size=137"),
        ({"a": 100, "x": 37, "c": 8}, "without a source 'x'"),
        ({"a": 145}, "sources=3, this one has sources=1"),
    ],
    ids=["sizes of sources", "size", "names", "number of sources"],
)
def test_state_of_a_different_mixture_is_refused(sizes, message):
    other = mix({name: range(size) for name, size in sizes.items()}, weights=dict.fromkeys(sizes, 1))
    with pytest.raises(CheckpointMismatchError, match=message):
        other.order(0, True).at_state(three().order(0, True).state(0, 5), 0, 5)


def test_state_of_a_different_seed_is_refused():
    with pytest.raises(CheckpointMismatchError, match="seed=1, this one has seed=2"):
        three().order(2, True).at_state(three().order(1, True).state(0, 5), 0, 5)


def test_a_state_of_a_plain_dataset_is_refused():
    order = shard_order([145], seed=0, shuffle=False)
    with pytest.raises(CheckpointMismatchError, match="sources=None, this one has sources=3"):
        three().order(0, False).at_state(order.state(0, 5), 0, 5)
    with pytest.raises(CheckpointMismatchError, match="shuffle=None"):
        order.at_state(three().order(0, False).state(0, 5), 0, 5)


@pytest.mark.parametrize(
    ("sources", "weights", "more", "message"),
    [
        ({}, {}, {}, "must have the same names"),
        ({"a": [1]}, {"b": 1}, {}, r"got \['a'\] and \['b'\]"),
        ({"a.b": [1]}, {"a.b": 1}, {}, "string without a dot, got 'a.b'"),
        ({"a": []}, {"a": 1}, {}, "source 'a' must be an indexed dataset"),
        ({"a": iter([1])}, {"a": 1}, {}, "source 'a' must be an indexed dataset"),
        ({"a": [1]}, {"a": -1}, {}, "weight of 'a' must be a positive number, got -1"),
        ({"a": [1]}, {"a": float("nan")}, {}, "got nan"),
        ({"a": [1]}, {"a": True}, {}, "got True"),
        ({"a": [1]}, {"a": "0.5"}, {}, "got '0.5'"),
        ({"a": [1]}, {"a": 0}, {}, "all weights are 0"),
        ({"a": [1]}, {"a": 1}, {"epoch_samples": 0}, "epoch_samples must be an integer of at least 1, got 0"),
    ],
)
def test_invalid_mixtures_are_refused(sources, weights, more, message):
    with pytest.raises(ConfigError, match=message):
        mix(sources, weights=weights, **more)
