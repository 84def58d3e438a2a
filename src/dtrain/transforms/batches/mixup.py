"""Mixup: each sample and its target are a mixture of two."""

from __future__ import annotations

import torch
from torch import Tensor

from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import hyperparameter
from dtrain.state import TrainState
from dtrain.transform import Transform
from dtrain.transforms.batches.batch_transform import (
    BatchKey,
    batch_transform,
    check_alpha,
    get_targets,
    get_tensor,
    replace_tensors,
    require_generator,
    sample_beta,
    sample_permutation,
)
from dtrain.transforms.batches.labels import as_probabilities, check_num_classes
from dtrain.typing import Batch, Schedule


def mix_samples(samples: Tensor, order: Tensor, coefficient: Tensor | float) -> Tensor:
    """Each sample mixed with the one that ``order`` names.

    Formula: ``coefficient * samples + (1 - coefficient) * samples[order]``

    Args:
        samples: float ``[batch, *]``.
        order: int64 ``[batch]``, on the device of ``samples``.
        coefficient: in ``[0, 1]``: a number, ``[]``, ``[1]`` for all, or ``[batch]``.

    Raises:
        ConfigError: samples that are no floating-point numbers.

    Source: Zhang et al. 2018, arXiv:1710.09412, section 2.

    Example:
        >>> mix_samples(torch.tensor([0.0, 8.0]), torch.tensor([1, 0]), 0.75)
        tensor([2., 6.])
    """
    if not samples.is_floating_point():
        raise ConfigError(f"mix_samples: needs floating-point samples, got {samples.dtype}; convert them before")
    others = samples.index_select(0, order)
    if not isinstance(coefficient, Tensor):
        return others.lerp_(samples, coefficient)
    share = coefficient.to(samples.device, samples.dtype, non_blocking=True)
    return others.lerp_(samples, share.reshape(-1, *(1,) * (samples.ndim - 1)))


def mixup_batch(
    batch: Batch,
    *,
    num_classes: int | None = None,
    alpha: float = 0.2,
    per_sample: bool = False,
    input_key: BatchKey = "x",
    target_key: BatchKey = "y",
    ignore_index: int = -100,
    generator: torch.Generator | None = None,
    coefficient: Tensor | float | None = None,
    order: Tensor | None = None,
) -> Batch:
    """A batch whose inputs and targets are mixed with those of a random other sample, by the same coefficient.

    The targets are mixed, and not the losses of two targets (Composer's ``interpolate_loss``): for cross entropy that is the
    same number, and what mixes or smooths targets afterwards works on these.

    Formula: ``x = l * x + (1 - l) * x[order]``, ``y = l * y + (1 - l) * y[order]``, ``l ~ Beta(alpha, alpha)``
    with the targets ``y`` as probabilities.

    Args:
        batch: a mapping, TensorDict or tuple with float inputs ``[batch, *]`` and targets: class indices, probabilities, or the
            numbers of a regression ``[batch, *]``.
        num_classes: needed for class indices.
        alpha: >= 0; small numbers give mixtures that are mostly one of the two, 0 mixes nothing.
        per_sample: draw a coefficient for each sample, not one for the batch.
        input_key: their key.
        target_key: their key.
        ignore_index: the class index that is left out; mixed with another it leaves that one's share.
        generator: for what is not given below.
        coefficient: ``l``: a number, ``[]`` or ``[batch]``.
        order: int64 ``[batch]``, with whom each is mixed.

    Returns:
        A new batch; class indices have become probabilities ``[batch, *, num_classes]``.

    Host sync: none; a drawn coefficient stays a tensor.

    Raises:
        ConfigError: no generator where one is needed, inputs that are not float, class indices without ``num_classes``.

    Source: Zhang et al. 2018, arXiv:1710.09412, section 2; ``alpha=0.2`` is theirs for ImageNet.

    Example:
        >>> batch = {"x": torch.tensor([[0.0], [8.0]]), "y": torch.tensor([0, 1])}
        >>> mixed = mixup_batch(batch, num_classes=2, coefficient=0.75, order=torch.tensor([1, 0]))
        >>> mixed["x"].tolist(), mixed["y"].tolist()
        ([[2.0], [6.0]], [[0.75, 0.25], [0.25, 0.75]])
    """
    check_alpha(alpha, "mixup")
    x, y = get_tensor(batch, input_key, "mixup"), get_targets(batch, target_key, "mixup")
    if not x.is_floating_point():
        raise ConfigError(f"mixup: needs floating-point inputs, got {x.dtype} at {input_key!r}; convert them before")
    dtype = torch.promote_types(x.dtype, torch.float32)
    if coefficient is None:
        drawn = require_generator(generator, "mixup", "coefficient=... and order=...")
        coefficient = sample_beta(alpha, len(x) if per_sample else 1, drawn, x.device, dtype)
    if order is None:
        order = sample_permutation(len(x), require_generator(generator, "mixup", "coefficient=... and order=..."), x.device)
    y = as_probabilities(y, num_classes, ignore_index=ignore_index, dtype=dtype, caller="mixup")
    return replace_tensors(
        batch, {input_key: mix_samples(x, order, coefficient), target_key: mix_samples(y, order, coefficient)}
    )


def mixup(
    alpha: float | Schedule = 0.2,
    *,
    num_classes: int | None = None,
    per_sample: bool = False,
    input_key: BatchKey = "x",
    target_key: BatchKey = "y",
    ignore_index: int = -100,
) -> Transform:
    """Train on mixtures: ``mixup_batch`` of each rank's whole batch, before it is split.

    The loss must take probabilities, as ``soft_cross_entropy`` does.

    Formula: ``x = l * x + (1 - l) * x[order]``, ``y = l * y + (1 - l) * y[order]``, ``l ~ Beta(alpha, alpha)``

    Args:
        alpha: >= 0, or a schedule of such, read at the step about to run.
        num_classes: needed for class indices.
        per_sample: draw a coefficient for each sample.
        input_key: their key in the batch.
        target_key: their key.
        ignore_index: the class index that is left out.

    Raises:
        ConfigError: a negative ``alpha``; of a schedule, in the step for which it is, as for a batch that cannot be mixed.

    Source: Zhang et al. 2018, arXiv:1710.09412, section 2.

    Example:
        >>> from dtrain.combinators import every
        >>> every(2, mixup(0.2, num_classes=10)).name
        'mixup'
    """
    alpha_at = hyperparameter(alpha, "mixup: alpha", "[0, inf)")
    check_num_classes(num_classes, "mixup")

    def mixed(batch: Batch, state: TrainState, generator: torch.Generator) -> Batch:
        return mixup_batch(
            batch,
            num_classes=num_classes,
            alpha=alpha_at(state.clock),
            per_sample=per_sample,
            input_key=input_key,
            target_key=target_key,
            ignore_index=ignore_index,
            generator=generator,
        )

    return batch_transform(mixed, name="mixup", hyperparameters=(alpha_at,))
