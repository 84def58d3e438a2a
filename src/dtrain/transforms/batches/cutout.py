"""Cutout: a square of each image is hidden."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import Constraint, hyperparameter, is_number
from dtrain.state import TrainState
from dtrain.transform import Transform
from dtrain.transforms.batches.batch_transform import BatchKey, batch_transform, map_images, require_generator
from dtrain.transforms.batches.boxes import Box, BoxPlacement, box_mask, check_placement, sample_boxes, to_box_tensor
from dtrain.typing import Batch, Schedule


def cutout_batch(
    batch: Batch,
    *,
    length: int | float = 0.5,
    holes: int = 1,
    fill: float = 0.0,
    placement: BoxPlacement = "centre",
    input_key: BatchKey = "x",
    generator: torch.Generator | None = None,
    boxes: Box | None = None,
) -> Batch:
    """A batch in whose images squares are filled with one number, each image's at a place of its own; targets are untouched.

    Formula: ``x = where(inside a square, fill, x)``, a square of side ``length`` pixels, or ``round(length * shorter side)``,
    whose centre is any pixel, so parts of it may lie outside.

    Args:
        batch: images ``[batch, channels, height, width]`` of any dtype, or a mapping, TensorDict or tuple with them; also one
            image ``[channels, height, width]``, in a loader.
        length: pixels (int), or a share of the shorter side (float in ``[0, 1]``): half of it is the paper's 16 of 32 pixels,
            for CIFAR-10.
        holes: squares in each image, at least 1.
        fill: 0 is the mean of normalised images.
        placement: ``"centre"`` as in the paper; ``"even"`` hides every pixel equally often, ``"inside"`` is never clipped.
        input_key: key of the images.
        generator: for what is not given below.
        boxes: ``(top, left, bottom, right)``, for all or ``[batch, 4]``.

    Host sync: none; boxes stay on the device.

    Raises:
        ConfigError: no generator where one is needed, no images, a length, number or place that cannot be.

    Source: DeVries and Taylor 2017, arXiv:1708.04552, section 3.2.

    Example:
        >>> cutout_batch({"x": torch.ones(1, 2, 4)}, boxes=(-1, 1, 1, 3))["x"].tolist()
        [[[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]]]
    """
    _check(length, holes, placement)
    return map_images(
        batch, input_key, "cutout", lambda images: _fill_holes(images, length, holes, fill, placement, generator, boxes)
    )


def cutout(
    length: int | float | Schedule = 0.5,
    *,
    holes: int = 1,
    fill: float = 0.0,
    placement: BoxPlacement = "centre",
    input_key: BatchKey = "x",
) -> Transform:
    """Train on images with hidden squares: ``cutout_batch`` of each rank's batch.

    Formula: ``x = where(inside a square, fill, x)``

    Args:
        length: pixels (int), or a share of the shorter side (float); or a schedule of either, read at the step about to run.
        holes: squares in each image.
        fill: what is written into them.
        placement: where they lie; see ``cutout_batch``.
        input_key: key of the images.

    Raises:
        ConfigError: a length, number or place that cannot be; of a schedule, in the step for which it is.

    Source: DeVries and Taylor 2017, arXiv:1708.04552, section 3.2.

    Example:
        >>> cutout(16).name
        'cutout'
    """
    length_at = hyperparameter(length, "cutout: length", _LENGTH_CONSTRAINT)
    _check(0, holes, placement)

    def cut(batch: Batch, state: TrainState, generator: torch.Generator) -> Batch:
        now = length_at(state.clock)
        return cutout_batch(
            batch, length=now, holes=holes, fill=fill, placement=placement, input_key=input_key, generator=generator
        )

    return batch_transform(cut, name="cutout", image_key=input_key, hyperparameters=(length_at,))


def _fill_holes(
    images: Tensor,
    length: int | float,
    holes: int,
    fill: float,
    placement: BoxPlacement,
    generator: torch.Generator | None,
    boxes: Box | None,
) -> Tensor:
    size, count = (images.shape[-2], images.shape[-1]), len(images) * holes
    if boxes is not None:
        return images.masked_fill(box_mask(to_box_tensor(boxes, images.device, "cutout"), size), fill)
    drawn = require_generator(generator, "cutout", "boxes=...")
    side = min(length if isinstance(length, int) else round(length * min(size)), *size)
    sides = torch.full((count,), side, device=drawn.device)
    places = sample_boxes((sides, sides), size, placement, drawn).to(images.device, non_blocking=True)
    hidden = box_mask(places, size).unflatten(0, (len(images), holes)).any(dim=1)
    return images.masked_fill(hidden, fill)


def _is_valid_length(length: float) -> bool:
    return is_number(length) and length >= 0 and not (isinstance(length, float) and not length <= 1)


_LENGTH_CONSTRAINT = Constraint("pixels (int >= 0) or a share of the side (float in [0, 1])", _is_valid_length)


def _check(length: int | float, holes: int, placement: BoxPlacement) -> None:
    if not _is_valid_length(length):
        raise ConfigError(f"cutout: length must be {_LENGTH_CONSTRAINT.text}, got {length!r}.")
    if type(holes) is not int or holes < 1:
        raise ConfigError(f"cutout: needs a whole number of holes of at least 1, got {holes=}")
    check_placement(placement, "cutout")
