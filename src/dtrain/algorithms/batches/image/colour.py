"""Brightness, contrast, colour and sharpness: an image blended with, or pushed away from, one that has none of it.

Each takes images ``[n, channels, height, width]`` from 0 to 1 and factors ``[n]``: 1 changes nothing, 0 gives the image that
has none, and more than 1 pushes away from that. So they agree with Pillow's ``ImageEnhance`` up to rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.algorithms.batches.image.values import each

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601: what an eye makes of red, green and blue


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Blended with black."""
    return (images * each(factor)).clamp(0.0, 1.0)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blended with the mean grey of the image."""
    return _blended(grey(images).mean(dim=(-2, -1), keepdim=True), images, factor)


def colour(images: Tensor, factor: Tensor) -> Tensor:
    """Blended with the grey image."""
    return _blended(grey(images), images, factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blended with the image smoothed over 3 x 3 pixels, of which the middle one counts five times; its border stays."""
    smooth = images.clone()
    if min(images.shape[-2:]) >= 3:
        inner = images[..., 1:-1, 1:-1]
        smooth[..., 1:-1, 1:-1] = (9.0 * F.avg_pool2d(images, 3, stride=1) + 4.0 * inner) / 13.0
    return _blended(smooth, images, factor)


def grey(images: Tensor) -> Tensor:
    """How bright each pixel is ``[n, 1, height, width]``: of three channels as of red, green and blue, else their mean."""
    if images.shape[1] != len(_LUMA):
        return images.mean(dim=1, keepdim=True)
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]
    return _LUMA[0] * red + _LUMA[1] * green + _LUMA[2] * blue


def _blended(base: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(base.expand_as(images), images, each(factor)).clamp(0.0, 1.0)
