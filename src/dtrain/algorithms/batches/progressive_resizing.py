"""Progressive resizing: images begin small and grow to their full size."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.algorithms.batches.drawing import check_share, host_random_of, needed
from dtrain.algorithms.batches.fields import Key, on_images
from dtrain.algorithms.batches.image.values import as_before, as_unit
from dtrain.algorithms.batches.seam import at_batch, host_random
from dtrain.clock import Clock
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.schedules.hyper import Hyperparameter, hyperparameter
from dtrain.state import TrainState
from dtrain.transform import Transform
from dtrain.types import Batch, Schedule, Slice

Mode: TypeAlias = Literal["resize", "crop"]


def resize_batch(
    batch: Batch,
    *,
    scale: float,
    size_increment: int = 4,
    mode: Mode = "resize",
    inputs: Key = "x",
    generator: torch.Generator | None = None,
    offset: tuple[int, int] | None = None,
) -> Batch:
    """A batch of smaller images, all of one size; targets are untouched.

    Formula: ``side = size_increment * round(scale * side / size_increment)``, at least one increment, at most the whole; the
    whole where ``scale`` is 1

    Args:
        batch: images ``[batch, channels, height, width]``, or a mapping, TensorDict or tuple with them; also one image
            ``[channels, height, width]``.
        scale: of each side, in ``(0, 1]``.
        size_increment: sides are multiples of it, so that there are few different ones.
        mode: ``"resize"`` is bilinear with antialiasing (Composer's takes the nearest pixel, which aliases); ``"crop"`` takes
            a part of that size, the same in the whole batch.
        inputs: key of the images.
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
            return _somewhere(host_random_of(needed(generator, "resize_batch", "offset=..."), "resize_batch"), room)
        if not all(0 <= at <= most for at, most in zip(offset, room, strict=True)):
            raise ConfigError(f"resize_batch: the crop begins at most at {room}, got {offset=}")
        return offset

    return on_images(batch, inputs, "resize_batch", lambda images: _resized(images, scale, size_increment, mode, start))


def progressive_resizing(
    scale: Schedule | None = None,
    *,
    initial_scale: float = 0.5,
    delay: Duration | int | str = "0.5dur",
    full: Duration | int | str = "0.8dur",
    size_increment: int = 4,
    mode: Mode = "resize",
    inputs: Key = "x",
) -> Transform:
    """Train on small images first, which take less time: ``resize_batch`` by a scale that grows with the run.

    The size depends on the clock alone, so it is the same on all ranks.

    Formula: ``scale = initial_scale + (1 - initial_scale) * min(1, max(0, (now - delay) / (full - delay)))``
    ``side = size_increment * round(scale * side / size_increment)``

    Args:
        scale: of each side, a schedule of numbers in ``(0, 1]``, in place of the formula.
        initial_scale: up to ``delay``, in ``(0, 1]``.
        delay: when images begin to grow. As a share of the run (``"0.5dur"``) it needs ``step.init(..., run=...)``.
        full: when they have their full size, in the unit of ``delay``: what is left of the run, a fifth, trains on whole images
            (Composer's ``finetune_fraction``).
        size_increment: sides are multiples of it.
        mode: ``"resize"`` or ``"crop"``; a crop's place is drawn on each rank.
        inputs: key of the images.

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
    first, last = Duration.parse(delay, zero=True), Duration.parse(full, zero=True)
    if first.unit != last.unit or first.value > last.value:
        raise ConfigError(
            f"progressive_resizing: needs delay <= full in one unit, got delay={str(first)!r}, full={str(last)!r}"
        )
    _check(initial_scale, size_increment, mode)
    scale_at: Callable[[Clock], float] = growing(initial_scale, first, last)
    if scale is not None:
        scale_at = hyperparameter(scale, "progressive_resizing: scale", "(0, 1]")

    def init(state: TrainState) -> Slice:
        scale_at(state.clock)  # which raises where the length of the run is needed and not known
        return {}

    def resized(batch: Batch, state: TrainState, generator: torch.Generator) -> Batch:
        now = scale_at(state.clock)
        drawn = host_random(state, "progressive_resizing")

        def small(images: Tensor) -> Tensor:
            return _resized(images, now, size_increment, mode, lambda room: _somewhere(drawn, room))

        return on_images(batch, inputs, "progressive_resizing", small)

    read = (scale_at,) if isinstance(scale_at, Hyperparameter) else ()
    return at_batch(resized, name="progressive_resizing", images=inputs, init=init, hyperparameters=read)


def growing(initial: float, delay: Duration, full: Duration) -> Callable[[Clock], float]:
    """A scale by the clock: ``initial`` up to ``delay``, 1 from ``full`` on, linear between."""

    def scale(clock: Clock) -> float:
        if clock.reached(full):
            return 1.0
        grown = (clock.count(full.unit) - delay.value) / (full.value - delay.value) if clock.reached(delay) else 0.0
        return initial + (1.0 - initial) * grown

    return scale


def _resized(
    images: Tensor,
    scale: float,
    size_increment: int,
    mode: Mode,
    start: Callable[[tuple[int, int]], tuple[int, int]],
) -> Tensor:
    whole = (images.shape[-2], images.shape[-1])
    size = _size(whole[0], scale, size_increment), _size(whole[1], scale, size_increment)
    if size == whole:
        return images
    if mode == "crop":
        top, left = start((whole[0] - size[0], whole[1] - size[1]))
        return images[..., top : top + size[0], left : left + size[1]]
    if not len(images):
        return images.new_empty((*images.shape[:2], *size))
    small = F.interpolate(as_unit(images, "resize_batch"), size=size, mode="bilinear", antialias=True, align_corners=False)
    return as_before(small, images.dtype)


def _size(side: int, scale: float, increment: int) -> int:
    if scale == 1:
        return side
    return min(side, max(increment, increment * round(scale * side / increment)))


def _somewhere(drawn: random.Random, room: tuple[int, int]) -> tuple[int, int]:
    return drawn.randint(0, room[0]), drawn.randint(0, room[1])


def _check(scale: float, size_increment: int, mode: str) -> None:
    check_share(scale, "progressive_resizing", "scale")
    if scale == 0:
        raise ConfigError("progressive_resizing: needs scale > 0, got scale=0")
    if type(size_increment) is not int or size_increment < 1:
        raise ConfigError(f"progressive_resizing: needs a whole size_increment of at least 1, got {size_increment=}")
    if mode not in get_args(Mode):
        raise ConfigError(f"progressive_resizing: mode is one of {', '.join(get_args(Mode))}, got {mode!r}")
