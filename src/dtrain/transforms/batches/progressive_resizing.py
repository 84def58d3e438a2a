"""Progressive resizing: train on small images first and grow the images to their full size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from dtrain.arguments import check_choice, check_int, check_number
from dtrain.errors import ConfigError
from dtrain.schedules.clock import Clock
from dtrain.schedules.durations import Duration
from dtrain.schedules.hyperparameters import hyperparameter
from dtrain.state import TrainState
from dtrain.step.transform import Transform
from dtrain.transforms.batches.batch_transform import BatchKey, batch_transform, get_image_batch, host_random, map_images
from dtrain.transforms.batches.image_ops import from_unit_range, to_unit_range
from dtrain.typing import Batch, Schedule, TransformState

ResizeMethod: TypeAlias = Literal["resize", "crop"]


def resize_batch(
    batch: Batch,
    *,
    scale: float,
    size_increment: int = 4,
    method: ResizeMethod = "resize",
    input_key: BatchKey | None = None,
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
        method: ``"resize"`` is bilinear with antialiasing (Composer uses the nearest pixel, which aliases). ``"crop"`` cuts a
            part of this size, at the same position for the whole batch.
        input_key: key of the images; None takes ``"x"``, ``"input_ids"``, or the first entry of a tuple.
        generator: CPU generator for ``offset`` if not given.
        offset: top and left of the crop.

    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> image = torch.arange(16.0).reshape(1, 4, 4)
        >>> dt.transforms.resize_batch(
        ...     image, scale=0.5, size_increment=2, method="crop", offset=(1, 2)
        ... ).tolist()
        [[[6.0, 7.0], [10.0, 11.0]]]

    Raises:
        ConfigError: ``scale``, ``size_increment`` or ``method`` is out of its range, the inputs are not images, a CPU
            ``generator`` is required but missing, or the crop begins outside the image.

    Source: the algorithm of this name in MosaicML's Composer, after J. Howard's for fast.ai.
    """
    _check(scale, size_increment, method)

    def resize(images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        scaled = [size_increment * round(scale * side / size_increment) for side in (height, width)]
        size = [min(side, max(size_increment, new)) for side, new in zip((height, width), scaled, strict=True)]
        size = [height, width] if scale == 1 else size
        if size == [height, width]:
            return images
        if method == "crop":
            limits = (height - size[0], width - size[1])
            if offset is None:
                rng = host_random(generator, "progressive_resizing", "offset=")
                top, left = rng.randint(0, limits[0]), rng.randint(0, limits[1])
            else:
                top, left = offset
            if not (0 <= top <= limits[0] and 0 <= left <= limits[1]):
                raise ConfigError(
                    f"progressive_resizing: offset must be at least 0 and at most {limits}, got {offset=}. Lower offset."
                )
            return images[..., top : top + size[0], left : left + size[1]]
        if not len(images):
            return images.new_empty((*images.shape[:2], *size))
        unit = to_unit_range(images, "progressive_resizing")
        return from_unit_range(F.interpolate(unit, size, mode="bilinear", antialias=True, align_corners=False), images.dtype)

    return map_images(batch, input_key, "progressive_resizing", resize)


def progressive_resizing(
    scale: Schedule | None = None,
    *,
    initial_scale: float = 0.5,
    start: Duration | int | str = "0.5dur",
    end: Duration | int | str = "0.8dur",
    size_increment: int = 4,
    method: ResizeMethod = "resize",
    input_key: BatchKey | None = None,
) -> Transform:
    """Train on small images first, which is faster: apply ``resize_batch`` with a scale that grows during the run.

    The size depends on the clock alone, so all ranks have the same size.

    Formula: ``scale = initial_scale + (1 - initial_scale) * min(1, max(0, (now - start) / (end - start)))``
    ``side = size_increment * round(scale * side / size_increment)``

    Args:
        scale: schedule of the factor of each side, in ``(0, 1]``, instead of the formula.
        initial_scale: scale until ``start``, in ``(0, 1]``.
        start: start of the growth. A fraction of the run (``"0.5dur"``) needs ``step.init(..., run_length=...)``.
        end: time of the full size, in the unit of ``start``. By default the last fifth of the run trains on full images
            (Composer's ``finetune_fraction``).
        size_increment: sides are multiples of this number.
        method: ``"resize"`` or ``"crop"``; each rank draws the position of its crop.
        input_key: key of the images; None takes ``"x"``, ``"input_ids"``, or the first entry of a tuple.

    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> sizes = []
        >>> def loss_fn(model, batch):
        ...     sizes.append(list(batch["x"].shape))
        ...     return dt.soft_cross_entropy(model(batch["x"]).mean((2, 3)), batch["y"])
        >>> step = dt.compose_step(
        ...     loss_fn, [dt.transforms.progressive_resizing(start=2, end=4)]
        ... )
        >>> model = torch.nn.Conv2d(3, 10, 3)
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> for _ in range(5):
        ...     state, _ = step(state, {"x": torch.rand(8, 3, 32, 32), "y": torch.arange(8)})
        >>> [size[-1] for size in sizes]
        [16, 16, 16, 24, 32]

    Raises:
        ConfigError: an option is out of its range (a schedule is checked in each step), or ``end`` is before ``start`` or in
            another unit. From ``Step.init`` on: a duration is a fraction of a run of unknown length.

    Source: the algorithm of this name in MosaicML's Composer, with Composer's defaults, after J. Howard's for fast.ai.

    Suggested values:
        ImageNet, ResNet-50: ``initial_scale=0.5``, ``end="0.8dur"``, ``method="resize"`` (MosaicML Composer, method card of
            progressive resizing)
        CIFAR-10, ResNet-56: ``initial_scale=0.5``, ``end="0.8dur"``, ``method="crop"`` (MosaicML Composer, method card of
            progressive resizing)
    When not to use: the model needs one input size, or the data loader is the limit: smaller images then save no time. A
        compiled model compiles anew for each size.
    """
    if scale is not None and not callable(scale):
        raise ConfigError(
            f"progressive_resizing: scale must be a schedule, got {scale!r}. For a constant size resize in the loader."
        )
    first, last = Duration.parse(start, allow_zero=True), Duration.parse(end, allow_zero=True)
    if first.unit != last.unit or first.value > last.value:
        raise ConfigError(
            f"progressive_resizing: start must be at most end in the same unit, got start={str(first)!r}, end={str(last)!r}. "
            "Raise full, or lower delay."
        )
    _check(initial_scale, size_increment, method)
    scale_at: Callable[[Clock], float] = linear_growth(initial_scale, first, last)
    if scale is not None:
        scale_at = hyperparameter(scale, "progressive_resizing: scale", "(0, 1]")

    def init(state: TrainState) -> TransformState:
        # Raise for a fraction of a run of unknown length.
        scale_at(state.clock)
        return {}

    return batch_transform(
        partial(resize_batch, size_increment=size_increment, method=method, input_key=input_key),
        name="progressive_resizing",
        at_clock={"scale": scale_at},
        check=partial(get_image_batch, key=input_key, caller="progressive_resizing"),
        host_generator=True,
        init=init,
    )


def linear_growth(initial_scale: float, start: Duration, end: Duration) -> Callable[[Clock], float]:
    """Return a scale as a function of the clock: ``initial_scale`` until ``start``, 1 from ``end`` on, linear between.

    Example:
        >>> scale = linear_growth(0.5, Duration.parse("2ep"), Duration.parse("4ep"))
        >>> [scale(Clock(epoch=epoch)) for epoch in range(6)]
        [0.5, 0.5, 0.5, 0.75, 1.0, 1.0]
    """

    def scale(clock: Clock) -> float:
        if clock.reached(end):
            return 1.0
        progress = (clock.count(end.unit) - start.value) / (end.value - start.value) if clock.reached(start) else 0.0
        return initial_scale + (1.0 - initial_scale) * progress

    return scale


def _check(scale: float, size_increment: int, method: str) -> None:
    check_number("progressive_resizing", "scale", scale, above=0, maximum=1)
    check_int("progressive_resizing", "size_increment", size_increment)
    check_choice("progressive_resizing", "method", method, get_args(ResizeMethod))
