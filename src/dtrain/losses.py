"""Losses as sums with weights: what ``microbatch_step`` needs to be exact for ragged batches."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.types import Batch, LossFn, LossSum


def token_cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> LossSum:
    """The summed cross entropy of next-token logits, weighted by the number of targets that count.

    Args:
        logits: ``[batch, seq, vocab]``, any float dtype; the softmax is computed in at least float32.
        targets: ``[batch, seq]`` int64; positions equal to ``ignore_index`` count neither in the sum nor in the weight.
        ignore_index: the target that is left out.

    Returns:
        ``LossSum`` in nats, whose weight is the number of tokens.

    Raises:
        ConfigError: shapes that do not match.
    """
    if logits.shape[:-1] != targets.shape:
        raise ConfigError(
            f"token_cross_entropy: needs logits [batch, seq, vocab] and targets [batch, seq], "
            f"got {tuple(logits.shape)} and {tuple(targets.shape)}"
        )
    wide = logits.flatten(0, -2)
    wide = wide if wide.dtype.itemsize >= 4 else wide.float()
    total = F.cross_entropy(wide, targets.flatten(), ignore_index=ignore_index, reduction="sum")
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
