"""``use_tf32``: float32 products in the 10 bits of TensorFloat-32, by an explicit call that can be undone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dtrain.errors import ConfigError


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
    before = _settings()
    # These switches set torch's newer ones (fp32_precision) as well; the other way round torch refuses to read them again.
    if settings.matmul != before.matmul:
        torch.backends.cuda.matmul.allow_tf32 = settings.matmul
    if settings.cudnn != before.cudnn:
        torch.backends.cudnn.allow_tf32 = settings.cudnn
    return before


def _settings() -> Tf32:
    # Read from the newer switches: they can be read whichever have been set.
    cudnn = torch.backends.cudnn
    kinds = [cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]  # type: ignore[attr-defined]
    return Tf32(matmul=torch.backends.cuda.matmul.fp32_precision == "tf32", cudnn=all(kind == "tf32" for kind in kinds))
