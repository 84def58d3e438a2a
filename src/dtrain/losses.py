"""Losses as sums with weights: what ``microbatch_step`` needs to be exact for ragged batches."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.dist.cut_entropy import cut_cross_entropy
from dtrain.errors import ConfigError
from dtrain.tensors import last_dim_part
from dtrain.types import Batch, LossFn, LossSum


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
    mine, first, group = last_dim_part(logits, where="token_cross_entropy")
    wide, flat = mine.flatten(0, -2), targets.flatten()
    wide = wide if wide.dtype.itemsize >= 4 else wide.float()
    if group is None:
        total = F.cross_entropy(wide, flat, ignore_index=ignore_index, reduction="sum")
    else:
        total = cut_cross_entropy(wide, flat, first=first, group=group, ignore_index=ignore_index)
    return LossSum(total=total, weight=(targets != ignore_index).sum())


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
        if mean.ndim != 0:
            raise ConfigError(
                f"mean_loss: the function must return one number, got shape {tuple(mean.shape)}; reduce it to a mean"
            )
        return LossSum(total=mean * count, weight=count)

    return loss
