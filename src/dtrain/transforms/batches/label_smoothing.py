"""Label smoothing: a part of each target is spread over all classes."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import hyperparameter
from dtrain.state import TrainState
from dtrain.transform import Transform
from dtrain.transforms.batches.batch_transform import BatchKey, batch_transform, check_fraction, get_targets, replace_tensors
from dtrain.transforms.batches.labels import as_probabilities, check_num_classes
from dtrain.typing import Batch, Schedule


def smooth_labels(
    targets: Tensor, smoothing: float = 0.1, *, num_classes: int | None = None, ignore_index: int = -100
) -> Tensor:
    """Probabilities ``[*, classes]`` of which a share is spread evenly; each row keeps its mass, so one left out stays so.

    With many classes, as of tokens, ``soft_cross_entropy(smoothing=...)`` gives the same loss without making them.

    Formula: ``made = (1 - smoothing) * p + smoothing * sum(p) / classes`` for each row ``p``

    Args:
        targets: class indices ``[*]``, or probabilities ``[*, classes]``: one-hot, mixed, of any mass.
        smoothing: in ``[0, 1]``.
        num_classes: needed for class indices.
        ignore_index: the index that is left out.

    Raises:
        ConfigError: ``smoothing`` outside of ``[0, 1]``, indices without ``num_classes``.

    Source: Szegedy et al. 2016, arXiv:1512.00567, section 7.

    Example:
        >>> smooth_labels(torch.tensor([2, -100]), 0.4, num_classes=4)
        tensor([[0.1000, 0.1000, 0.7000, 0.1000],
                [0.0000, 0.0000, 0.0000, 0.0000]])
    """
    check_fraction(smoothing, "label_smoothing", "smoothing")
    given = as_probabilities(targets, num_classes, ignore_index=ignore_index, caller="label_smoothing")
    return torch.lerp(given, given.mean(dim=-1, keepdim=True).expand_as(given), smoothing)


def label_smoothing(
    smoothing: float | Schedule = 0.1, *, num_classes: int | None = None, target_key: BatchKey = "y", ignore_index: int = -100
) -> Transform:
    """Train on smoothed targets: ``smooth_labels`` of those of each rank's batch. List it after ``mixup`` or ``cutmix``.

    The loss must take probabilities, as ``soft_cross_entropy`` does.

    Formula: ``y = (1 - smoothing) * y + smoothing * sum(y) / classes`` for each row of the targets ``y``

    Args:
        smoothing: in ``[0, 1]``, or a schedule of such, read at the step about to run.
        num_classes: needed for class indices.
        target_key: their key in the batch.
        ignore_index: the index that is left out.

    Raises:
        ConfigError: ``smoothing`` outside of ``[0, 1]``; of a schedule, in the step for which it is, as for targets that are
            neither indices nor probabilities.

    Source: Szegedy et al. 2016, arXiv:1512.00567, section 7.

    Example:
        >>> label_smoothing(0.1, num_classes=10).name
        'label_smoothing'
    """
    smoothing_at = hyperparameter(smoothing, "label_smoothing: smoothing", "[0, 1]")
    check_num_classes(num_classes, "label_smoothing")

    def smoothed(batch: Batch, state: TrainState, generator: torch.Generator) -> Batch:
        given = get_targets(batch, target_key, "label_smoothing")
        if given.is_floating_point() and given.ndim < 2:
            raise ConfigError(
                f"label_smoothing: needs class indices (int64) or probabilities [batch, classes], got {given.dtype} of shape "
                f"{tuple(given.shape)} at {target_key!r}"
            )
        made = smooth_labels(given, smoothing_at(state.clock), num_classes=num_classes, ignore_index=ignore_index)
        return replace_tensors(batch, {target_key: made})

    return batch_transform(smoothed, name="label_smoothing", hyperparameters=(smoothing_at,))
