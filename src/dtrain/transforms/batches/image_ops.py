"""Image operations for augmentation: pixel values, color, affine warps, and chains of random operations per image.

All operations take images ``[n, channels, height, width]`` with values from 0 to 1. Pixel-value operations use 256 levels. The
color operations blend the image with a degenerate image (black, gray, blurred) by a factor ``[n]``: 1 changes nothing, 0 gives
the degenerate image, more than 1 extrapolates. They match Pillow's ``ImageEnhance`` up to rounding. Affine warps are bilinear,
act about the center, and use ``fill`` outside the image.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dtrain.device import is_accelerator
from dtrain.errors import ConfigError


def to_unit_range(images: Tensor, caller: str) -> Tensor:
    """Convert images to values from 0 to 1 in at least float32. uint8 is divided by 255; floats must be from 0 to 1 already.

    Raises:
        ConfigError: another dtype.
    """
    if images.dtype == torch.uint8:
        return images.float() / 255.0
    if not images.is_floating_point():
        raise ConfigError(
            f"{caller}: images must be uint8, or floats from 0 to 1, got {images.dtype}. Divide images of 0 to 255 by 255."
        )
    return images.to(torch.promote_types(images.dtype, torch.float32))


def from_unit_range(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert images from 0 to 1 back to ``dtype``; the inverse of ``to_unit_range``."""
    return (images * 255.0).round().clamp(0.0, 255.0).to(dtype) if dtype == torch.uint8 else images.to(dtype)


def to_device_async(values: Sequence[float] | Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy host numbers to ``device`` as a tensor ``[n]`` without a host sync. A copy from pageable memory would sync."""
    tensor = torch.tensor(values, dtype=dtype, device="cpu")
    return tensor.pin_memory().to(device, non_blocking=True) if is_accelerator(device) else tensor.to(device)


def _per_image(amount: Tensor) -> Tensor:
    return rearrange(amount, "n -> n 1 1 1")


PIXEL_LEVELS = 256


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel to values from 0 to 1. A channel with a single value is unchanged."""
    low, high = images.amin(dim=(-2, -1), keepdim=True), images.amax(dim=(-2, -1), keepdim=True)
    flat = high <= low
    return torch.where(flat, images, (images - low) / torch.where(flat, 1.0, high - low))


def equalize(images: Tensor) -> Tensor:
    """Equalize the histogram of each channel, as Pillow's ``ImageOps.equalize`` does."""
    levels = rearrange(_to_pixel_levels(images), "n c h w -> (n c) (h w)")
    counts = torch.zeros((len(levels), PIXEL_LEVELS), dtype=torch.int64, device=images.device)
    counts.scatter_add_(1, levels, torch.ones_like(levels))
    last = ((counts > 0) * torch.arange(PIXEL_LEVELS, device=images.device)).amax(dim=1, keepdim=True)
    # Pixels per level, without the pixels of the brightest level.
    step = (levels.shape[1] - counts.gather(1, last)) // (PIXEL_LEVELS - 1)
    below = counts.cumsum(dim=1) - counts
    table = ((below + step // 2) // step.clamp(min=1)).clamp(max=PIXEL_LEVELS - 1)
    table = torch.where(step == 0, torch.arange(PIXEL_LEVELS, device=images.device), table)
    return (table.gather(1, levels).to(images.dtype) / (PIXEL_LEVELS - 1)).reshape(images.shape)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest ``bits`` ``[n]``, 1 to 8, of each value's eight bits."""
    low = 2 ** (8 - _per_image(bits).round().to(torch.int64))
    return (_to_pixel_levels(images) // low * low).to(images.dtype) / (PIXEL_LEVELS - 1)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert the values at or above ``threshold`` ``[n]``, in levels: 256 inverts no value, 0 all values."""
    return torch.where(images * (PIXEL_LEVELS - 1) >= _per_image(threshold), 1.0 - images, images)


def _to_pixel_levels(images: Tensor) -> Tensor:
    """Convert values to integer levels, int64."""
    return (images * (PIXEL_LEVELS - 1)).round().clamp(0, PIXEL_LEVELS - 1).to(torch.int64)


# ITU-R BT.601: perceived brightness of red, green and blue.
_LUMA_WEIGHTS = (0.299, 0.587, 0.114)


def adjust_brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend images with black."""
    return (images * _per_image(factor)).clamp(0.0, 1.0)


def adjust_contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend images with the mean gray of the image."""
    return _blend(to_grayscale(images).mean(dim=(-2, -1), keepdim=True), images, factor)


def adjust_saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Blend images with the gray image."""
    return _blend(to_grayscale(images), images, factor)


def adjust_sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend images with a 3 x 3 smoothed image, whose center pixel has weight five; the border is unchanged."""
    smooth = images.clone()
    if min(images.shape[-2:]) >= 3:
        inner = images[..., 1:-1, 1:-1]
        smooth[..., 1:-1, 1:-1] = (9.0 * F.avg_pool2d(images, 3, stride=1) + 4.0 * inner) / 13.0
    return _blend(smooth, images, factor)


def to_grayscale(images: Tensor) -> Tensor:
    """Return the brightness of each pixel ``[n, 1, height, width]``: the luma of RGB images, else the channel mean."""
    if images.shape[1] != len(_LUMA_WEIGHTS):
        return images.mean(dim=1, keepdim=True)
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]
    return _LUMA_WEIGHTS[0] * red + _LUMA_WEIGHTS[1] * green + _LUMA_WEIGHTS[2] * blue


def _blend(base: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(base.expand_as(images), images, _per_image(factor)).clamp(0.0, 1.0)


def rotate(images: Tensor, degrees: Tensor, fill: float) -> Tensor:
    """Rotate images counterclockwise by ``degrees`` ``[n]``."""
    angle = degrees * (math.pi / 180.0)
    cos, sin = angle.cos(), angle.sin()
    return _warp_affine(images, (cos, -sin, 0.0), (sin, cos, 0.0), fill)


def shear_x(images: Tensor, amount: Tensor, fill: float) -> Tensor:
    """Shift each row to the left by ``amount`` ``[n]`` times its distance below the center."""
    return _warp_affine(images, (1.0, amount, 0.0), (0.0, 1.0, 0.0), fill)


def shear_y(images: Tensor, amount: Tensor, fill: float) -> Tensor:
    """Shift each column up by ``amount`` ``[n]`` times its distance right of the center."""
    return _warp_affine(images, (1.0, 0.0, 0.0), (amount, 1.0, 0.0), fill)


def translate_x(images: Tensor, fraction: Tensor, fill: float) -> Tensor:
    """Shift images to the left by a ``fraction`` ``[n]`` of the width."""
    return _warp_affine(images, (1.0, 0.0, fraction), (0.0, 1.0, 0.0), fill)


def translate_y(images: Tensor, fraction: Tensor, fill: float) -> Tensor:
    """Shift images up by a ``fraction`` ``[n]`` of the height."""
    return _warp_affine(images, (1.0, 0.0, 0.0), (0.0, 1.0, fraction), fill)


_AffineRow = tuple[Tensor | float, Tensor | float, Tensor | float]


def _warp_affine(images: Tensor, across: _AffineRow, down: _AffineRow, fill: float) -> Tensor:
    """Warp images: pixel (x, y) from the center comes from ``(across . (x, y, width), down . (x, y, height))``.

    The grid runs from -1 to 1 on both axes for all sizes. So terms between axes are scaled by the ratio of the sides, and a
    shift by a whole width is 2.
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


MAX_LEVEL = 10
"""The highest level of strength."""

Chain: TypeAlias = Sequence[tuple[str, float]]
"""The operations of one image in order, each with its amount: ``[("rotate", -30.0), ("posterize", 4)]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOperation:
    """An operation on images from 0 to 1, with the conversion of a level of strength, 0 to 10, to an amount.

    Args:
        apply: function ``(images [n, channels, height, width], amounts [n], fill) -> images``.
        identity_amount: amount at level 0, which changes nothing.
        max_offset: offset of the amount at level 10.
        signed: if True, the offset has a random sign.
        integer: if True, the amount is rounded to an integer.
    """

    apply: Callable[[Tensor, Tensor, float], Tensor]
    identity_amount: float = 0.0
    max_offset: float = 0.0
    signed: bool = False
    integer: bool = False

    def amount(self, level: float, rng: random.Random) -> float:
        """Return the amount at ``level``. A signed operation draws the sign from ``rng``."""
        distance = self.max_offset * level / MAX_LEVEL
        if self.signed and rng.random() < 0.5:
            distance = -distance
        return round(self.identity_amount + distance) if self.integer else self.identity_amount + distance


def _blend_operation(apply: Callable[[Tensor, Tensor], Tensor]) -> ImageOperation:
    return ImageOperation(
        apply=lambda images, amount, fill: apply(images, amount), identity_amount=1.0, max_offset=0.9, signed=True
    )


def _warp_operation(apply: Callable[[Tensor, Tensor, float], Tensor], max_offset: float) -> ImageOperation:
    return ImageOperation(apply=apply, max_offset=max_offset, signed=True)


IMAGE_OPERATIONS: dict[str, ImageOperation] = {
    "identity": ImageOperation(apply=lambda images, amount, fill: images),
    "autocontrast": ImageOperation(apply=lambda images, amount, fill: autocontrast(images)),
    "equalize": ImageOperation(apply=lambda images, amount, fill: equalize(images)),
    "rotate": _warp_operation(rotate, 30.0),
    "solarize": ImageOperation(
        apply=lambda images, amount, fill: solarize(images, amount), identity_amount=256.0, max_offset=-256.0
    ),
    "color": _blend_operation(adjust_saturation),
    "posterize": ImageOperation(
        apply=lambda images, amount, fill: posterize(images, amount),
        identity_amount=8.0,
        max_offset=-4.0,
        integer=True,
    ),
    "contrast": _blend_operation(adjust_contrast),
    "brightness": _blend_operation(adjust_brightness),
    "sharpness": _blend_operation(adjust_sharpness),
    "shear_x": _warp_operation(shear_x, 0.3),
    "shear_y": _warp_operation(shear_y, 0.3),
    # AutoAugment shifts images of 331 pixels by 150 pixels.
    "translate_x": _warp_operation(translate_x, 150 / 331),
    "translate_y": _warp_operation(translate_y, 150 / 331),
}
"""Operations by name, with the ranges of Cubuk et al. 2019 (AutoAugment, arXiv:1805.09501, table 6)."""


def apply_chains(images: Tensor, chains: Sequence[Chain], fill: float, *, caller: str) -> Tensor:
    """Apply each image's own chain. Images with the same operation at one position are processed together.

    Args:
        images: ``[n, channels, height, width]`` from 0 to 1.
        chains: one chain per image.
        fill: value of pixels beside a moved image.
        caller: method, for errors.

    Host sync: none.

    Raises:
        ConfigError: not one chain per image, or an unknown operation.
    """
    if len(chains) != len(images):
        raise ConfigError(
            f"{caller}: chains must have one chain per image, got {len(chains)} for {len(images)} images. "
            "Draw a chain for each image."
        )
    for position in range(max(map(len, chains), default=0)):
        groups: dict[str, list[tuple[int, float]]] = {}
        for index, chain in enumerate(chains):
            if position < len(chain):
                name, amount = chain[position]
                groups.setdefault(name, []).append((index, amount))
        check_operations(list(groups), caller)
        images = _apply_grouped(images, groups, fill)
    return images


def _apply_grouped(images: Tensor, groups: dict[str, list[tuple[int, float]]], fill: float) -> Tensor:
    output = images.clone()
    for name, members in groups.items():
        amounts = to_device_async([amount for _, amount in members], images.dtype, images.device)
        if len(members) == len(images):
            return IMAGE_OPERATIONS[name].apply(images, amounts, fill)
        indices = to_device_async([index for index, _ in members], torch.int64, images.device)
        output.index_copy_(0, indices, IMAGE_OPERATIONS[name].apply(images.index_select(0, indices), amounts, fill))
    return output


def check_operations(names: Sequence[str], caller: str) -> None:
    """Raise ``ConfigError`` unless ``names`` is a nonempty sequence of operation names."""
    unknown = [name for name in names if name not in IMAGE_OPERATIONS]
    if unknown or isinstance(names, str) or not names:
        raise ConfigError(
            f"{caller}: operations must be some of {', '.join(IMAGE_OPERATIONS)}, got {unknown[0] if unknown else names!r}. "
            "Choose from these names."
        )


# Boxes: regions of images.

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
    boxes = box if isinstance(box, Tensor) else torch.tensor(box, device="cpu")
    if boxes.is_floating_point() or boxes.ndim not in (1, 2) or boxes.shape[-1] != 4:
        raise ConfigError(
            f"{caller}: box must be integers (top, left, bottom, right), [4] or [batch, 4], got {box!r}. "
            "Give the corners in pixels."
        )
    return boxes.reshape(-1, 4).to(device, torch.int64, non_blocking=True)


def sample_boxes(
    sides: tuple[Tensor, Tensor], size: tuple[int, int], placement: BoxPlacement, generator: torch.Generator
) -> Tensor:
    """Sample boxes at random positions, int64 ``[boxes, 4]`` on the generator's device. Parts may lie outside of the image.

    Args:
        sides: heights and widths, int64 ``[boxes]``, on the generator's device.
        size: height and width of the images.
        placement: distribution of the positions.
        generator: generator on any device.

    Host sync: none.
    """
    starts = []
    for side, extent in zip(sides, size, strict=True):
        low, count = box_starts(side, extent, placement)
        offset = (torch.rand(side.shape, generator=generator, device=side.device) * count).long()
        # The product may round up to `count`.
        starts.append(low + torch.clamp(offset, max=count - 1))
    return torch.stack([*starts, *(start + side for start, side in zip(starts, sides, strict=True))], dim=1)


Side = TypeVar("Side", int, Tensor)


def box_starts(side: Side, extent: int, placement: BoxPlacement) -> tuple[Side | int, Side | int]:
    """Return the first position of a box's start along an axis of ``extent`` pixels, and the number of positions."""
    if placement == "center":
        return -(side // 2), extent
    return (1 - side, extent + side - 1) if placement == "even" else (0, extent - side + 1)


def box_mask(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the mask of the pixels inside each box, bool ``[boxes, 1, height, width]``."""
    inside = []
    for axis, extent in enumerate(size):
        pixels = torch.arange(extent, device=boxes.device)
        inside.append((pixels >= boxes[:, axis, None]) & (pixels < boxes[:, axis + 2, None]))
    rows, columns = inside
    return rearrange(rows, "n h -> n 1 h 1") & rearrange(columns, "n w -> n 1 1 w")


def box_area_fraction(boxes: Tensor, size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return the fraction of the image that each box covers ``[boxes]``, without parts outside."""
    covered = torch.ones(len(boxes), dtype=dtype, device=boxes.device)
    for axis, extent in enumerate(size):
        length = boxes[:, axis + 2].clamp(0, extent) - boxes[:, axis].clamp(0, extent)
        covered = covered * length.clamp(min=0).to(dtype) / extent
    return covered
