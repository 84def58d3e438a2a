"""Progressive resizing: train on small images first and grow the images to their full size."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.clock import Clock
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import Hyperparameter, hyperparameter
from dtrain.state import TrainState
from dtrain.transform import Transform
from dtrain.transforms.batches.batch_transform import (
    BatchKey,
    batch_transform,
    check_fraction,
    host_random_for_step,
    host_random_from,
    map_images,
    require_generator,
)
from dtrain.transforms.batches.image_ops import from_unit_range, to_unit_range
from dtrain.typing import Batch, Schedule, TransformState

ResizeMode: TypeAlias = Literal["resize", "crop"]


def resize_batch(
    batch: Batch,
    *,
    scale: float,
    size_increment: int = 4,
    mode: ResizeMode = "resize",
    input_key: BatchKey = "x",
    generator: torch.Generator | None = None,
    offset: tuple[int, int] | None = None,
) -> Batch:
    """Return a batch of smaller images, all of one size; targets are unchanged.

    Formula: ``side = size_increment * round(scale * side / size_increment)``, at least one increment, at most the full side;
    the full side if ``scale`` is 1

    Args:
        batch: images ``[batch, channels, height, width]``, or a mapping, TensorDict or tuple with images; also one image
            ``[channels, height, width]``.
        scale: factor of each side, in ``(0, 1]``.
        size_increment: sides are multiples of this number, which limits the number of different sizes.
        mode: ``"resize"`` is bilinear with antialiasing (Composer uses the nearest pixel, which aliases). ``"crop"`` cuts a
            part of this size, at the same position for the whole batch.
        input_key: key of the images.
        generator: CPU generator for ``offset`` if not given.
        offset: top and left of the crop.

    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> image = torch.arange(16.0).reshape(1, 4, 4)
        >>> dt.transforms.resize_batch(image, scale=0.5, size_increment=2, mode="crop", offset=(1, 2)).tolist()
        [[[6.0, 7.0], [10.0, 11.0]]]

    Raises:
        ConfigError: ``scale``, ``size_increment`` or ``mode`` is out of its range, the inputs are not images, a CPU
            ``generator`` is required but missing, or the crop begins outside the image.

    Source: the algorithm of this name in MosaicML's Composer, after J. Howard's for fast.ai.
    """
    _check(scale, size_increment, mode)

    def start(room: tuple[int, int]) -> tuple[int, int]:
        if offset is None:
            return _sample_offset(
                host_random_from(require_generator(generator, "resize_batch", "offset="), "resize_batch"), room
            )
        if not all(0 <= position <= limit for position, limit in zip(offset, room, strict=True)):
            raise ConfigError(f"resize_batch: offset must be at least 0 and at most {room}, got {offset=}.")
        return offset

    return map_images(batch, input_key, "resize_batch", lambda images: _resize(images, scale, size_increment, mode, start))


def progressive_resizing(
    scale: Schedule | None = None,
    *,
    initial_scale: float = 0.5,
    delay: Duration | int | str = "0.5dur",
    full: Duration | int | str = "0.8dur",
    size_increment: int = 4,
    mode: ResizeMode = "resize",
    input_key: BatchKey = "x",
) -> Transform:
    """Train on small images first, which is faster: apply ``resize_batch`` with a scale that grows during the run.

    The size depends on the clock alone, so all ranks have the same size.

    Formula: ``scale = initial_scale + (1 - initial_scale) * min(1, max(0, (now - delay) / (full - delay)))``
    ``side = size_increment * round(scale * side / size_increment)``

    Args:
        scale: schedule of the factor of each side, in ``(0, 1]``, instead of the formula.
        initial_scale: scale until ``delay``, in ``(0, 1]``.
        delay: start of the growth. A fraction of the run (``"0.5dur"``) needs ``step.init(..., run_length=...)``.
        full: time of the full size, in the unit of ``delay``. By default the last fifth of the run trains on full images
            (Composer's ``finetune_fraction``).
        size_increment: sides are multiples of this number.
        mode: ``"resize"`` or ``"crop"``; each rank draws the position of its crop.
        input_key: key of the images.

    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> transform = dt.transforms.progressive_resizing(initial_scale=0.5, delay="2ep", full="4ep")
        >>> transform.name
        'progressive_resizing'

    Raises:
        ConfigError: an option is out of its range (a schedule is checked in each step), or ``full`` is before ``delay`` or in
            another unit. From ``Step.init`` on: a duration is a fraction of a run of unknown length.

    Source: the algorithm of this name in MosaicML's Composer, with Composer's defaults, after J. Howard's for fast.ai.
    """
    if scale is not None and not callable(scale):
        raise ConfigError(
            f"progressive_resizing: scale must be a schedule, got {scale!r}. For a constant size resize in the loader."
        )
    first, last = Duration.parse(delay, allow_zero=True), Duration.parse(full, allow_zero=True)
    if first.unit != last.unit or first.value > last.value:
        raise ConfigError(
            f"progressive_resizing: delay must be at most full in the same unit, got delay={str(first)!r}, full={str(last)!r}."
        )
    _check(initial_scale, size_increment, mode)
    scale_at: Callable[[Clock], float] = linear_growth(initial_scale, first, last)
    if scale is not None:
        scale_at = hyperparameter(scale, "progressive_resizing: scale", "(0, 1]")

    def init(state: TrainState) -> TransformState:
        # Raise for a fraction of a run of unknown length.
        scale_at(state.clock)
        return {}

    def batch_fn(batch: Batch, state: TrainState, generator: torch.Generator) -> Batch:
        current_scale = scale_at(state.clock)
        rng = host_random_for_step(state, "progressive_resizing")

        def shrink(images: Tensor) -> Tensor:
            return _resize(images, current_scale, size_increment, mode, lambda room: _sample_offset(rng, room))

        return map_images(batch, input_key, "progressive_resizing", shrink)

    hyperparameters = (scale_at,) if isinstance(scale_at, Hyperparameter) else ()
    return batch_transform(
        batch_fn, name="progressive_resizing", image_key=input_key, init=init, hyperparameters=hyperparameters
    )


def linear_growth(initial: float, delay: Duration, full: Duration) -> Callable[[Clock], float]:
    """Return a scale as a function of the clock: ``initial`` until ``delay``, 1 from ``full`` on, linear between.

    Example:
        >>> scale = linear_growth(0.5, Duration.parse("2ep"), Duration.parse("4ep"))
        >>> [scale(Clock(epoch=epoch)) for epoch in range(6)]
        [0.5, 0.5, 0.5, 0.75, 1.0, 1.0]
    """

    def scale(clock: Clock) -> float:
        if clock.reached(full):
            return 1.0
        progress = (clock.count(full.unit) - delay.value) / (full.value - delay.value) if clock.reached(delay) else 0.0
        return initial + (1.0 - initial) * progress

    return scale


def _resize(
    images: Tensor,
    scale: float,
    size_increment: int,
    mode: ResizeMode,
    start: Callable[[tuple[int, int]], tuple[int, int]],
) -> Tensor:
    full_size = (images.shape[-2], images.shape[-1])
    size = _target_side(full_size[0], scale, size_increment), _target_side(full_size[1], scale, size_increment)
    if size == full_size:
        return images
    if mode == "crop":
        top, left = start((full_size[0] - size[0], full_size[1] - size[1]))
        return images[..., top : top + size[0], left : left + size[1]]
    if not len(images):
        return images.new_empty((*images.shape[:2], *size))
    small = F.interpolate(
        to_unit_range(images, "resize_batch"), size=size, mode="bilinear", antialias=True, align_corners=False
    )
    return from_unit_range(small, images.dtype)


def _target_side(side: int, scale: float, increment: int) -> int:
    if scale == 1:
        return side
    return min(side, max(increment, increment * round(scale * side / increment)))


def _sample_offset(rng: random.Random, room: tuple[int, int]) -> tuple[int, int]:
    return rng.randint(0, room[0]), rng.randint(0, room[1])


def _check(scale: float, size_increment: int, mode: str) -> None:
    check_fraction(scale, "progressive_resizing", "scale")
    if scale == 0:
        raise ConfigError("progressive_resizing: scale must be above 0, got scale=0.")
    if type(size_increment) is not int or size_increment < 1:
        raise ConfigError(f"progressive_resizing: size_increment must be an int of at least 1, got {size_increment=}.")
    if mode not in get_args(ResizeMode):
        raise ConfigError(f"progressive_resizing: mode must be one of {', '.join(get_args(ResizeMode))}, got {mode!r}.")
