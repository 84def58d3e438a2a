import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data.sample_order import permute_array, permute_in_ranges

P_999 = {15: 37.7, 23: 49.7, 119: 173.6, 255: 330.5}  # chi-square by degrees of freedom


def permute(positions, n, key):
    return torch.from_numpy(permute_array(positions.numpy(), n, key))


def chi_square(counts):
    expected = counts.sum() / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 100, 1024, 1025, 4096, 4097])
def test_permute_is_a_bijection(n):
    assert permute(torch.arange(n), n, key=7).sort().values.equal(torch.arange(n))


@given(n=st.integers(1, 10**12), key=st.integers(0, 2**62), start=st.integers(0, 10**12))
@settings(max_examples=50, deadline=None)
def test_permute_stays_in_range_without_repeats_at_any_size(n, key, start):
    positions = torch.arange(start % n, min(n, start % n + 64))
    values = permute(positions, n, key)
    assert values.ge(0).all()
    assert values.lt(n).all()
    assert len(values.unique()) == len(positions)


def test_permute_does_not_modify_its_positions():
    positions = torch.arange(100)
    permute(positions, 2000, 3)
    assert positions.equal(torch.arange(100))


def test_keys_give_different_orders():
    orders = [tuple(permute(torch.arange(50), 50, key).tolist()) for key in range(20)]
    assert len(set(orders)) == 20


@pytest.mark.parametrize("n", [16, 1600])
@pytest.mark.parametrize("place", [0, 7])
def test_sample_destination_is_uniform(n, place):
    """Count the 16th of the range that the sample at a position comes from, over 4,000 keys."""
    destinations = torch.cat([permute(torch.tensor([place]), n, key) for key in range(4000)])
    assert chi_square(torch.bincount(destinations * 16 // n, minlength=16)) < P_999[15]


@pytest.mark.parametrize("n", [16, 1600])
def test_joint_destination_of_two_neighbours_is_uniform(n):
    """Both 16ths at once, over 8,000 keys: 256 cells, 240 for 16 samples, of which two never land on one place."""
    both = torch.stack([permute(torch.tensor([3, 4]), n, key) for key in range(8_000)]) * 16 // n
    counts = torch.bincount(both[:, 0] * 16 + both[:, 1], minlength=256)
    if n == 16:
        assert counts.view(16, 16).diagonal().sum() == 0
        counts = counts.view(16, 16)[~torch.eye(16, dtype=torch.bool)]
    assert chi_square(counts) < P_999[255]


@pytest.mark.parametrize(("n", "orders"), [(4, 24), (5, 120)])
def test_all_orders_of_a_tiny_range_are_equally_likely(n, orders):
    permutations = [tuple(permute(torch.arange(n), n, key).tolist()) for key in range(6000)]
    counts = torch.tensor([permutations.count(order) for order in set(permutations)])
    assert len(counts) == orders
    assert chi_square(counts) < P_999[orders - 1]


def test_cycle_lengths_match_random_permutations():
    """A random permutation of n has ln(n) + 0.58 cycles on average, with a variance of about ln(n) - 1.07."""
    n, keys = 2000, 60
    cycles = []
    for key in range(keys):
        values, left, count = permute(torch.arange(n), n, key).tolist(), set(range(n)), 0
        while left:
            value, count = left.pop(), count + 1
            while (value := values[value]) in left:
                left.remove(value)
        cycles.append(count)
    mean, deviation = np.log(n) + 0.58, ((np.log(n) - 1.07) / keys) ** 0.5
    assert abs(sum(cycles) / keys - mean) < 3.3 * deviation  # p = 0.001


def test_neighbours_are_separated():
    values = permute(torch.arange(10_000), 10_000, key=1)
    steps = (values[1:] - values[:-1]).abs().float().mean()
    assert steps == pytest.approx(10_000 / 3, rel=0.05)  # the mean distance of two uniform draws


def test_one_long_call_equals_several_short_calls():
    whole = permute(torch.arange(200_000), 10**9, key=5)
    assert permute(torch.arange(60_000, 70_000), 10**9, key=5).equal(whole[60_000:70_000])


@given(sizes=st.lists(st.integers(1, 60) | st.integers(1000, 3000), min_size=1, max_size=12), key=st.integers(0, 2**62))
@settings(max_examples=50, deadline=None)
def test_each_range_is_permuted_separately(sizes, key):
    lengths = np.array(sizes)
    ids = np.repeat(np.arange(len(sizes)), lengths)
    offsets = np.concatenate([np.arange(size) for size in sizes])
    values = permute_in_ranges(offsets, lengths[ids], ids, key)
    for index, size in enumerate(sizes):
        assert np.array_equal(np.sort(values[ids == index]), np.arange(size))
    chosen = np.arange(len(ids))[::-3]
    assert np.array_equal(permute_in_ranges(offsets[chosen], lengths[ids][chosen], ids[chosen], key), values[chosen])


@pytest.mark.parametrize("size", [50, 2000])
def test_ranges_of_one_size_have_different_permutations(size):
    ids = np.repeat(np.arange(40), size)
    values = permute_in_ranges(np.tile(np.arange(size), 40), np.full(40 * size, size), ids, key=1).reshape(40, size)
    assert len({tuple(row) for row in values.tolist()}) == 40
    counts = torch.bincount(torch.from_numpy(values[:, 10] * 4 // size), minlength=4)
    assert chi_square(counts) < 16.3  # 3 degrees of freedom, p = 0.999
