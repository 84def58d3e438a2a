"""CutMix: replace a box of each image by a box of another image, and mix the targets by the area of the box."""

from __future__ import annotations

import math
import random
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from dtrain.arguments import check_choice, check_number
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameters import hyperparameter
from dtrain.step.transform import Transform
from dtrain.transforms.batches.batch_transform import (
    BatchKey,
    batch_transform,
    check_num_classes,
    get_image_batch,
    get_targets,
    host_random,
    mix_rows,
    replace_tensors,
    sample_beta,
    sample_host_beta,
    sample_permutation,
    to_probabilities,
)
from dtrain.transforms.batches.image_ops import (
    Box,
    BoxPlacement,
    box_area_fraction,
    box_mask,
    box_starts,
    sample_boxes,
    to_box_tensor,
)
from dtrain.typing import Batch, Schedule


def cutmix_batch(
    batch: Batch,
    *,
    num_classes: int | None = None,
    alpha: float = 1.0,
    length: float | None = None,
    placement: BoxPlacement | None = None,
    per_sample: bool = False,
    input_key: BatchKey | None = None,
    target_key: BatchKey | None = None,
    ignore_index: int = -100,
    generator: torch.Generator | random.Random | None = None,
    box: Box | None = None,
    order: Tensor | None = None,
) -> Batch:
    """Return a batch with a box of each image from a random other image, and targets mixed by the box's clipped area.

    Formula: ``x = where(inside box, x[order], x)``, ``y = (1 - share) * y + share * y[order]``,
    ``share = area of the clipped box / area of the image``; a box is ``floor(sqrt(1 - l) * side)`` of each side, with
    ``l ~ Beta(alpha, alpha)``, or ``round(length * side)``.

    A given ``length`` cuts this fraction of each side, so ``length ** 2`` of the area. (Composer cuts ``sqrt(1 - length ** 2)``
    of a side.)

    Args:
        batch: mapping, TensorDict or tuple with images ``[batch, channels, height, width]`` of any dtype, and one target per
            image: class indices ``[batch]`` or probabilities ``[batch, classes]``.
        num_classes: number of classes; required for class indices.
        alpha: parameter of the Beta distribution, >= 0; 1 draws areas evenly, 0 cuts nothing.
        length: fraction of each side in ``[0, 1]``, instead of ``alpha``.
        placement: distribution of the boxes. None is ``"center"`` as in the paper, but ``"inside"`` with a ``length``, so that
            boxes are never clipped. ``"even"`` covers every pixel equally often (Composer's ``uniform_sampling``).
        per_sample: if True, draw a box per sample instead of one for the batch.
        input_key: key of the images; None takes ``"x"``, ``"input_ids"``, or the first entry of a tuple.
        target_key: key of the targets; None takes ``"y"``, ``"labels"``, or the second entry of a tuple.
        ignore_index: class index of ignored targets; a mixture with another target keeps that target's fraction.
        generator: CPU generator for ``box`` and ``order`` if not given. A box for the whole batch is a slice, so the host must
            know the box.
        box: ``(top, left, bottom, right)``, or int64 ``[batch, 4]``.
        order: int64 ``[batch]``, index of the source image of each box.

    Returns:
        A new batch. Class indices become probabilities ``[batch, num_classes]``.

    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> batch = {
        ...     "x": torch.stack([torch.zeros(1, 2, 4), torch.ones(1, 2, 4)]),
        ...     "y": torch.tensor([0, 1]),
        ... }
        >>> mixed = dt.transforms.cutmix_batch(
        ...     batch, num_classes=2, box=(0, 3, 2, 9), order=torch.tensor([1, 0])
        ... )
        >>> mixed["x"][0].tolist(), mixed["y"][0].tolist()  # the clipped box has 2 of 8 pixels
        ([[[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]]], [0.75, 0.25])

    Raises:
        ConfigError: a CPU ``generator`` is required but missing, the inputs are not images, a sample has several targets, class
            indices lack ``num_classes``, or ``length`` is outside of ``[0, 1]``.

    Source: Yun et al. 2019, arXiv:1905.04899, section 3.
    """
    check_number("cutmix", "alpha", alpha, minimum=0)
    _check_box_options(length, placement)
    (input_key, x), (target_key, y) = get_image_batch(batch, input_key, "cutmix"), get_targets(batch, target_key, "cutmix")
    size = (x.shape[-2], x.shape[-1])
    if box is None or order is None:
        rng = host_random(generator, "cutmix", "box= and order=")
        tensor_rng = generator if isinstance(generator, torch.Generator) else torch.Generator().manual_seed(rng.getrandbits(63))
        if box is None:
            placement = placement or ("center" if length is None else "inside")
            # The host knows a box for the whole batch without a sync, so the box is a slice.
            box = (
                _sample_boxes(len(x), size, alpha, length, placement, tensor_rng)
                if per_sample
                else _sample_box(size, alpha, length, placement, rng)
            )
        if order is None:
            order = sample_permutation(len(x), tensor_rng, x.device)
    y = to_probabilities(y, num_classes, ignore_index=ignore_index, caller="cutmix")
    if y.ndim > 2:
        raise ConfigError(
            f"cutmix: targets must be [batch] or [batch, classes], got shape {tuple(y.shape)}. "
            "Pass class indices or probabilities."
        )
    images, share = _cut(x, order, box, y.dtype)
    return replace_tensors(batch, {input_key: images, target_key: mix_rows(y, order, 1.0 - share)})


def _cut(images: Tensor, order: Tensor, box: Box, dtype: torch.dtype) -> tuple[Tensor, Tensor | float]:
    """Return images with the box of the images at ``order``, and the fraction of an image that each box covers."""
    height, width = size = (images.shape[-2], images.shape[-1])
    if isinstance(box, Tensor) or [type(edge) for edge in box] != [int] * 4:
        boxes = to_box_tensor(box, images.device, "cutmix")
        mixed = torch.where(box_mask(boxes, size), images.index_select(0, order), images)
        return mixed, box_area_fraction(boxes, size, dtype)
    top, left, bottom, right = (min(max(edge, 0), size[axis % 2]) for axis, edge in enumerate(box))
    inside = (..., slice(top, bottom), slice(left, right))
    mixed = images.clone()
    mixed[inside] = images[inside].index_select(0, order)
    return mixed, max(bottom - top, 0) * max(right - left, 0) / (height * width)


def cutmix(
    alpha: float | Schedule = 1.0,
    *,
    num_classes: int | None = None,
    length: float | None = None,
    placement: BoxPlacement | None = None,
    per_sample: bool = False,
    input_key: BatchKey | None = None,
    target_key: BatchKey | None = None,
    ignore_index: int = -100,
) -> Transform:
    """Train on images with a box of another image: apply ``cutmix_batch`` to each rank's whole batch.

    The loss must accept probabilities, as ``soft_cross_entropy`` does.

    Formula: ``x = where(inside box, x[order], x)``, ``y = (1 - share) * y + share * y[order]``

    Args:
        alpha: parameter of the Beta distribution, >= 0, or a schedule.
        num_classes: number of classes; required for class indices.
        length: fraction of each side, instead of ``alpha``.
        placement: distribution of the boxes; see ``cutmix_batch``.
        per_sample: if True, draw a box per sample.
        input_key: key of the images; None takes ``"x"``, ``"input_ids"``, or the first entry of a tuple.
        target_key: key of the targets; None takes ``"y"``, ``"labels"``, or the second entry of a tuple.
        ignore_index: class index of ignored targets.

    Example:
        >>> import dtrain as dt
        >>> def loss_fn(model, batch):
        ...     return dt.soft_cross_entropy(model(batch["x"]).mean((2, 3)), batch["y"])
        >>> step = dt.compose_step(loss_fn, [dt.transforms.cutmix(num_classes=10)])
        >>> model = torch.nn.Conv2d(3, 10, 3)
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> state, metrics = step(state, {"x": torch.rand(8, 3, 32, 32), "y": torch.arange(8)})
        >>> dt.reduce_metrics(metrics)["loss"] > 0
        True

    Raises:
        ConfigError: ``alpha`` is negative (a schedule is checked in each step), ``length`` is outside of ``[0, 1]``, or
            ``placement`` is unknown. In a step: the batch cannot be mixed.

    Source: Yun et al. 2019, arXiv:1905.04899, section 3.

    Suggested values:
        CIFAR-10 and CIFAR-100, every second batch on average: ``alpha=1.0``, applied with probability 0.5 (Yun et al. 2019, the
            authors' repository)
        ImageNet, ResNet-50: ``alpha=1.0``, applied to every batch (Yun et al. 2019, the authors' repository)
    When not to use: an object may lie anywhere but fills a small part of the image: a box then changes the target without the
        object. Segmentation targets are not images of the batch either.
    """
    alpha_at = hyperparameter(alpha, "cutmix: alpha", "[0, inf)")
    check_num_classes(num_classes, "cutmix")
    _check_box_options(length, placement)
    cut = partial(
        cutmix_batch,
        num_classes=num_classes,
        length=length,
        placement=placement,
        per_sample=per_sample,
        input_key=input_key,
        target_key=target_key,
        ignore_index=ignore_index,
    )
    return batch_transform(cut, name="cutmix", at_clock={"alpha": alpha_at}, host_generator=True)


def _sample_box(
    size: tuple[int, int], alpha: float, length: float | None, placement: BoxPlacement, rng: random.Random
) -> tuple[int, int, int, int]:
    """Sample one box on the host."""
    fraction = math.sqrt(1.0 - sample_host_beta(alpha, rng)) if length is None else 0.0
    sides = [int(fraction * extent) if length is None else round(length * extent) for extent in size]
    starts = []
    for side, extent in zip(sides, size, strict=True):
        low, positions = box_starts(side, extent, placement)
        starts.append(low + rng.randrange(max(positions, 1)))
    return starts[0], starts[1], starts[0] + sides[0], starts[1] + sides[1]


def _sample_boxes(
    count: int, size: tuple[int, int], alpha: float, length: float | None, placement: BoxPlacement, generator: torch.Generator
) -> Tensor:
    """Sample a box per sample, int64 ``[count, 4]``."""
    device = generator.device
    if length is not None:
        sides = [torch.full((count,), round(length * extent), device=device) for extent in size]
    else:
        fraction = (1.0 - sample_beta(alpha, count, generator, device, torch.float32)).sqrt()
        sides = [(fraction * extent).long() for extent in size]
    return sample_boxes((sides[0], sides[1]), size, placement, generator)


_PLACEMENTS = (None, *get_args(BoxPlacement))


def _check_box_options(length: float | None, placement: BoxPlacement | None) -> None:
    if length is not None:
        check_number("cutmix", "length", length, minimum=0, maximum=1)
    check_choice("cutmix", "placement", placement, _PLACEMENTS)
