"""Losses as sums with weights: what ``microbatch_step`` needs to be exact for ragged batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.dist.differentiable import vocab_parallel_cross_entropy
from dtrain.dtensor import local_last_dim
from dtrain.errors import ConfigError
from dtrain.typing import Batch, LossFn, LossSum


def token_cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> LossSum:
    """The summed cross entropy of next-token logits, weighted by the number of targets that count.

    Args:
        logits: ``[batch, seq, vocab]``, any float dtype; the softmax is computed in at least float32. A DTensor that is cut
            along ``vocab`` (from a head with ``ColwiseParallel(use_local_output=False)``) is not put together.
        targets: ``[batch, seq]`` int64; positions equal to ``ignore_index`` count neither in the sum nor in the weight.
        ignore_index: the target that is left out.

    Returns:
        ``LossSum`` in nats, whose weight is the number of tokens. Both are plain, and equal on the ranks of the DTensor.

    Collective: for a DTensor two all-reduces of a few numbers a token, in place of an all-gather of the logits.

    Raises:
        ConfigError: shapes that do not match, or a DTensor that is cut along another axis.
    """
    if logits.shape[:-1] != targets.shape:
        raise ConfigError(
            f"token_cross_entropy: needs logits [batch, seq, vocab] and targets [batch, seq], "
            f"got {tuple(logits.shape)} and {tuple(targets.shape)}"
        )
    mine, first, group = local_last_dim(logits, caller="token_cross_entropy")
    wide, flat = mine.flatten(0, -2), targets.flatten()
    wide = wide if wide.dtype.itemsize >= 4 else wide.float()
    if group is None:
        total = F.cross_entropy(wide, flat, ignore_index=ignore_index, reduction="sum")
    else:
        total = vocab_parallel_cross_entropy(wide, flat, vocab_start=first, group=group, ignore_index=ignore_index)
    return LossSum(total=total, weight=(targets != ignore_index).sum())


def soft_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    smoothing: float = 0.0,
    class_weights: Tensor | None = None,
) -> LossSum:
    """The summed cross entropy of targets that are class indices or probabilities, weighted by their mass.

    Formula: ``total = -sum_i sum_c w[c] * q[i, c] * log_softmax(logits[i])[c]``, ``weight = sum_i sum_c w[c] * p[i, c]``,
    ``q = (1 - smoothing) * p + smoothing * sum_c p / classes``
    with ``p`` the targets as probabilities and ``w`` the class weights, or ones. So a row of zeros, or ``ignore_index``, counts
    neither in the sum nor in the weight; for indices ``total / weight`` is ``torch.nn.functional.cross_entropy``.

    Args:
        logits: ``[*, classes]``, any float dtype (classes last, also of images); the softmax is computed in at least float32.
        targets: class indices ``[*]`` int64, or probabilities ``[*, classes]`` as ``mixup`` and the like make them.
        ignore_index: the index that is left out.
        smoothing: in ``[0, 1]``: the share of each target that is spread over all classes. Indices stay indices, so it is for
            vocabularies, too.
        class_weights: ``[classes]``, on the device of ``logits``; None counts all alike.

    Returns:
        ``LossSum`` in nats.

    Raises:
        ConfigError: shapes that do not match, targets of another dtype, ``smoothing`` outside of ``[0, 1]``, a DTensor that is
            cut along the classes.

    Source: Szegedy et al. 2016, arXiv:1512.00567, section 7; ``label_smoothing`` of torch's ``cross_entropy``.

    Example:
        >>> logits = torch.tensor([[0.0, 0.0], [3.0, 3.0]])
        >>> loss = soft_cross_entropy(logits, torch.tensor([[0.75, 0.25], [0.0, 0.0]]))
        >>> round(float(loss.total), 4), float(loss.weight)  # log 2, of one target
        (0.6931, 1.0)
    """
    _check_soft_targets(logits, targets, smoothing)
    if class_weights is not None and class_weights.shape != logits.shape[-1:]:
        raise ConfigError(
            f"soft_cross_entropy: needs a class weight for each of {logits.shape[-1]} classes, got shape "
            f"{tuple(class_weights.shape)}"
        )
    mine, _, group = local_last_dim(logits, caller="soft_cross_entropy")
    if group is not None:
        raise ConfigError("soft_cross_entropy: takes whole logits; for those cut along the classes use token_cross_entropy")
    wide = mine if mine.dtype.itemsize >= 4 else mine.float()
    weights = None if class_weights is None else class_weights.to(wide.dtype)
    if not targets.is_floating_point():
        total = F.cross_entropy(
            wide.flatten(0, -2),
            targets.flatten(),
            weight=weights,
            ignore_index=ignore_index,
            reduction="sum",
            label_smoothing=smoothing,
        )
        kept = targets != ignore_index
        mass = kept.sum() if weights is None else (weights[torch.where(kept, targets, 0)] * kept).sum()
        return LossSum(total=total, weight=mass)
    given = targets.to(wide.dtype)
    logs = wide.log_softmax(dim=-1) if weights is None else wide.log_softmax(dim=-1) * weights
    total = -(given * logs).sum()
    if smoothing:
        total = torch.lerp(total, -(given.sum(dim=-1) * logs.mean(dim=-1)).sum(), smoothing)
    return LossSum(total=total, weight=(given if weights is None else given * weights).sum().detach())


def _check_soft_targets(logits: Tensor, targets: Tensor, smoothing: float) -> None:
    if targets.dtype != torch.int64 and not targets.is_floating_point():
        raise ConfigError(
            f"soft_cross_entropy: targets are class indices (int64) or probabilities (float), got {targets.dtype}"
        )
    if logits.ndim < 2 or targets.shape != (logits.shape if targets.is_floating_point() else logits.shape[:-1]):
        raise ConfigError(
            f"soft_cross_entropy: needs logits [*, classes], and targets [*] of indices or [*, classes] of probabilities, got "
            f"{tuple(logits.shape)} and {tuple(targets.shape)} {targets.dtype}"
        )
    if isinstance(smoothing, bool) or not isinstance(smoothing, int | float) or not 0 <= smoothing <= 1:
        raise ConfigError(f"soft_cross_entropy: needs smoothing in [0, 1], got {smoothing=}")


def jensen_shannon(logits: Sequence[Tensor]) -> LossSum:
    """How far the answers to several views of each sample are apart: the summed Jensen-Shannon divergence.

    Formula: ``total = sum_i mean_v KL(p[v, i] || m[i])``, ``m = mean_v p[v]``, ``p = softmax(logits)``; ``weight`` counts the
    rows. It is 0 where all answers are the same, and ``log(views)`` nats at most.

    Args:
        logits: of each view ``[*, classes]``, all of one shape; at least two. Gradients flow through all of them.

    Returns:
        ``LossSum`` in nats.

    Raises:
        ConfigError: fewer than two, or different shapes.

    Source: Lin 1991; as a consistency loss Hendrycks et al. 2020, arXiv:1912.02781, section 3 (there times 12).

    Example:
        >>> sure = torch.tensor([[50.0, 0.0]])
        >>> loss = jensen_shannon([sure, sure.flip(1)])
        >>> round(float(loss.total), 4), float(loss.weight)  # log 2: they have nothing in common
        (0.6931, 1.0)
    """
    shapes = [tuple(view.shape) for view in logits]
    if len(shapes) < 2 or len(set(shapes)) > 1 or len(shapes[0]) < 2:
        raise ConfigError(f"jensen_shannon: needs logits [*, classes] of two or more views, alike in shape, got {shapes}")
    logs = torch.stack([(view if view.dtype.itemsize >= 4 else view.float()).log_softmax(dim=-1) for view in logits])
    middle = logs.logsumexp(dim=0) - math.log(len(shapes))
    rows = logs[0, ..., 0].numel()
    return LossSum(total=(logs.exp() * (logs - middle)).sum() / len(shapes), weight=rows)


def mean_loss(fn: Callable[[nn.Module, Batch], Tensor], *, weight: Callable[[Batch], Tensor | float]) -> LossFn:
    """A ``LossFn`` from a function that returns a mean.

    Args:
        fn: ``(model, batch) -> mean loss``, scalar ``[]``.
        weight: how many things the mean of this batch was taken over, such as ``lambda batch: len(batch["label"])``. It must
            be stated: a mean over tokens that is weighted by samples gives wrong gradients without an error.

    Raises:
        ConfigError: ``weight`` is not a function, or (when called) ``fn`` returns more than one number.
    """
    if not callable(weight):
        raise ConfigError(
            f"mean_loss: weight must be a function of the batch, got {weight!r}; e.g. lambda batch: len(batch['label'])"
        )

    def loss(model: nn.Module, batch: Batch) -> LossSum:
        mean, count = fn(model, batch), weight(batch)
        if not isinstance(mean, Tensor):
            own = (
                "take its loss, as in model(**batch).loss"
                if hasattr(mean, "loss")
                else "return the mean loss itself, a tensor []"
            )
            raise ConfigError(f"mean_loss: the function must return one tensor, got {type(mean).__name__}; {own}")
        if mean.ndim != 0:
            raise ConfigError(
                f"mean_loss: the function must return one number, got shape {tuple(mean.shape)}; reduce it to a mean"
            )
        return LossSum(total=mean * count, weight=count)

    return loss
