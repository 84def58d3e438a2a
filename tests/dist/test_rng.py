from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dtrain.dist.rng import (
    Determinism,
    RNGSnapshot,
    SeedOnDraw,
    Tf32,
    _find_python_memory,
    derive_seed,
    fork_rng,
    generator,
    hash_rng_state,
    rng_state,
    seed_all,
    set_rng_state,
    use_deterministic,
    use_tf32,
)
from dtrain.errors import ConfigError


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


@pytest.mark.parametrize("before", [0, 1, 3], ids="after {} normals".format)
@pytest.mark.parametrize("in_memory", [True, False], ids=["in memory", "by getstate"])
def test_fork_rng_restores_the_generators(before, in_memory, monkeypatch):
    if not in_memory:
        monkeypatch.setattr("dtrain.dist.rng._find_python_memory", lambda: None)

    def begin() -> None:
        seed_all(1)
        np.random.randn(before)
        for _ in range(before):
            random.gauss(0, 1)

    begin()
    plain = draws() + draws()
    begin()
    with fork_rng(7):
        first = draws()
    outside = draws()
    with fork_rng(7):
        assert draws() == first
    assert outside + draws() == plain


def test_contexts_of_fork_rng_nest():
    seed_all(1)
    plain = draws() + draws()
    with fork_rng(7):
        inner = draws() + draws()
    with fork_rng(8):
        other = draws()
    seed_all(1)
    outside = draws()
    with fork_rng(7):
        first = draws()
        with fork_rng(8):
            assert draws() == other
        assert first + draws() == inner
    assert outside + draws() == plain


def test_fork_rng_restores_half_of_a_pair_that_a_program_has_set():
    random.seed(1)
    random.gauss(0, 1)
    with_half = random.getstate()
    random.gauss(0, 1)
    with fork_rng(7):
        pass
    random.setstate(with_half)
    with fork_rng(7):
        pass
    assert random.getstate() == with_half


@pytest.mark.parametrize("save", [rng_state, RNGSnapshot])
def test_fork_rng_restores_half_of_a_numpy_pair_that_was_restored(save):
    np.random.seed(1)
    np.random.randn()
    state = save()
    half = np.random.randn()
    with fork_rng(7):
        pass
    state.restore() if isinstance(state, RNGSnapshot) else set_rng_state(state)
    with fork_rng(7):
        pass
    assert np.random.randn() == half


def test_fork_rng_restores_another_kind_of_numpy_generator():
    usual = np.random.get_bit_generator()
    with fork_rng(7):
        expected = draws()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        np.random.randn()
        before = np.random.get_state(legacy=False)
        with fork_rng(7):
            assert draws() == expected
        assert np.random.get_state(legacy=False) == before
    finally:
        np.random.set_bit_generator(usual)


def test_fork_rng_restores_the_generators_after_an_error():
    def draw_and_fail() -> None:
        with fork_rng(7):
            draws()
            raise ValueError("inside")

    seed_all(1)
    plain = draws()
    seed_all(1)
    with pytest.raises(ValueError, match="inside"):
        draw_and_fail()
    assert draws() == plain


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: random.gauss(0, 1), np.random.rand, np.random.randn, lambda: torch.rand(()).item(), draws],
    ids=["random", "gauss", "rand", "randn", "torch", "all"],
)
@pytest.mark.parametrize("before", [0, 1], ids="after {} normals".format)
def test_a_function_that_draws_is_seeded_and_leaves_no_trace(draw, before):
    def begin() -> None:
        seed_all(1)
        for _ in range(before):
            random.gauss(0, 1), np.random.randn(), torch.randn(())

    begin()
    plain = draws()
    with fork_rng(7):
        expected = draw()
    begin()
    seeding = SeedOnDraw()
    assert seeding.run(lambda: "drew nothing", lambda: 7) == "drew nothing"
    assert seeding.run(draw, lambda: 7) == expected
    assert seeding.run(draw, lambda: 7) == expected
    assert seeding.draws
    assert draws() == plain


def test_functions_that_draw_nothing_run_once_and_are_not_seeded():
    seed_all(1)
    draws()  # without half of a pair, which counts as drawn
    np.random.seed(1)
    calls, seeds, seeding = [], [], SeedOnDraw()
    for index in range(3):
        seeding.run(lambda index=index: calls.append(index), lambda: seeds.append(7) or 7)
    assert (calls, seeds, seeding.draws) == ([0, 1, 2], [], False)
    assert seeding.run(lambda: calls.append(random.random()), lambda: seeds.append(7) or 7) is None
    assert (len(calls), seeds, seeding.draws) == (5, [7], True)
    seeding.run(lambda: calls.append(random.random()), lambda: seeds.append(8) or 8)
    assert (len(calls), seeds) == (6, [7, 8])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_generators_are_restored_if_a_function_draws_and_fails(error):
    def draw_and_fail() -> None:
        draws()
        raise error

    seed_all(1)
    plain = draws()
    seed_all(1)
    with pytest.raises(error):
        SeedOnDraw().run(draw_and_fail, lambda: 7)
    assert draws() == plain


def test_state_of_pythons_generator_is_where_cpython_stores_it():
    assert (_find_python_memory() is not None) == (sys.implementation.name == "cpython")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = switches()
    yield
    use_deterministic(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before[2:4]
    assert switches() == before


def switches() -> list[bool]:
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,
    ]


def test_determinism_switches_are_set_and_restored(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    first = switches()
    before = use_deterministic()
    assert switches() == [True, False, True, False, True]
    assert isinstance(before, Determinism)
    inside = use_deterministic(before)
    assert switches() == first
    assert inside.algorithms
    use_deterministic(inside)
    assert switches() == [True, False, True, False, True]
    use_deterministic(False)
    assert switches() == [False, False, False, False, True]


def test_an_operation_without_a_deterministic_form_raises():
    x = torch.ones(1, 1, 2, 2)
    before = use_deterministic()
    try:
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.ones(3).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
    finally:
        use_deterministic(before)
    assert x.sum() == 4


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that the variable that the code sets is restored


def test_cublas_variable_is_set_before_cuda_starts(one_gpu, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    use_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_started_cuda_without_workspace_is_refused_without_changes(one_gpu, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    before = switches()
    with pytest.raises(
        ConfigError, match=r"use_deterministic: CUDA has started with CUBLAS_WORKSPACE_CONFIG=''. Set the variable to ':4096:8'"
    ):
        use_deterministic()
    assert switches() == before


def test_started_cuda_with_workspace_is_accepted(one_gpu, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert not use_deterministic().algorithms
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_environment_does_not_change_without_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    use_deterministic()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.fixture(autouse=True)
def tf32_restored() -> Iterator[None]:
    before = tf32_switches()
    yield
    torch.set_float32_matmul_precision(before[2])
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before[:2]
    assert tf32_switches() == before


def tf32_switches() -> list:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return [cuda.matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision()]


def test_tf32_switches_are_set_and_restored():
    first = tf32_switches()
    assert use_tf32() == Tf32(matmul=first[0], cudnn=first[1])
    assert tf32_switches() == [True, True, "high"]
    before = use_tf32(False)
    assert before == Tf32(matmul=True, cudnn=True)
    assert tf32_switches() == [False, False, "highest"]
    use_tf32(Tf32(matmul=False, cudnn=True))
    assert tf32_switches() == [False, True, "highest"]


def test_unchanged_setting_keeps_torch_matmul_precision():
    torch.set_float32_matmul_precision("medium")
    assert use_tf32(use_tf32()).matmul
    assert tf32_switches()[2] == "medium"


def test_newer_torch_fp32_precision_switches_are_read_and_set():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert use_tf32(False).matmul
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    use_tf32(True)
    assert [torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.rnn.fp32_precision] == ["tf32", "tf32"]


@pytest.mark.parametrize("settings", [None, "high", 1])
def test_invalid_tf32_settings_are_refused(settings):
    with pytest.raises(ConfigError, match="use_tf32: settings must be True, False or the result of an earlier call, got"):
        use_tf32(settings)
