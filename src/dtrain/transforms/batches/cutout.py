"""Hide parts of images: ``cutout`` fills random squares with one number, ``colout`` drops rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from dtrain.arguments import check_choice, check_int, check_number
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameters import Constraint, hyperparameter, is_number
from dtrain.step.transform import Transform
from dtrain.transforms.batches.batch_transform import (
    BatchKey,
    batch_transform,
    get_image_batch,
    get_images,
    get_tensor,
    map_images,
    replace_tensors,
    require_generator,
    sample_permutation,
)
from dtrain.transforms.batches.image_ops import Box, BoxPlacement, box_mask, box_starts, to_box_tensor
from dtrain.typing import Batch, Schedule

_PLACEMENTS = get_args(BoxPlacement)


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
    _check_cutout(length, holes, placement)

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
    _check_cutout(0, holes, placement)
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


def _check_cutout(length: int | float, holes: int, placement: BoxPlacement) -> None:
    if not _is_valid_length(length):
        raise ConfigError(f"cutout: length must be {_LENGTH_CONSTRAINT.text}, got {length!r}. Pass 0.5, for example.")
    check_int("cutout", "holes", holes)
    check_choice("cutout", "placement", placement, _PLACEMENTS)


def colout_batch(
    batch: Batch,
    *,
    p_row: float = 0.15,
    p_col: float = 0.15,
    input_key: BatchKey | None = None,
    extra_keys: Sequence[BatchKey] = (),
    generator: torch.Generator | None = None,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
) -> Batch:
    """Return a batch of smaller images without some rows and columns, the same for the whole batch.

    Formula: ``x = x[..., rows, :][..., columns]``, sorted random choices of ``floor((1 - p_row) * height)`` rows and
    ``floor((1 - p_col) * width)`` columns, each at least one.

    Args:
        batch: images ``[batch, channels, height, width]`` of any dtype, or a mapping, TensorDict or tuple with images; also one
            image ``[channels, height, width]``.
        p_row: fraction of rows to drop, in ``[0, 1)``.
        p_col: fraction of columns to drop, in ``[0, 1)``.
        input_key: key of the images; None takes ``"x"``, ``"input_ids"``, or the first entry of a tuple.
        extra_keys: keys of tensors that end in the same height and width and are cut alike, for example segmentation targets.
        generator: generator for ``rows`` and ``columns`` if not given.
        rows: int64 ``[kept]``, indices of the kept rows.
        columns: int64 ``[kept]``, indices of the kept columns.

    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> image = torch.arange(6.0).reshape(1, 2, 3)
        >>> dt.transforms.colout_batch(
        ...     image, rows=torch.tensor([1]), columns=torch.tensor([0, 2])
        ... ).tolist()
        [[[3.0, 5.0]]]

    Raises:
        ConfigError: ``generator`` is required but missing, the inputs are not images, a fraction is outside of ``[0, 1)``, or
            ``extra_keys`` have other sizes.

    Source: the algorithm of this name in MosaicML's Composer, with Composer's defaults.
    """
    check_number("colout", "p_row", p_row, minimum=0, below=1)
    check_number("colout", "p_col", p_col, minimum=0, below=1)
    images = get_images(batch, input_key, "colout")[1]
    size, device = tuple(images.shape[-2:]), images.device

    def kept(given: Tensor | None, extent: int, dropped: float) -> Tensor:
        if given is not None:
            return given.to(device, non_blocking=True)
        # The addend corrects a rounding: 0.9 * 10 is slightly less than 9.
        count = max(1, int((1.0 - dropped) * extent + 1e-9))
        rng = require_generator(generator, "colout", "rows= and columns=")
        return sample_permutation(extent, rng, device)[:count].sort().values

    kept_rows, kept_columns = kept(rows, size[-2], p_row), kept(columns, size[-1], p_col)

    def cut(tensor: Tensor) -> Tensor:
        tensor = tensor.index_select(-2, kept_rows)
        # Along the last axis, index_select takes three times as long as gather on a CPU.
        return tensor.gather(-1, kept_columns.expand(*tensor.shape[:-1], -1))

    output = map_images(batch, input_key, "colout", cut)
    for key in extra_keys:
        other = get_tensor(batch, key, "colout")
        if tuple(other.shape[-2:]) != size:
            raise ConfigError(
                f"colout: {key!r} must end in the images' height and width {size}, got {tuple(other.shape)}. "
                "Resize them together with the images."
            )
        output = replace_tensors(output, {key: cut(other)})
    return output


def colout(
    p_row: float | Schedule = 0.15,
    p_col: float | Schedule = 0.15,
    *,
    input_key: BatchKey | None = None,
    extra_keys: Sequence[BatchKey] = (),
) -> Transform:
    """Train on smaller images without some rows and columns: apply ``colout_batch`` to each rank's batch.

    The number of dropped rows and columns is the same on all ranks. Each rank draws its own indices.

    Formula: ``x = x[..., rows, :][..., columns]``

    Args:
        p_row: fraction of rows to drop, in ``[0, 1)``, or a schedule.
        p_col: fraction of columns to drop, in ``[0, 1)``, or a schedule.
        input_key: key of the images; None takes ``"x"``, ``"input_ids"``, or the first entry of a tuple.
        extra_keys: keys of tensors that are cut alike.

    Example:
        >>> import dtrain as dt
        >>> def loss_fn(model, batch):
        ...     return dt.soft_cross_entropy(model(batch["x"]).mean((2, 3)), batch["y"])
        >>> step = dt.compose_step(loss_fn, [dt.transforms.colout(0.1, 0.1)])
        >>> model = torch.nn.Conv2d(3, 10, 3)
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> state, metrics = step(state, {"x": torch.rand(8, 3, 32, 32), "y": torch.arange(8)})
        >>> dt.reduce_metrics(metrics)["loss"] > 0
        True

    Raises:
        ConfigError: a fraction is outside of ``[0, 1)`` (a schedule is checked in each step).

    Source: the algorithm of this name in MosaicML's Composer, with Composer's defaults.

    Suggested values:
        ImageNet, ResNet-50; CIFAR-10, ResNet-56: ``p_row=0.15``, ``p_col=0.15`` (MosaicML Composer, method card of ColOut)
    When not to use: the model needs one input size, as with fixed position embeddings. Composer's card reports 0.2 % less
        accuracy on ImageNet, and 1 % less on CIFAR-10.
    """
    return batch_transform(
        partial(colout_batch, input_key=input_key, extra_keys=extra_keys),
        name="colout",
        at_clock={
            "p_row": hyperparameter(p_row, "colout: p_row", "[0, 1)"),
            "p_col": hyperparameter(p_col, "colout: p_col", "[0, 1)"),
        },
        check=partial(get_image_batch, key=input_key, caller="colout"),
    )
