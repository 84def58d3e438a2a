"""What depends on the value of a pixel alone, or on how often each value is there: on images from 0 to 1, in 256 levels."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.algorithms.batches.image.values import each

LEVELS = 256


def autocontrast(images: Tensor) -> Tensor:
    """Each channel stretched so that its darkest pixel is 0 and its brightest 1; one of a single value stays as it is."""
    low, high = images.amin(dim=(-2, -1), keepdim=True), images.amax(dim=(-2, -1), keepdim=True)
    flat = high <= low
    return torch.where(flat, images, (images - low) / torch.where(flat, 1.0, high - low))


def equalize(images: Tensor) -> Tensor:
    """Each channel's values replaced so that all are about equally frequent, as Pillow's ``ImageOps.equalize`` does."""
    levels = _levels(images).flatten(0, 1).flatten(1)  # [n * channels, pixels]
    counts = torch.zeros((len(levels), LEVELS), dtype=torch.int64, device=images.device)
    counts.scatter_add_(1, levels, torch.ones_like(levels))
    last = ((counts > 0) * torch.arange(LEVELS, device=images.device)).amax(dim=1, keepdim=True)
    step = (levels.shape[1] - counts.gather(1, last)) // (LEVELS - 1)  # pixels to a level, the brightest ones left out
    below = counts.cumsum(dim=1) - counts
    table = ((below + step // 2) // step.clamp(min=1)).clamp(max=LEVELS - 1)
    table = torch.where(step == 0, torch.arange(LEVELS, device=images.device), table)
    return (table.gather(1, levels).to(images.dtype) / (LEVELS - 1)).reshape(images.shape)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """The highest ``bits`` ``[n]``, 1 to 8, of each value's eight."""
    low = 2 ** (8 - each(bits).round().to(torch.int64))
    return (_levels(images) // low * low).to(images.dtype) / (LEVELS - 1)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Values inverted from ``threshold`` ``[n]`` on, in levels: 256 inverts none and 0 all."""
    return torch.where(images * (LEVELS - 1) >= each(threshold), 1.0 - images, images)


def _levels(images: Tensor) -> Tensor:
    """Values as whole levels, int64."""
    return (images * (LEVELS - 1)).round().clamp(0, LEVELS - 1).to(torch.int64)
