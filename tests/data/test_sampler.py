import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtrain.data.sampler import ElasticSampler, permute, rank_share
from dtrain.errors import ConfigError


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 100, 1024, 1025, 4097])
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


def test_keys_give_different_orders():
    orders = [tuple(permute(torch.arange(50), 50, key).tolist()) for key in range(20)]
    assert len(set(orders)) == 20


@pytest.mark.parametrize("n", [16, 1600])
def test_the_shuffle_looks_uniform(n):
    """In which 16th sample 0 lands over 4,000 keys: chi-square with 15 degrees of freedom is below 37.7 with p = 0.999."""
    counts = torch.zeros(16)
    for key in range(4000):
        counts[permute(torch.tensor([0]), n, key) * 16 // n] += 1
    expected = 4000 / 16
    assert ((counts - expected) ** 2 / expected).sum() < 37.7


def test_a_tiny_range_reaches_every_order():
    orders = {tuple(permute(torch.arange(5), 5, key).tolist()) for key in range(2000)}
    assert len(orders) == 120  # 2,000 uniform draws miss one of 120 orders with probability below 1e-5


def test_neighbours_are_torn_apart():
    values = permute(torch.arange(10_000), 10_000, key=1)
    steps = (values[1:] - values[:-1]).abs().float().mean()
    assert steps == pytest.approx(10_000 / 3, rel=0.05)  # the mean distance of two uniform draws


def test_order_never_changes_between_releases():
    assert ElasticSampler(size=5000, seed=0).indices(0, 0, 5).tolist() == [4200, 3704, 19, 2870, 1814]
    assert ElasticSampler(size=10, seed=0).indices(0, 0, 10).tolist() == [6, 2, 3, 7, 5, 9, 1, 8, 4, 0]


def test_any_stretch_equals_that_of_the_whole():
    sampler = ElasticSampler(size=1000, seed=3)
    whole = sampler.indices(2, 0, 1000)
    assert sampler.indices(2, 137, 401).equal(whole[137:401])
    assert not sampler.indices(3, 0, 1000).equal(whole)


def test_without_shuffle_the_order_is_the_datasets():
    assert ElasticSampler(size=5, shuffle=False).indices(4, 1, 4).tolist() == [1, 2, 3]


def test_shares_are_contiguous_and_even():
    for count in range(1, 9):
        shares = [rank_share(10, 31, index, count) for index in range(count)]
        assert shares[0][0] == 10
        assert shares[-1][1] == 31
        assert all(a[1] == b[0] for a, b in itertools.pairwise(shares))
        sizes = [end - first for first, end in shares]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 11)])
def test_a_stretch_outside_of_the_epoch_is_refused(start, stop):
    with pytest.raises(ConfigError, match="needs 0 <= start <= stop <= 10"):
        ElasticSampler(size=10).indices(0, start, stop)


def test_an_empty_dataset_is_refused():
    with pytest.raises(ConfigError, match="at least one sample, got size=0"):
        ElasticSampler(size=0)
