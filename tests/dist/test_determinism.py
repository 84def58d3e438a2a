"""use_deterministic sets torch's switches and restores the previous settings."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from dtrain.dist.rng import Determinism, use_deterministic
from dtrain.errors import ConfigError


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
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that what the code sets is taken back


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
