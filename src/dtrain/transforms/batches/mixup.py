"""Mix samples and targets: ``mixup`` mixes samples, ``cutmix`` boxes of images, ``label_smoothing`` targets and all classes."""

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
    get_inputs,
    get_targets,
    host_random,
    mix_rows,
    replace_tensors,
    require_generator,
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

_PLACEMENTS = (None, *get_args(BoxPlacement))


def mixup_batch(
    batch: Batch,
    *,
    num_classes: int | None = None,
    alpha: float = 0.2,
    per_sample: bool = False,
    input_key: BatchKey | None = None,
    target_key: BatchKey | None = None,
    ignore_index: int = -100,
    generator: torch.Generator | None = None,
    coefficient: Tensor | float | None = None,
    order: Tensor | None = None,
) -> Batch:
    """Return a batch whose inputs and targets are mixed with a random other sample, with the same coefficient.

    The function mixes targets instead of the losses of two targets (Composer's ``interpolate_loss``). For cross entropy the
    result is the same, and later methods can mix or smooth these targets.

    Formula: ``x = l * x + (1 - l) * x[order]``, ``y = l * y + (1 - l) * y[order]``, ``l ~ Beta(alpha, alpha)``
    with the targets ``y`` as probabilities.

    Args:
        batch: mapping, TensorDict or tuple with float inputs ``[batch, *]`` and targets: class indices, probabilities, or
            regression targets ``[batch, *]``.
        num_classes: number of classes; required for class indices.
        alpha: parameter of the Beta distribution, >= 0; small values mix little, 0 does not mix.
        per_sample: if True, draw a coefficient per sample instead of one for the batch.
        input_key: key of the inputs; None takes ``"x"``, ``"input_ids"``, or the first entry of a tuple.
        target_key: key of the targets; None takes ``"y"``, ``"labels"``, or the second entry of a tuple.
        ignore_index: class index of ignored targets; a mixture with another target keeps that target's fraction.
        generator: generator for ``coefficient`` and ``order`` if not given.
        coefficient: ``l``: a number, ``[]`` or ``[batch]``.
        order: int64 ``[batch]``, index of each sample's partner.

    Returns:
        A new batch. Class indices become probabilities ``[batch, *, num_classes]``.

    Host sync: none; a random coefficient stays a tensor.

    Example:
        >>> import dtrain as dt
        >>> batch = {"x": torch.tensor([[0.0], [8.0]]), "y": torch.tensor([0, 1])}
        >>> mixed = dt.transforms.mixup_batch(
        ...     batch, num_classes=2, coefficient=0.75, order=torch.tensor([1, 0])
        ... )
        >>> mixed["x"].tolist(), mixed["y"].tolist()
        ([[2.0], [6.0]], [[0.75, 0.25], [0.25, 0.75]])

    Raises:
        ConfigError: ``generator`` is required but missing, the inputs are not float, or class indices lack ``num_classes``.

    Source: Zhang et al. 2018, arXiv:1710.09412, section 2; ``alpha=0.2`` is the paper's value for ImageNet.
    """
    check_number("mixup", "alpha", alpha, minimum=0)
    (input_key, x), (target_key, y) = get_inputs(batch, input_key, "mixup"), get_targets(batch, target_key, "mixup")
    if not x.is_floating_point():
        raise ConfigError(f"mixup: inputs must be floating-point, got {x.dtype} at {input_key!r}. Convert the inputs first.")
    dtype = torch.promote_types(x.dtype, torch.float32)
    if coefficient is None or order is None:
        generator = require_generator(generator, "mixup", "coefficient= and order=")
        if coefficient is None:
            coefficient = sample_beta(alpha, len(x) if per_sample else 1, generator, x.device, dtype)
        if order is None:
            order = sample_permutation(len(x), generator, x.device)
    y = to_probabilities(y, num_classes, ignore_index=ignore_index, dtype=dtype, caller="mixup")
    return replace_tensors(batch, {input_key: mix_rows(x, order, coefficient), target_key: mix_rows(y, order, coefficient)})


def mixup(
    alpha: float | Schedule = 0.2,
    *,
    num_classes: int | None = None,
    per_sample: bool = False,
    input_key: BatchKey | None = None,
    target_key: BatchKey | None = None,
    ignore_index: int = -100,
) -> Transform:
    """Train on mixtures of samples: apply ``mixup_batch`` to each rank's whole batch before the split into microbatches.

    The loss must accept probabilities, as ``soft_cross_entropy`` does.

    Formula: ``x = l * x + (1 - l) * x[order]``, ``y = l * y + (1 - l) * y[order]``, ``l ~ Beta(alpha, alpha)``

    Args:
        alpha: parameter of the Beta distribution, >= 0, or a schedule.
        num_classes: number of classes; required for class indices.
        per_sample: if True, draw a coefficient per sample.
        input_key: key of the inputs; None takes ``"x"``, ``"input_ids"``, or the first entry of a tuple.
        target_key: key of the targets; None takes ``"y"``, ``"labels"``, or the second entry of a tuple.
        ignore_index: class index of ignored targets.

    Example:
        >>> import dtrain as dt
        >>> def loss_fn(model, batch):
        ...     return dt.soft_cross_entropy(model(batch["x"]).mean((2, 3)), batch["y"])
        >>> step = dt.compose_step(loss_fn, [dt.transforms.mixup(0.2, num_classes=10)])
        >>> model = torch.nn.Conv2d(3, 10, 3)
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> state, metrics = step(state, {"x": torch.rand(8, 3, 32, 32), "y": torch.arange(8)})
        >>> dt.reduce_metrics(metrics)["loss"] > 0
        True

    Raises:
        ConfigError: ``alpha`` is negative (a schedule is checked in each step). In a step: the batch cannot be mixed.

    Source: Zhang et al. 2018, arXiv:1710.09412, section 2.

    Suggested values:
        ImageNet, ResNet-50: ``alpha=0.2`` (Zhang et al. 2018, section 3.1)
        CIFAR-10 and CIFAR-100: ``alpha=1.0`` (Zhang et al. 2018, section 3.2)
    When not to use: the run is short, or the model underfits: mixtures are harder samples. Inputs must be floats, so token ids
        cannot be mixed.
    """
    alpha_at = hyperparameter(alpha, "mixup: alpha", "[0, inf)")
    check_num_classes(num_classes, "mixup")
    mix = partial(
        mixup_batch,
        num_classes=num_classes,
        per_sample=per_sample,
        input_key=input_key,
        target_key=target_key,
        ignore_index=ignore_index,
    )
    return batch_transform(mix, name="mixup", at_clock={"alpha": alpha_at})


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
        tensor_rng = (
            generator if isinstance(generator, torch.Generator) else torch.Generator("cpu").manual_seed(rng.getrandbits(63))
        )
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
    dtype = torch.promote_types(x.dtype, torch.float32)
    y = to_probabilities(y, num_classes, ignore_index=ignore_index, dtype=dtype, caller="cutmix")
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


def _check_box_options(length: float | None, placement: BoxPlacement | None) -> None:
    if length is not None:
        check_number("cutmix", "length", length, minimum=0, maximum=1)
    check_choice("cutmix", "placement", placement, _PLACEMENTS)


def smooth_labels(
    targets: Tensor, smoothing: float = 0.1, *, num_classes: int | None = None, ignore_index: int = -100
) -> Tensor:
    """Return probabilities ``[*, classes]`` with a fraction of each row spread evenly over all classes.

    Each row keeps its mass, so an ignored row stays ignored. With many classes (tokens), ``soft_cross_entropy(smoothing=...)``
    computes the same loss without these probabilities.

    Formula: ``result = (1 - smoothing) * p + smoothing * sum(p) / classes`` for each row ``p``

    Args:
        targets: class indices ``[*]``, or probabilities ``[*, classes]``: one-hot, mixed, of any mass.
        smoothing: fraction in ``[0, 1]``.
        num_classes: number of classes; required for class indices.
        ignore_index: index of ignored targets.

    Example:
        >>> import dtrain as dt
        >>> dt.transforms.smooth_labels(torch.tensor([2, -100]), 0.4, num_classes=4)
        tensor([[0.1000, 0.1000, 0.7000, 0.1000],
                [0.0000, 0.0000, 0.0000, 0.0000]])

    Raises:
        ConfigError: ``smoothing`` is outside of ``[0, 1]``, ``num_classes`` is missing for indices, or float targets have one
            class, or no axis of classes (``[batch]`` without ``num_classes``).

    Source: Szegedy et al. 2016, arXiv:1512.00567, section 7.
    """
    return _smooth(targets, smoothing, num_classes, ignore_index, torch.float32)


def _smooth(targets: Tensor, smoothing: float, num_classes: int | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """Smooth as ``smooth_labels`` does; class indices become probabilities of ``dtype``."""
    check_number("label_smoothing", "smoothing", smoothing, minimum=0, maximum=1)
    if smoothing and targets.is_floating_point():
        # The last axis of one number per sample is the batch; one class has no other class to share with.
        without_classes = targets.ndim < 2 and num_classes is None
        if without_classes or targets.shape[-1:] == (1,):
            raise ConfigError(f"label_smoothing: {_describe_float_targets(targets)}")
    return to_probabilities(
        targets, num_classes, ignore_index=ignore_index, smoothing=smoothing, dtype=dtype, caller="label_smoothing"
    )


def _describe_float_targets(targets: Tensor, key: str = "") -> str:
    return (
        "targets must be class indices (int64) or probabilities [batch, classes] of at least two classes, "
        f"got {targets.dtype} of shape {tuple(targets.shape)}{key}. "
        "Smooth binary targets with dt.transforms.on_batch: y * (1 - s) + s / 2."
    )


def label_smoothing(
    smoothing: float | Schedule = 0.1,
    *,
    num_classes: int | None = None,
    target_key: BatchKey | None = None,
    ignore_index: int = -100,
) -> Transform:
    """Train on smoothed targets: apply ``smooth_labels`` to each rank's batch. List it after ``mixup`` or ``cutmix``.

    The loss must accept probabilities, as ``soft_cross_entropy`` does.

    Formula: ``y = (1 - smoothing) * y + smoothing * sum(y) / classes`` for each row of the targets ``y``

    Args:
        smoothing: fraction in ``[0, 1]``, or a schedule.
        num_classes: number of classes; required for class indices.
        target_key: key of the targets; None takes ``"y"``, ``"labels"``, or the second entry of a tuple.
        ignore_index: index of ignored targets.

    Example:
        >>> import dtrain as dt
        >>> def loss_fn(model, batch):
        ...     return dt.soft_cross_entropy(model(batch["x"]), batch["y"])
        >>> step = dt.compose_step(loss_fn, [dt.transforms.label_smoothing(0.4, num_classes=4)])
        >>> model = torch.nn.Linear(2, 4)
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> state, metrics = step(state, {"x": torch.ones(1, 2), "y": torch.tensor([2])})
        >>> dt.reduce_metrics(metrics)["loss"] > 0
        True

    Raises:
        ConfigError: ``smoothing`` is outside of ``[0, 1]`` (a schedule is checked in each step). In a step: the targets are
            neither indices nor probabilities of at least two classes.

    Source: Szegedy et al. 2016, arXiv:1512.00567, section 7.

    Suggested values:
        ImageNet, Inception-v3: ``smoothing=0.1`` (Szegedy et al. 2016, section 7)
        WMT 2014 translation, Transformer: ``smoothing=0.1`` (Vaswani et al. 2017, arXiv:1706.03762, section 5.4)
    When not to use: the model becomes the teacher of a distillation: Müller et al. 2019 (arXiv:1906.02629) find worse students.
        Reported training loss and perplexity also rise.
    """
    smoothing_at = hyperparameter(smoothing, "label_smoothing: smoothing", "[0, 1]")
    check_num_classes(num_classes, "label_smoothing")

    def smooth(batch: Batch, *, smoothing: float, generator: torch.Generator) -> Batch:
        key, targets = get_targets(batch, target_key, "label_smoothing")
        if targets.is_floating_point() and targets.ndim < 2:
            raise ConfigError(f"label_smoothing: {_describe_float_targets(targets, f' at {key!r}')}")
        smoothed = _smooth(targets, smoothing, num_classes, ignore_index, _probability_dtype(batch))
        return replace_tensors(batch, {key: smoothed})

    return batch_transform(smooth, name="label_smoothing", at_clock={"smoothing": smoothing_at})


def _probability_dtype(batch: Batch) -> torch.dtype:
    """Return the dtype of probabilities made from class indices: that of the inputs, but at least float32."""
    try:
        return torch.promote_types(get_inputs(batch, None, "label_smoothing")[1].dtype, torch.float32)
    except ConfigError:
        # No inputs at the usual keys, which label_smoothing does not need.
        return torch.float32
