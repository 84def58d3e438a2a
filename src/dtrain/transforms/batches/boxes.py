"""Sample boxes in images, clip boxes at the border, and convert boxes to masks and area fractions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from dtrain.errors import ConfigError

Box: TypeAlias = Tensor | Sequence[int]
"""``(top, left, bottom, right)`` in pixels, with exclusive ends; or int64 ``[boxes, 4]``."""

BoxPlacement: TypeAlias = Literal["center", "even", "inside"]
"""``center``: the center is any pixel, and parts outside are clipped. ``even``: every pixel is covered equally often.
``inside``: never clipped."""


def to_box_tensor(box: Box, device: torch.device, caller: str) -> Tensor:
    """Convert ``box`` to int64 ``[boxes, 4]`` on ``device``.

    Raises:
        ConfigError: ``box`` has another shape or is not integral.
    """
    boxes = box if isinstance(box, Tensor) else torch.tensor(box)
    if boxes.is_floating_point() or boxes.ndim not in (1, 2) or boxes.shape[-1] != 4:
        raise ConfigError(f"{caller}: box must be integers (top, left, bottom, right), [4] or [batch, 4], got {box!r}.")
    return boxes.reshape(-1, 4).to(device, torch.int64, non_blocking=True)


def sample_boxes(
    sides: tuple[Tensor, Tensor], size: tuple[int, int], placement: BoxPlacement, generator: torch.Generator
) -> Tensor:
    """Sample boxes at random positions, int64 ``[boxes, 4]`` on the generator's device, clipped at the border.

    Args:
        sides: heights and widths before clipping, int64 ``[boxes]``, on the generator's device.
        size: height and width of the images.
        placement: distribution of the positions.
        generator: generator on any device.

    Host sync: none.
    """
    starts, ends = [], []
    for side, extent in zip(sides, size, strict=True):
        if placement == "center":
            low, count = -(side // 2), torch.full_like(side, extent)
        elif placement == "even":
            low, count = 1 - side, extent + side - 1
        else:
            low, count = torch.zeros_like(side), extent - side + 1
        offset = torch.rand(side.shape, generator=generator, device=side.device) * count
        # The product may round up to `count`.
        start = low + torch.minimum(offset.long(), count - 1)
        starts.append(start.clamp(0, extent))
        ends.append((start + side).clamp(0, extent))
    return torch.stack([*starts, *ends], dim=1)


def box_mask(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the mask of the pixels inside each box, bool ``[boxes, 1, height, width]``."""
    inside = []
    for axis, extent in enumerate(size):
        pixels = torch.arange(extent, device=boxes.device)
        inside.append((pixels >= boxes[:, axis, None]) & (pixels < boxes[:, axis + 2, None]))
    return (inside[0][:, :, None] & inside[1][:, None, :]).unsqueeze(1)


def box_area_fraction(boxes: Tensor, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the fraction of the image that each box covers ``[boxes]``, without parts outside."""
    covered = torch.ones(len(boxes), dtype=dtype, device=boxes.device)
    for axis, extent in enumerate(size):
        length = boxes[:, axis + 2].clamp(0, extent) - boxes[:, axis].clamp(0, extent)
        covered = covered * length.clamp(min=0).to(dtype) / extent
    return covered


def check_placement(placement: str, caller: str) -> None:
    """Raise ``ConfigError`` unless ``placement`` is a ``BoxPlacement``."""
    if placement not in get_args(BoxPlacement):
        raise ConfigError(f"{caller}: placement must be one of {', '.join(get_args(BoxPlacement))}, got {placement!r}.")
