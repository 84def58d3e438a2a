"""Switch torch to deterministic algorithms (``use_deterministic``) or TensorFloat-32 products (``use_tf32``), reversibly."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from dtrain.errors import ConfigError

_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Determinism:
    """Settings of torch that control bitwise reproducibility."""

    algorithms: bool
    warn_only: bool
    fill_uninitialized_memory: bool
    cudnn_deterministic: bool
    cudnn_benchmark: bool


def use_deterministic(settings: bool | Determinism = True) -> Determinism:
    """Make torch deterministic, or restore ``settings``; return the previous settings.

    Operations without a deterministic implementation raise. Seeds are not changed; see ``seed_all``.

    Args:
        settings: True for deterministic algorithms everywhere, False for torch's defaults, or the result of an earlier call,
            which restores the earlier settings.

    Mutates: torch's global switches (``torch.use_deterministic_algorithms``, ``torch.utils.deterministic``,
        ``torch.backends.cudnn``). If there is a GPU and CUDA has not started, also the variable ``CUBLAS_WORKSPACE_CONFIG`` of
        this process, which is not restored.

    Example:
        >>> import dtrain as dt
        >>> before = dt.dist.use_deterministic()
        >>> dt.dist.use_deterministic(before).algorithms
        True

    Raises:
        ConfigError: CUDA has started without ``CUBLAS_WORKSPACE_CONFIG``. cuBLAS reads the variable only at the start.

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
    """Set the variable for cuBLAS workspaces of a fixed size. Without them, cuBLAS does not sum in a fixed order."""
    if torch.cuda.device_count() == 0 or os.environ.get(_CUBLAS_WORKSPACE) in _DETERMINISTIC_WORKSPACES:
        return
    if torch.cuda.is_initialized():
        raise ConfigError(
            f"use_deterministic: CUDA has started with {_CUBLAS_WORKSPACE}={os.environ.get(_CUBLAS_WORKSPACE)!r}. "
            f"Set the variable to {_DETERMINISTIC_WORKSPACES[0]!r} before the script starts, or call use_deterministic first."
        )
    os.environ[_CUBLAS_WORKSPACE] = _DETERMINISTIC_WORKSPACES[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tf32:
    """Settings for TensorFloat-32 in products of float32 numbers, on NVIDIA GPUs of the Ampere generation or newer.

    Args:
        matmul: if True, matrix products of cuBLAS use TensorFloat-32.
        cudnn: if True, convolutions and recurrent layers of cuDNN use TensorFloat-32.
    """

    matmul: bool
    cudnn: bool


def use_tf32(settings: bool | Tf32 = True) -> Tf32:
    """Switch TensorFloat-32 products on or off, or restore ``settings``; return the previous settings.

    Products lose 13 of float32's 23 bits and are up to 8 times as fast. Sums stay in float32. Only float32 tensors are
    affected, so nothing that ``Precision`` or ``autocast`` computes in 16 bits. torch starts with
    ``Tf32(matmul=False, cudnn=True)``.

    Args:
        settings: True or False for both kinds of products, or the result of an earlier call, which restores the earlier
            settings.

    Mutates: torch's global switches ``torch.backends.cuda.matmul.allow_tf32`` and ``torch.backends.cudnn.allow_tf32``, if
        they change.

    Example:
        >>> import dtrain as dt
        >>> before = dt.dist.use_tf32()
        >>> dt.dist.use_tf32(before)
        Tf32(matmul=True, cudnn=True)

    Raises:
        ConfigError: ``settings`` is neither a bool nor a ``Tf32``.

    Source: the page "CUDA semantics" of PyTorch's documentation.
    """
    if isinstance(settings, bool):
        settings = Tf32(matmul=settings, cudnn=settings)
    if not isinstance(settings, Tf32):
        raise ConfigError(f"use_tf32: settings must be True, False or the result of an earlier call, got {settings!r}")
    before = _read_tf32()
    # These switches also set torch's newer ones (fp32_precision). After setting the newer ones, torch refuses to read these.
    if settings.matmul != before.matmul:
        torch.backends.cuda.matmul.allow_tf32 = settings.matmul
    if settings.cudnn != before.cudnn:
        torch.backends.cudnn.allow_tf32 = settings.cudnn
    return before


def _read_tf32() -> Tf32:
    # The newer switches can be read at any time.
    cudnn = torch.backends.cudnn
    kinds = [cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]  # type: ignore[attr-defined]
    return Tf32(matmul=torch.backends.cuda.matmul.fp32_precision == "tf32", cudnn=all(kind == "tf32" for kind in kinds))
