"""Mixup: mix each sample and its target with another sample."""

from __future__ import annotations

from functools import partial

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
    get_inputs,
    get_targets,
    mix_rows,
    replace_tensors,
    require_generator,
    sample_beta,
    sample_permutation,
    to_probabilities,
)
from dtrain.typing import Batch, Schedule


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
