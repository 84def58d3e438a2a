"""Scores of language models: as sums with weights, for ``LossSum.aux``, and out of a loss."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.dtensor import local_last_dim
from dtrain.errors import ConfigError


def token_accuracy(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """How many of the targets have the largest logit, and how many targets count: what a loss gives as ``aux``.

    ``LossSum(..., aux={"accuracy": token_accuracy(logits, labels)})`` makes the metric ``accuracy``, which is exact over
    microbatches and ranks of any size.

    Formula: ``sum(counts * (argmax(logits) == targets))``, ``sum(counts)`` with ``counts = (targets != ignore_index) & mask``

    Args:
        logits: ``[*, classes]``, any float dtype. A DTensor that is cut along the classes is not put together.
        targets: ``[*]`` int64.
        ignore_index: the target that is left out, as in ``token_cross_entropy``.
        mask: ``[*]`` bool, or numbers of which 0 is left out; None counts all. For a part of the tokens, such as the answers.

    Returns:
        Two scalars ``[]``, float64, on the device of ``logits``, without gradient. Of equal logits the first one is taken. NaN
        is never right.

    Collective: for a DTensor that is cut along the classes two all-reduces of a number a token.
    Host sync: none.

    Raises:
        ConfigError: shapes that do not match, or a DTensor that is cut along another axis.

    Source: the share of right answers.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0], [1.0, 2.0]])
        >>> right, counted = token_accuracy(logits, torch.tensor([0, 1, 1, -100]))
        >>> right.item(), counted.item()
        (2.0, 3.0)
    """
    if logits.ndim < 1 or logits.shape[:-1] != targets.shape:
        raise ConfigError(
            f"token_accuracy: needs logits [*, classes] and targets [*], got {tuple(logits.shape)} and {tuple(targets.shape)}"
        )
    if mask is not None and mask.shape != targets.shape:
        raise ConfigError(f"token_accuracy: needs a mask {tuple(targets.shape)} like the targets, got {tuple(mask.shape)}")
    counts = targets != ignore_index
    if mask is not None:
        counts = counts & (mask != 0)
    found = _argmax(logits.detach())
    return ((found == targets) & counts).sum().double(), counts.sum().double()


def _argmax(logits: Tensor) -> Tensor:
    """The index of the largest logit ``[*]``, the first of equal ones; one that no class has, where one is NaN."""
    mine, first, group = local_last_dim(logits, caller="token_accuracy")
    mine = mine.detach()
    largest, at = mine.max(dim=-1)
    nowhere = torch.iinfo(torch.int64).max
    if group is None:
        return torch.where(largest.isnan(), nowhere, at)
    wide = torch.where(largest.isnan(), math.inf, largest.float() if largest.dtype.itemsize < 4 else largest)
    most = wide.clone()  # no backend promises what becomes of NaN
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    place = torch.where(wide == most, at + first, nowhere)
    place = torch.where(largest.isnan(), -1, place)  # so that NaN on one rank is the least, and no class
    dist.all_reduce(place, dist.ReduceOp.MIN, group=group)
    return place


def perplexity(loss: float) -> float:
    """The perplexity of a mean cross entropy in nats; infinite where it is too large for a float.

    Of the loss of many tokens, not of a mean of perplexities: ``perplexity(reduce_metrics(metrics)["loss"])``.

    Formula: ``exp(loss)``

    Source: Jelinek et al. 1977, Perplexity: a measure of the difficulty of speech recognition tasks.

    Example:
        >>> perplexity(0.0), round(perplexity(2.0), 3), perplexity(1000.0)
        (1.0, 7.389, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
