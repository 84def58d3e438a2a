"""Progressive resizing: images begin small and grow to their full size."""

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
    """A batch of smaller images, all of one size; targets are untouched.

    Formula: ``side = size_increment * round(scale * side / size_increment)``, at least one increment, at most the whole; the
    whole where ``multiply`` is 1

    Args:
        batch: images ``[batch, channels, height, width]``, or a mapping, TensorDict or tuple with them; also one image
            ``[channels, height, width]``.
        scale: of each side, in ``(0, 1]``.
        size_increment: sides are multiples of it, so that there are few different ones.
        mode: ``"resize"`` is bilinear with antialiasing (Composer's takes the nearest pixel, which aliases); ``"crop"`` takes
            a part of that size, the same in the whole batch.
        input_key: key of the images.
        generator: of the CPU, for a crop whose place is not given.
        offset: top and left of the crop.

    Host sync: none.

    Raises:
        ConfigError: a scale, increment or mode that cannot be, no images, no generator of the CPU where one is needed, a crop
            that begins outside.

    Source: the algorithm of this name in MosaicML's Composer, after J. Howard's for fast.ai.

    Example:
        >>> image = torch.arange(16.0).reshape(1, 4, 4)
        >>> resize_batch(image, scale=0.5, size_increment=2, mode="crop", offset=(1, 2)).tolist()
        [[[6.0, 7.0], [10.0, 11.0]]]
    """
    _check(scale, size_increment, mode)

    def start(room: tuple[int, int]) -> tuple[int, int]:
        if offset is None:
            return _sample_offset(
                host_random_from(require_generator(generator, "resize_batch", "offset=..."), "resize_batch"), room
            )
        if not all(0 <= at <= most for at, most in zip(offset, room, strict=True)):
            raise ConfigError(f"resize_batch: the crop begins at most at {room}, got {offset=}")
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
    """Train on small images first, which take less time: ``resize_batch`` by a scale that grows with the run.

    The size depends on the clock alone, so it is the same on all ranks.

    Formula: ``scale = initial_scale + (1 - initial_scale) * min(1, max(0, (now - delay) / (full - delay)))``
    ``side = size_increment * round(scale * side / size_increment)``

    Args:
        scale: of each side, a schedule of numbers in ``(0, 1]``, in place of the formula.
        initial_scale: up to ``delay``, in ``(0, 1]``.
        delay: when images begin to grow. As a share of the run (``"0.5dur"``) it needs ``step.init(..., run_length=...)``.
        full: when they have their full size, in the unit of ``delay``: what is left of the run, a fifth, trains on whole images
            (Composer's ``finetune_fraction``).
        size_increment: sides are multiples of it.
        mode: ``"resize"`` or ``"crop"``; a crop's place is drawn on each rank.
        input_key: key of the images.

    Host sync: none.

    Raises:
        ConfigError: options that cannot be, ``full`` before ``delay`` or in another unit; from ``Step.init`` on, a share of a
            run whose length is not known; of a schedule, in the step for which it is.

    Source: the algorithm of this name in MosaicML's Composer, whose defaults these are, after J. Howard's for fast.ai.

    Example:
        >>> grow = growing(0.5, Duration.parse("2ep"), Duration.parse("4ep"))
        >>> [grow(Clock(epoch=epoch)) for epoch in range(6)]
        [0.5, 0.5, 0.5, 0.75, 1.0, 1.0]
        >>> progressive_resizing(initial_scale=0.5, delay="2ep", full="4ep").name
        'progressive_resizing'
    """
    if scale is not None and not callable(scale):
        raise ConfigError(f"progressive_resizing: scale is a schedule, got {scale!r}; for a constant size resize in the loader")
    first, last = Duration.parse(delay, allow_zero=True), Duration.parse(full, allow_zero=True)
    if first.unit != last.unit or first.value > last.value:
        raise ConfigError(
            f"progressive_resizing: needs delay <= full in one unit, got delay={str(first)!r}, full={str(last)!r}"
        )
    _check(initial_scale, size_increment, mode)
    scale_at: Callable[[Clock], float] = linear_growth(initial_scale, first, last)
    if scale is not None:
        scale_at = hyperparameter(scale, "progressive_resizing: scale", "(0, 1]")

    def init(state: TrainState) -> TransformState:
        scale_at(state.clock)  # which raises where the length of the run is needed and not known
        return {}

    def resized(batch: Batch, state: TrainState, generator: torch.Generator) -> Batch:
        now = scale_at(state.clock)
        drawn = host_random_for_step(state, "progressive_resizing")

        def small(images: Tensor) -> Tensor:
            return _resize(images, now, size_increment, mode, lambda room: _sample_offset(drawn, room))

        return map_images(batch, input_key, "progressive_resizing", small)

    read = (scale_at,) if isinstance(scale_at, Hyperparameter) else ()
    return batch_transform(resized, name="progressive_resizing", image_key=input_key, init=init, hyperparameters=read)


def linear_growth(initial: float, delay: Duration, full: Duration) -> Callable[[Clock], float]:
    """A scale by the clock: ``initial`` up to ``delay``, 1 from ``full`` on, linear between."""

    def scale(clock: Clock) -> float:
        if clock.reached(full):
            return 1.0
        grown = (clock.count(full.unit) - delay.value) / (full.value - delay.value) if clock.reached(delay) else 0.0
        return initial + (1.0 - initial) * grown

    return scale


def _resize(
    images: Tensor,
    scale: float,
    size_increment: int,
    mode: ResizeMode,
    start: Callable[[tuple[int, int]], tuple[int, int]],
) -> Tensor:
    whole = (images.shape[-2], images.shape[-1])
    size = _target_side(whole[0], scale, size_increment), _target_side(whole[1], scale, size_increment)
    if size == whole:
        return images
    if mode == "crop":
        top, left = start((whole[0] - size[0], whole[1] - size[1]))
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
        raise ConfigError("progressive_resizing: needs scale > 0, got scale=0")
    if type(size_increment) is not int or size_increment < 1:
        raise ConfigError(f"progressive_resizing: needs a whole size_increment of at least 1, got {size_increment=}")
    if mode not in get_args(ResizeMode):
        raise ConfigError(f"progressive_resizing: mode is one of {', '.join(get_args(ResizeMode))}, got {mode!r}")
