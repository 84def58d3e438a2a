"""Label smoothing: spread a fraction of each target over all classes."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.arguments import check_number
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameters import hyperparameter
from dtrain.step.transform import Transform
from dtrain.transforms.batches.batch_transform import (
    BatchKey,
    batch_transform,
    check_num_classes,
    get_targets,
    replace_tensors,
    to_probabilities,
)
from dtrain.typing import Batch, Schedule


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
        ConfigError: ``smoothing`` is outside of ``[0, 1]``, or ``num_classes`` is missing for indices.

    Source: Szegedy et al. 2016, arXiv:1512.00567, section 7.
    """
    check_number("label_smoothing", "smoothing", smoothing, minimum=0, maximum=1)
    return to_probabilities(targets, num_classes, ignore_index=ignore_index, smoothing=smoothing, caller="label_smoothing")


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
            neither indices nor probabilities.

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
            raise ConfigError(
                "label_smoothing: targets must be class indices (int64) or probabilities [batch, classes], "
                f"got {targets.dtype} of shape {tuple(targets.shape)} at {key!r}. "
                "Pass class indices or probabilities."
            )
        smoothed = smooth_labels(targets, smoothing, num_classes=num_classes, ignore_index=ignore_index)
        return replace_tensors(batch, {key: smoothed})

    return batch_transform(smooth, name="label_smoothing", at_clock={"smoothing": smoothing_at})
