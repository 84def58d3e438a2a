import random

import numpy as np
import pytest
import torch

from dtrain.dist.rng import RNGSnapshot, derive_seed, fork_rng, generator, hash_rng_state, rng_state, seed_all, set_rng_state


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()), torch.rand(()).item()]


def test_rng_state_restores_all_generators():
    seed_all(7)
    draws()  # leaves half of a Gaussian pair in Python's and NumPy's generators
    state = rng_state()
    first = draws()
    assert draws() != first
    set_rng_state(state)
    assert draws() == first


def test_seeds_depend_on_every_part_and_on_their_types():
    seeds = {derive_seed(*parts) for parts in [(0,), (1,), ("0",), (0, 0), (0, "a"), ("a", 0), ("a0",), ()]}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_derived_seed_is_stable_between_releases():
    assert derive_seed(0, "ema", 1) == 552497547399374021


def test_generator_depends_only_on_its_seed_parts():
    assert torch.rand(3, generator=generator("cpu", 1, "x")).equal(torch.rand(3, generator=generator("cpu", 1, "x")))
    assert not torch.rand(3, generator=generator("cpu", 1, "x")).equal(torch.rand(3, generator=generator("cpu", 1, "y")))


def test_seed_all_gives_each_library_its_own_stream():
    seed_all(3, "a")
    first = draws()
    seed_all(3, "a")
    assert draws() == first
    assert len({round(x, 9) for x in first}) == 5


def test_rng_state_hash_changes_with_torch_draws():
    device = torch.device("cpu")
    seed_all(3)
    first = hash_rng_state(device)
    assert 0 <= first < 2**52
    random.random()
    assert hash_rng_state(device) == first, "not torch's"
    torch.rand(1)
    assert hash_rng_state(device) != first
    seed_all(3)
    assert hash_rng_state(device) == first


@pytest.mark.parametrize("before", [0, 1, 2, 3])
@pytest.mark.parametrize("inside", [0, 1, 2])
def test_snapshot_restores_generators_after_any_draws(before, inside):
    """NumPy keeps the second of a pair of normal numbers apart, where a look at its words does not see it."""
    seed_all(5)
    RNGSnapshot()
    for _ in range(before):
        np.random.randn()
    RNGSnapshot()
    np.random.randn(inside)
    kept = RNGSnapshot()
    first = draws()
    kept.restore()
    assert draws() == first
    kept.restore()
    assert draws() == first


@pytest.mark.parametrize("before", [0, 1, 3], ids="after {} numpy normals".format)
def test_fork_rng_restores_the_generators(before):
    def begin() -> None:
        seed_all(1)
        np.random.randn(before)

    begin()
    plain = draws() + draws()
    begin()
    with fork_rng(7):
        first = draws()
    found = draws()
    with fork_rng(7):
        assert draws() == first
    assert found + draws() == plain
