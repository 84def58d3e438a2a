"""The cross entropy of logits whose vocabulary is cut over ranks, without putting it together on any of them."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def cut_cross_entropy(logits: Tensor, targets: Tensor, *, first: int, group: dist.ProcessGroup, ignore_index: int) -> Tensor:
    """The summed cross entropy ``[]``, the same on all ranks of ``group``.

    Args:
        logits: ``[n, part]``, this rank's columns, from column ``first`` of the whole; at least one of them.
        targets: ``[n]`` int64, columns of the whole, the same on all ranks. One that no rank has makes the sum NaN.
        first: as above.
        group: the ranks that have the other columns.
        ignore_index: the target that is left out.

    Backward takes the gradient of one such sum, not of as many as there are ranks, as tensor parallelism does.

    Collective: one all-reduce of ``[n]``, one of ``[3, n]``; none in backward.
    """
    return cast(Tensor, _CutCrossEntropy.apply(logits, targets, first, group, ignore_index))  # type: ignore[no-untyped-call]


class _CutCrossEntropy(torch.autograd.Function):
    """``sum(log(sum_j exp(z_j)) - z_target)``, with the largest logit taken off for the exponentials."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup, ignore_index: int) -> Tensor:
        largest = logits.amax(dim=1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        here = (targets >= first) & (targets < first + logits.shape[1])
        column = (targets - first).clamp(0, logits.shape[1] - 1)
        picked = torch.where(here, shifted.gather(1, column[:, None])[:, 0], 0.0)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(dim=1), picked, here.to(logits.dtype)])
        dist.all_reduce(sums, group=group)
        denominator, target, ranks = sums
        counted = targets != ignore_index
        losses = torch.where(ranks == 1, denominator.log() - target, torch.nan)
        ctx.save_for_backward(exponentials.div_(denominator[:, None]), column, here & counted, counted)
        return torch.where(counted, losses, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,) = grads
        probabilities, column, hit, counted = ctx.saved_tensors
        found = torch.where(counted[:, None], probabilities, 0.0)
        found.scatter_add_(1, column[:, None], -hit.to(found.dtype)[:, None])
        return found.mul_(grad), None, None, None, None
