"""Boxes in images, one for a batch or one for each sample: drawn, clipped at the border, as masks, and how much they cover."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from dtrain.errors import ConfigError

Box: TypeAlias = Tensor | Sequence[int]
"""``(top, left, bottom, right)`` in pixels, the last two outside; or int64 ``[boxes, 4]`` of them."""

BoxPlacement: TypeAlias = Literal["centre", "even", "inside"]
"""``centre``: its centre is any pixel, so what stands out is clipped. ``even``: every pixel is covered equally often.
``inside``: never clipped."""


def to_box_tensor(box: Box, device: torch.device, caller: str) -> Tensor:
    """``box`` as int64 ``[boxes, 4]`` on ``device``.

    Raises:
        ConfigError: another shape, or fractions of pixels.
    """
    made = box if isinstance(box, Tensor) else torch.tensor(box)
    if made.is_floating_point() or made.ndim not in (1, 2) or made.shape[-1] != 4:
        raise ConfigError(f"{caller}: a box is (top, left, bottom, right) in whole pixels, [4] or [batch, 4], got {box!r}")
    return made.reshape(-1, 4).to(device, torch.int64, non_blocking=True)


def sample_boxes(
    sides: tuple[Tensor, Tensor], size: tuple[int, int], placement: BoxPlacement, generator: torch.Generator
) -> Tensor:
    """Boxes at random places, int64 ``[boxes, 4]`` on the generator's device, clipped at the border.

    Args:
        sides: heights and widths before they are clipped, int64 ``[boxes]``, on that device.
        size: height and width of the images.
        placement: how places are drawn.
        generator: on any device.

    Host sync: none.
    """
    starts, ends = [], []
    for side, extent in zip(sides, size, strict=True):
        if placement == "centre":
            low, count = -(side // 2), torch.full_like(side, extent)
        elif placement == "even":
            low, count = 1 - side, extent + side - 1
        else:
            low, count = torch.zeros_like(side), extent - side + 1
        drawn = torch.rand(side.shape, generator=generator, device=side.device) * count
        start = low + torch.minimum(drawn.long(), count - 1)  # the product may round up to the count itself
        starts.append(start.clamp(0, extent))
        ends.append((start + side).clamp(0, extent))
    return torch.stack([*starts, *ends], dim=1)


def box_mask(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Which pixels are inside: bool ``[boxes, 1, height, width]``."""
    inside = []
    for axis, extent in enumerate(size):
        at = torch.arange(extent, device=boxes.device)
        inside.append((at >= boxes[:, axis, None]) & (at < boxes[:, axis + 2, None]))
    return (inside[0][:, :, None] & inside[1][:, None, :]).unsqueeze(1)


def box_area_fraction(boxes: Tensor, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The share of the image that each covers ``[boxes]``, without what lies outside."""
    covered = torch.ones(len(boxes), dtype=dtype, device=boxes.device)
    for axis, extent in enumerate(size):
        length = boxes[:, axis + 2].clamp(0, extent) - boxes[:, axis].clamp(0, extent)
        covered = covered * length.clamp(min=0).to(dtype) / extent
    return covered


def check_placement(placement: str, caller: str) -> None:
    """Raise ``ConfigError`` unless it is one of ``Place``."""
    if placement not in get_args(BoxPlacement):
        raise ConfigError(f"{caller}: place is one of {', '.join(get_args(BoxPlacement))}, got {placement!r}")
