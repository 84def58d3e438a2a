import pytest

from dtrain.data.sample_order import ElasticSampler
from dtrain.errors import CheckpointMismatchError, ConfigError


def test_order_never_changes_between_releases():
    assert ElasticSampler(size=5000, seed=0).indices(0, 0, 5).tolist() == [4200, 3704, 19, 2870, 1814]
    assert ElasticSampler(size=10, seed=0).indices(0, 0, 10).tolist() == [6, 2, 3, 7, 5, 9, 1, 8, 4, 0]


def test_a_range_equals_the_same_range_of_the_whole_epoch():
    sampler = ElasticSampler(size=1000, seed=3)
    whole = sampler.indices(2, 0, 1000)
    assert sampler.indices(2, 137, 401).equal(whole[137:401])
    assert not sampler.indices(3, 0, 1000).equal(whole)


def test_order_without_shuffle_equals_the_dataset_order():
    assert ElasticSampler(size=5, shuffle=False).indices(4, 1, 4).tolist() == [1, 2, 3]


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 11)])
def test_a_range_outside_of_the_epoch_is_refused(start, stop):
    with pytest.raises(ConfigError, match="must fulfil 0 <= start <= stop <= 10"):
        ElasticSampler(size=10).indices(0, start, stop)


def test_an_empty_dataset_is_refused():
    with pytest.raises(ConfigError, match="size must be an integer of at least 1, got 0"):
        ElasticSampler(size=0)


def test_a_state_of_the_same_order_is_accepted():
    order = ElasticSampler(size=10, seed=3)
    assert order.state(1, 4) == {"size": 10, "seed": 3, "shuffle": 1}
    assert order.at_state({"epoch": 1, **order.state(1, 4)}, 1, 4) is order


@pytest.mark.parametrize(("key", "value"), [("size", 11), ("seed", 4), ("shuffle", 0)])
def test_state_of_a_different_order_is_refused(key, value):
    order = ElasticSampler(size=10, seed=3)
    with pytest.raises(CheckpointMismatchError, match=f"{key}={value}, this one has {key}="):
        order.at_state({**order.state(0, 0), key: value}, 0, 0)
