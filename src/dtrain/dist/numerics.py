"""``use_deterministic``: the same bits from the same run, at the price of speed, by an explicit call that can be undone.

``use_tf32``: float32 products in the 10 bits of TensorFloat-32, by an explicit call that can be undone."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from dtrain.errors import ConfigError

_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
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
    before = _read_determinism()
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


def _read_determinism() -> Determinism:
    return Determinism(
        algorithms=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        fill_uninitialized_memory=bool(torch.utils.deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
        cudnn_deterministic=bool(torch.backends.cudnn.deterministic),
        cudnn_benchmark=bool(torch.backends.cudnn.benchmark),
    )


def _reserve_workspace() -> None:
    """cuBLAS sums in a fixed order only with workspaces of a fixed size, which it is told by a variable when it starts."""
    if torch.cuda.device_count() == 0 or os.environ.get(_CUBLAS_WORKSPACE) in _DETERMINISTIC_WORKSPACES:
        return
    if torch.cuda.is_initialized():
        raise ConfigError(
            f"use_deterministic: CUDA has started with {_CUBLAS_WORKSPACE}={os.environ.get(_CUBLAS_WORKSPACE)!r}; "
            f"set it to {_DETERMINISTIC_WORKSPACES[0]!r} before the script starts, or call this first"
        )
    os.environ[_CUBLAS_WORKSPACE] = _DETERMINISTIC_WORKSPACES[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tf32:
    """Where NVIDIA GPUs (Ampere and newer) may compute products of float32 numbers in TensorFloat-32.

    Args:
        matmul: in matrix products of cuBLAS.
        cudnn: in convolutions and recurrent layers of cuDNN.
    """

    matmul: bool
    cudnn: bool


def use_tf32(settings: bool | Tf32 = True) -> Tf32:
    """The settings that held before; from now on TensorFloat-32 is used everywhere, nowhere, or as ``settings`` say.

    >>> before = use_tf32()
    >>> use_tf32(before)
    Tf32(matmul=True, cudnn=True)

    Sums stay in float32; products lose 13 of float32's 23 bits and are up to 8 times as fast. It concerns tensors that are
    float32, so nothing that ``Precision`` or ``autocast`` computes in 16 bits. Without such a GPU it has no effect. torch
    begins with ``Tf32(matmul=False, cudnn=True)``.

    Args:
        settings: True or False for both, or what an earlier call returned, which undoes it.

    Mutates: torch's global switches ``torch.backends.cuda.matmul.allow_tf32`` and ``torch.backends.cudnn.allow_tf32``, where
        they change.

    Raises:
        ConfigError: neither a bool nor a ``Tf32``.

    Source: the page "CUDA semantics" of PyTorch's documentation.
    """
    if isinstance(settings, bool):
        settings = Tf32(matmul=settings, cudnn=settings)
    if not isinstance(settings, Tf32):
        raise ConfigError(f"use_tf32: takes True, False, or what it returned before, got {settings!r}")
    before = _read_tf32()
    # These switches set torch's newer ones (fp32_precision) as well; the other way round torch refuses to read them again.
    if settings.matmul != before.matmul:
        torch.backends.cuda.matmul.allow_tf32 = settings.matmul
    if settings.cudnn != before.cudnn:
        torch.backends.cudnn.allow_tf32 = settings.cudnn
    return before


def _read_tf32() -> Tf32:
    # Read from the newer switches: they can be read whichever have been set.
    cudnn = torch.backends.cudnn
    kinds = [cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]  # type: ignore[attr-defined]
    return Tf32(matmul=torch.backends.cuda.matmul.fp32_precision == "tf32", cudnn=all(kind == "tf32" for kind in kinds))
