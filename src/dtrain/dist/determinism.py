"""``use_deterministic``: the same bits from the same run, at the price of speed, by an explicit call that can be undone."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from dtrain.errors import ConfigError

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Determinism:
    """torch's settings that decide whether equal runs give equal bits."""

    algorithms: bool
    warn_only: bool
    fill_uninitialized_memory: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool


def use_deterministic(settings: bool | Determinism = True) -> Determinism:
    """The settings that held before; from now on torch computes deterministically, or as ``settings`` say.

    >>> before = use_deterministic()
    >>> use_deterministic(before).algorithms
    True

    Operations without a deterministic implementation raise. Seeds are not touched: see ``seed_all``.

    Args:
        settings: True for deterministic algorithms everywhere, False for torch's defaults, or what an earlier call returned,
            which undoes it.

    Mutates: torch's global switches (``torch.use_deterministic_algorithms``, ``torch.utils.deterministic``,
        ``torch.backends.cudnn``); where there is a GPU and CUDA has not started, the variable ``CUBLAS_WORKSPACE_CONFIG`` of
        this process, which stays.

    Raises:
        ConfigError: CUDA has started without ``CUBLAS_WORKSPACE_CONFIG``, which it reads only then.

    Source: the page "Reproducibility" of PyTorch's documentation.
    """
    before = _settings()
    if isinstance(settings, bool):
        settings = Determinism(
            algorithms=settings,
            warn_only=False,
            fill_uninitialized_memory=True,
            cudnn_deterministic=settings,
            cudnn_benchmark=False,
        )
    if settings.algorithms and not settings.warn_only:
        _reserve_workspace()
    torch.use_deterministic_algorithms(settings.algorithms, warn_only=settings.warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = settings.cudnn_deterministic
    torch.backends.cudnn.benchmark = settings.cudnn_benchmark
    return before


def _settings() -> Determinism:
    return Determinism(
        algorithms=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        fill_uninitialized_memory=bool(torch.utils.deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
        cudnn_deterministic=bool(torch.backends.cudnn.deterministic),
        cudnn_benchmark=bool(torch.backends.cudnn.benchmark),
    )


def _reserve_workspace() -> None:
    """cuBLAS sums in a fixed order only with workspaces of a fixed size, which it is told by a variable when it starts."""
    if torch.cuda.device_count() == 0 or os.environ.get(_WORKSPACE) in _DETERMINISTIC_WORKSPACES:
        return
    if torch.cuda.is_initialized():
        raise ConfigError(
            f"use_deterministic: CUDA has started with {_WORKSPACE}={os.environ.get(_WORKSPACE)!r}; "
            f"set it to {_DETERMINISTIC_WORKSPACES[0]!r} before the script starts, or call this first"
        )
    os.environ[_WORKSPACE] = _DETERMINISTIC_WORKSPACES[0]
