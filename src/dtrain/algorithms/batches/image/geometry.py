"""Rotation, shear and translation: about the centre, bilinear, with ``fill`` where the image has nothing."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor


def rotate(images: Tensor, degrees: Tensor, fill: float) -> Tensor:
    """Turned counterclockwise by ``degrees`` ``[n]``."""
    angle = degrees * (math.pi / 180.0)
    cos, sin = angle.cos(), angle.sin()
    return _moved(images, (cos, -sin, 0.0), (sin, cos, 0.0), fill)


def shear_x(images: Tensor, amount: Tensor, fill: float) -> Tensor:
    """Rows moved to the left by ``amount`` ``[n]`` times how far they are below the middle."""
    return _moved(images, (1.0, amount, 0.0), (0.0, 1.0, 0.0), fill)


def shear_y(images: Tensor, amount: Tensor, fill: float) -> Tensor:
    """Columns moved up by ``amount`` ``[n]`` times how far they are right of the middle."""
    return _moved(images, (1.0, 0.0, 0.0), (amount, 1.0, 0.0), fill)


def translate_x(images: Tensor, share: Tensor, fill: float) -> Tensor:
    """Moved to the left by a ``share`` ``[n]`` of the width."""
    return _moved(images, (1.0, 0.0, share), (0.0, 1.0, 0.0), fill)


def translate_y(images: Tensor, share: Tensor, fill: float) -> Tensor:
    """Moved up by a ``share`` ``[n]`` of the height."""
    return _moved(images, (1.0, 0.0, 0.0), (0.0, 1.0, share), fill)


Row = tuple[Tensor | float, Tensor | float, Tensor | float]


def _moved(images: Tensor, across: Row, down: Row, fill: float) -> Tensor:
    """Images whose pixel (x, y), in pixels from the centre, is that of the given ones at ``across . (x, y, width)`` and
    ``down . (x, y, height)``.

    The grid runs from -1 to 1 on both axes, whatever the sizes: so terms from one axis to the other are scaled by their ratio,
    and a shift by a whole width is 2.
    """
    height, width = images.shape[-2:]
    terms = (
        (across[0], across[1] * (height / width), across[2] * 2.0),
        (down[0] * (width / height), down[1], down[2] * 2.0),
    )
    theta = images.new_zeros((len(images), 2, 3))
    for row, values in enumerate(terms):
        for column, value in enumerate(values):
            theta[:, row, column] = value
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return (F.grid_sample(images - fill, grid, "bilinear", "zeros", align_corners=False) + fill).clamp(0.0, 1.0)
