"""Cutout: fill random squares of images with one number."""

from __future__ import annotations

from functools import partial
from typing import get_args

import torch
from torch import Tensor

from dtrain.arguments import check_choice, check_int
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameters import Constraint, hyperparameter, is_number
from dtrain.step.transform import Transform
from dtrain.transforms.batches.batch_transform import (
    BatchKey,
    batch_transform,
    get_image_batch,
    map_images,
    require_generator,
)
from dtrain.transforms.batches.image_ops import Box, BoxPlacement, box_mask, box_starts, to_box_tensor
from dtrain.typing import Batch, Schedule


def cutout_batch(
    batch: Batch,
    *,
    length: int | float = 0.5,
    holes: int = 1,
    fill: float = 0.0,
    placement: BoxPlacement = "center",
    input_key: BatchKey | None = None,
    generator: torch.Generator | None = None,
    boxes: Box | None = None,
) -> Batch:
    """Return a batch whose images have squares filled with one number, at random positions per image.

    Formula: ``x = where(inside a square, fill, x)``, a square of side ``length`` pixels, or ``round(length * shorter side)``,
    whose center is any pixel, so parts of a square may lie outside.

    Args:
        batch: images ``[batch, channels, height, width]`` of any dtype, or a mapping, TensorDict or tuple with images; also one
            image ``[channels, height, width]``, in a loader.
        length: side in pixels (int), or as a fraction of the shorter side (float in ``[0, 1]``); the paper uses 16 of 32 pixels
            for CIFAR-10.
        holes: squares per image, at least 1.
        fill: value of the filled pixels; 0 is the mean of normalized images. With 0, a pixel that is not finite stays so.
        placement: ``"center"`` as in the paper; ``"even"`` hides every pixel equally often, ``"inside"`` is never clipped.
        input_key: key of the images; None takes ``"x"``, ``"input_ids"``, or the first entry of a tuple.
        generator: generator for ``boxes`` if not given.
        boxes: ``(top, left, bottom, right)`` for all images, or ``[batch, 4]``.

    Host sync: none; boxes stay on the device.

    Example:
        >>> import dtrain as dt
        >>> batch = {"x": torch.ones(1, 2, 4)}
        >>> dt.transforms.cutout_batch(batch, boxes=(-1, 1, 1, 3))["x"].tolist()
        [[[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]]

    Raises:
        ConfigError: ``generator`` is required but missing, the inputs are not images, or ``length``, ``holes`` or ``placement``
            is out of its range.

    Source: DeVries and Taylor 2017, arXiv:1708.04552, section 3.2.
    """
    _check(length, holes, placement)

    def cut(images: Tensor) -> Tensor:
        size = (images.shape[-2], images.shape[-1])
        if boxes is not None:
            outside = ~box_mask(to_box_tensor(boxes, images.device, "cutout"), size)
        else:
            rng = require_generator(generator, "cutout", "boxes=")
            side = min(length if isinstance(length, int) else round(length * min(size)), *size)
            outside = _sample_outside(images, holes, side, placement, rng)
        if fill == 0 and boxes is None:
            # On a CPU a product takes a quarter of the time of a selection.
            return images * outside
        return torch.where(outside > 0, images, images.new_full((), fill))

    return map_images(batch, input_key, "cutout", cut)


def cutout(
    length: int | float | Schedule = 0.5,
    *,
    holes: int = 1,
    fill: float = 0.0,
    placement: BoxPlacement = "center",
    input_key: BatchKey | None = None,
) -> Transform:
    """Train on images with hidden squares: apply ``cutout_batch`` to each rank's batch.

    Formula: ``x = where(inside a square, fill, x)``

    Args:
        length: side in pixels (int), or as a fraction of the shorter side (float); or a schedule of either.
        holes: squares per image.
        fill: value of the filled pixels.
        placement: distribution of the squares; see ``cutout_batch``.
        input_key: key of the images; None takes ``"x"``, ``"input_ids"``, or the first entry of a tuple.

    Example:
        >>> import dtrain as dt
        >>> def loss_fn(model, batch):
        ...     return dt.soft_cross_entropy(model(batch["x"]).mean((2, 3)), batch["y"])
        >>> step = dt.compose_step(loss_fn, [dt.transforms.cutout(16)])
        >>> model = torch.nn.Conv2d(3, 10, 3)
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> images = torch.rand(8, 3, 32, 32)
        >>> state, metrics = step(state, {"x": images, "y": torch.arange(8)})
        >>> dt.reduce_metrics(metrics)["loss"] > 0
        True

    Raises:
        ConfigError: ``length`` (a schedule is checked in each step), ``holes`` or ``placement`` is out of its range.

    Source: DeVries and Taylor 2017, arXiv:1708.04552, section 3.2.

    Suggested values:
        CIFAR-10, 32 pixels: ``length=16`` (DeVries and Taylor 2017, section 4)
        CIFAR-100, 32 pixels: ``length=8`` (DeVries and Taylor 2017, section 4)
        SVHN, 32 pixels: ``length=20`` (DeVries and Taylor 2017, section 4)
    When not to use: objects are small: a square may hide the whole object, and the target stays. ``cutmix`` mixes the target,
        too.
    """
    length_at = hyperparameter(length, "cutout: length", _LENGTH_CONSTRAINT)
    _check(0, holes, placement)
    return batch_transform(
        partial(cutout_batch, holes=holes, fill=fill, placement=placement, input_key=input_key),
        name="cutout",
        at_clock={"length": length_at},
        check=partial(get_image_batch, key=input_key, caller="cutout"),
    )


def _sample_outside(images: Tensor, holes: int, side: int, placement: BoxPlacement, generator: torch.Generator) -> Tensor:
    """Sample squares; return 0 for the pixels inside and 1 for all others, ``[batch, 1, height, width]`` like ``images``."""
    (height, width), count, device = images.shape[-2:], len(images) * holes, generator.device
    starts = []
    for extent in (height, width):
        low, positions = box_starts(side, extent, placement)
        starts.append(torch.randint(low, low + max(positions, 1), (count, 1, 1, 1), generator=generator, device=device))
    # Twice the distance of each pixel from the middle of the square, since the middle may lie between two pixels.
    doubled = torch.arange(1 - side, 1 - side + 2 * max(height, width), 2, device=device)
    outside = (torch.sub(doubled, torch.cat(starts), alpha=2).abs_() >= side).to(images.device, images.dtype, non_blocking=True)
    outside = torch.maximum(outside[:count, ..., :height].transpose(-1, -2), outside[count:, ..., :width])
    return outside if holes == 1 else outside.unflatten(0, (-1, holes)).amin(1)


def _is_valid_length(length: float) -> bool:
    return is_number(length) and length >= 0 and not (isinstance(length, float) and not length <= 1)


_LENGTH_CONSTRAINT = Constraint("pixels (int >= 0) or a fraction of the side (float in [0, 1])", _is_valid_length)


_PLACEMENTS = get_args(BoxPlacement)


def _check(length: int | float, holes: int, placement: BoxPlacement) -> None:
    if not _is_valid_length(length):
        raise ConfigError(f"cutout: length must be {_LENGTH_CONSTRAINT.text}, got {length!r}. Pass 0.5, for example.")
    check_int("cutout", "holes", holes)
    check_choice("cutout", "placement", placement, _PLACEMENTS)
