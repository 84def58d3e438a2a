"""Values of pixels: 0 to 1 while something is computed, and back in the dtype that came.

What depends on the value of a pixel alone, or on how often each value is there: on images from 0 to 1, in 256 levels.

Brightness, contrast, colour and sharpness: an image blended with, or pushed away from, one that has none of it.

Each takes images ``[n, channels, height, width]`` from 0 to 1 and factors ``[n]``: 1 changes nothing, 0 gives the image that
has none, and more than 1 pushes away from that. So they agree with Pillow's ``ImageEnhance`` up to rounding.

Rotation, shear and translation: about the centre, bilinear, with ``fill`` where the image has nothing.

The operations of AutoAugment and its successors by name, with their ranges; and images that each go through some of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import is_number
from dtrain.transforms.batches import image_ops


def to_unit_range(images: Tensor, caller: str) -> Tensor:
    """Images with values from 0 to 1, in at least float32: uint8 is divided by 255, floats are taken to be so already.

    Raises:
        ConfigError: another dtype.
    """
    if images.dtype == torch.uint8:
        return images.float() / 255.0
    if not images.is_floating_point():
        raise ConfigError(f"{caller}: needs images as uint8, or as floats from 0 to 1, got {images.dtype}")
    return images.to(torch.promote_types(images.dtype, torch.float32))


def from_unit_range(made: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``to_unit_range`` led to, in the dtype of the images it was given."""
    return (made * 255.0).round().clamp(0.0, 255.0).to(dtype) if dtype == torch.uint8 else made.to(dtype)


def to_device_async(values: Sequence[float] | Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host ``[n]`` on ``device``, without waiting for it: a copy from pageable memory would."""
    made = torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def per_image(amount: Tensor) -> Tensor:
    """Amounts ``[n]`` as ``[n, 1, 1, 1]``."""
    return amount.reshape(-1, 1, 1, 1)


PIXEL_LEVELS = 256


def autocontrast(images: Tensor) -> Tensor:
    """Each channel stretched so that its darkest pixel is 0 and its brightest 1; one of a single value stays as it is."""
    low, high = images.amin(dim=(-2, -1), keepdim=True), images.amax(dim=(-2, -1), keepdim=True)
    flat = high <= low
    return torch.where(flat, images, (images - low) / torch.where(flat, 1.0, high - low))


def equalize(images: Tensor) -> Tensor:
    """Each channel's values replaced so that all are about equally frequent, as Pillow's ``ImageOps.equalize`` does."""
    levels = _to_pixel_levels(images).flatten(0, 1).flatten(1)  # [n * channels, pixels]
    counts = torch.zeros((len(levels), PIXEL_LEVELS), dtype=torch.int64, device=images.device)
    counts.scatter_add_(1, levels, torch.ones_like(levels))
    last = ((counts > 0) * torch.arange(PIXEL_LEVELS, device=images.device)).amax(dim=1, keepdim=True)
    step = (levels.shape[1] - counts.gather(1, last)) // (PIXEL_LEVELS - 1)  # pixels to a level, the brightest ones left out
    below = counts.cumsum(dim=1) - counts
    table = ((below + step // 2) // step.clamp(min=1)).clamp(max=PIXEL_LEVELS - 1)
    table = torch.where(step == 0, torch.arange(PIXEL_LEVELS, device=images.device), table)
    return (table.gather(1, levels).to(images.dtype) / (PIXEL_LEVELS - 1)).reshape(images.shape)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """The highest ``bits`` ``[n]``, 1 to 8, of each value's eight."""
    low = 2 ** (8 - per_image(bits).round().to(torch.int64))
    return (_to_pixel_levels(images) // low * low).to(images.dtype) / (PIXEL_LEVELS - 1)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Values inverted from ``threshold`` ``[n]`` on, in levels: 256 inverts none and 0 all."""
    return torch.where(images * (PIXEL_LEVELS - 1) >= per_image(threshold), 1.0 - images, images)


def _to_pixel_levels(images: Tensor) -> Tensor:
    """Values as whole levels, int64."""
    return (images * (PIXEL_LEVELS - 1)).round().clamp(0, PIXEL_LEVELS - 1).to(torch.int64)


_LUMA_WEIGHTS = (0.299, 0.587, 0.114)  # ITU-R BT.601: what an eye makes of red, green and blue


def adjust_brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Blended with black."""
    return (images * per_image(factor)).clamp(0.0, 1.0)


def adjust_contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blended with the mean grey of the image."""
    return _blend(to_grayscale(images).mean(dim=(-2, -1), keepdim=True), images, factor)


def adjust_saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Blended with the grey image."""
    return _blend(to_grayscale(images), images, factor)


def adjust_sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blended with the image smoothed over 3 x 3 pixels, of which the middle one counts five times; its border stays."""
    smooth = images.clone()
    if min(images.shape[-2:]) >= 3:
        inner = images[..., 1:-1, 1:-1]
        smooth[..., 1:-1, 1:-1] = (9.0 * F.avg_pool2d(images, 3, stride=1) + 4.0 * inner) / 13.0
    return _blend(smooth, images, factor)


def to_grayscale(images: Tensor) -> Tensor:
    """How bright each pixel is ``[n, 1, height, width]``: of three channels as of red, green and blue, else their mean."""
    if images.shape[1] != len(_LUMA_WEIGHTS):
        return images.mean(dim=1, keepdim=True)
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]
    return _LUMA_WEIGHTS[0] * red + _LUMA_WEIGHTS[1] * green + _LUMA_WEIGHTS[2] * blue


def _blend(base: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    return torch.lerp(base.expand_as(images), images, per_image(factor)).clamp(0.0, 1.0)


def rotate(images: Tensor, degrees: Tensor, fill: float) -> Tensor:
    """Turned counterclockwise by ``degrees`` ``[n]``."""
    angle = degrees * (math.pi / 180.0)
    cos, sin = angle.cos(), angle.sin()
    return _warp_affine(images, (cos, -sin, 0.0), (sin, cos, 0.0), fill)


def shear_x(images: Tensor, amount: Tensor, fill: float) -> Tensor:
    """Rows moved to the left by ``amount`` ``[n]`` times how far they are below the middle."""
    return _warp_affine(images, (1.0, amount, 0.0), (0.0, 1.0, 0.0), fill)


def shear_y(images: Tensor, amount: Tensor, fill: float) -> Tensor:
    """Columns moved up by ``amount`` ``[n]`` times how far they are right of the middle."""
    return _warp_affine(images, (1.0, 0.0, 0.0), (amount, 1.0, 0.0), fill)


def translate_x(images: Tensor, share: Tensor, fill: float) -> Tensor:
    """Moved to the left by a ``share`` ``[n]`` of the width."""
    return _warp_affine(images, (1.0, 0.0, share), (0.0, 1.0, 0.0), fill)


def translate_y(images: Tensor, share: Tensor, fill: float) -> Tensor:
    """Moved up by a ``share`` ``[n]`` of the height."""
    return _warp_affine(images, (1.0, 0.0, 0.0), (0.0, 1.0, share), fill)


_AffineRow = tuple[Tensor | float, Tensor | float, Tensor | float]


def _warp_affine(images: Tensor, across: _AffineRow, down: _AffineRow, fill: float) -> Tensor:
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


MAX_LEVEL = 10  # the highest level of strength

Chain: TypeAlias = Sequence[tuple[str, float]]
"""Operations that one image goes through in this order, each with its amount: ``[("rotate", -30.0), ("posterize", 4)]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOperation:
    """An operation on images from 0 to 1, and how its amount follows from a level of strength, 0 to 10.

    Args:
        apply: ``(images [n, channels, height, width], amounts [n], fill) -> images``.
        identity_amount: the amount at level 0, which changes nothing.
        max_offset: how far the amount is from that at level 10.
        signed: whether it may be that far to either side.
        integer: whether it is rounded to a whole number.
    """

    apply: Callable[[Tensor, Tensor, float], Tensor]
    identity_amount: float = 0.0
    max_offset: float = 0.0
    signed: bool = False
    integer: bool = False

    def amount(self, level: float, rng: random.Random) -> float:
        """What ``level`` comes to; a signed one draws its side."""
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
    "autocontrast": ImageOperation(apply=lambda images, amount, fill: image_ops.autocontrast(images)),
    "equalize": ImageOperation(apply=lambda images, amount, fill: image_ops.equalize(images)),
    "rotate": _warp_operation(image_ops.rotate, 30.0),
    "solarize": ImageOperation(
        apply=lambda images, amount, fill: image_ops.solarize(images, amount), identity_amount=256.0, max_offset=-256.0
    ),
    "colour": _blend_operation(image_ops.adjust_saturation),
    "posterize": ImageOperation(
        apply=lambda images, amount, fill: image_ops.posterize(images, amount),
        identity_amount=8.0,
        max_offset=-4.0,
        integer=True,
    ),
    "contrast": _blend_operation(image_ops.adjust_contrast),
    "brightness": _blend_operation(image_ops.adjust_brightness),
    "sharpness": _blend_operation(image_ops.adjust_sharpness),
    "shear_x": _warp_operation(image_ops.shear_x, 0.3),
    "shear_y": _warp_operation(image_ops.shear_y, 0.3),
    "translate_x": _warp_operation(image_ops.translate_x, 150 / 331),  # AutoAugment's 150 pixels of images of 331
    "translate_y": _warp_operation(image_ops.translate_y, 150 / 331),
}
"""Ranges are those of Cubuk et al. 2019 (AutoAugment, arXiv:1805.09501, table 6)."""


def apply_chains(images: Tensor, chains: Sequence[Chain], fill: float) -> Tensor:
    """Each image through its own chain; those with one operation in common go through it together.

    Args:
        images: ``[n, channels, height, width]`` from 0 to 1.
        chains: one for each image.
        fill: what is seen beside an image that was moved.

    Host sync: none.
    """
    for at in range(max(map(len, chains), default=0)):
        together: dict[str, list[int]] = {}
        for index, chain in enumerate(chains):
            if at < len(chain):
                together.setdefault(chain[at][0], []).append(index)
        images = _apply_grouped(images, {name: [(i, chains[i][at][1]) for i in them] for name, them in together.items()}, fill)
    return images


def _apply_grouped(images: Tensor, groups: dict[str, list[tuple[int, float]]], fill: float) -> Tensor:
    made = images.clone()
    for name, members in groups.items():
        amounts = to_device_async([amount for _, amount in members], images.dtype, images.device)
        if len(members) == len(images):
            return IMAGE_OPERATIONS[name].apply(images, amounts, fill)
        which = to_device_async([index for index, _ in members], torch.int64, images.device)
        made.index_copy_(0, which, IMAGE_OPERATIONS[name].apply(images.index_select(0, which), amounts, fill))
    return made


def check_operations(names: Sequence[str], caller: str) -> None:
    """Raise ``ConfigError`` unless all are names of operations, and there are some."""
    unknown = [name for name in names if name not in IMAGE_OPERATIONS]
    if unknown or isinstance(names, str) or not names:
        raise ConfigError(
            f"{caller}: operations are some of {', '.join(IMAGE_OPERATIONS)}; got {unknown[0] if unknown else names!r}"
        )


def check_chains(chains: Sequence[Chain], count: int, caller: str) -> None:
    """Raise ``ConfigError`` unless there is a chain of known operations for each of ``count`` images."""
    if len(chains) != count:
        raise ConfigError(f"{caller}: needs a chain for each of {count} images, got {len(chains)}")
    for chain in chains:
        for name, _ in chain:
            check_operations([name], caller)


def check_level(level: float, caller: str, name: str) -> None:
    """Raise ``ConfigError`` unless ``level`` is in ``[0, 10]``."""
    if not is_number(level) or not 0 <= level <= MAX_LEVEL:
        raise ConfigError(f"{caller}: needs {name} in [0, {MAX_LEVEL}], got {name}={level!r}")
