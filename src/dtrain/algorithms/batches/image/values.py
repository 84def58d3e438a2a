"""Values of pixels: 0 to 1 while something is computed, and back in the dtype that came."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtrain.errors import ConfigError


def as_unit(images: Tensor, where: str) -> Tensor:
    """Images with values from 0 to 1, in at least float32: uint8 is divided by 255, floats are taken to be so already.

    Raises:
        ConfigError: another dtype.
    """
    if images.dtype == torch.uint8:
        return images.float() / 255.0
    if not images.is_floating_point():
        raise ConfigError(f"{where}: needs images as uint8, or as floats from 0 to 1, got {images.dtype}")
    return images.to(torch.promote_types(images.dtype, torch.float32))


def as_before(made: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``as_unit`` led to, in the dtype of the images it was given."""
    return (made * 255.0).round().clamp(0.0, 255.0).to(dtype) if dtype == torch.uint8 else made.to(dtype)


def on_device(values: Sequence[float] | Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host ``[n]`` on ``device``, without waiting for it: a copy from pageable memory would."""
    made = torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def each(amount: Tensor) -> Tensor:
    """Amounts ``[n]`` as ``[n, 1, 1, 1]``."""
    return amount.reshape(-1, 1, 1, 1)
