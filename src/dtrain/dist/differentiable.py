"""Differentiable collectives: an all-gather with the exact gradient, and cross entropy over a vocabulary-parallel head."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dtrain.dist.collectives import all_gather_numbers, all_gather_single
from dtrain.dist.init import get_dist_info
from dtrain.dist.rng import derive_seed
from dtrain.dist.timeout_report import report_missing_ranks
from dtrain.errors import ConfigError

_CALLER = "all_gather_with_grad"
# torch 2.13 renamed the function.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_with_grad(x: Tensor) -> Tensor:
    """Gather the rows of all ranks as ``[sum of n, ...]``, in the order of ranks, with the exact gradient.

    The gradient is the gradient of the loss *summed* over ranks: a step divides that sum by the global weight. A contrastive
    loss compares this rank's rows with the rows of all ranks. Weighted by this rank's number of rows, such a loss trains like
    one process with the whole batch. Use ``grad_cache_step`` for such losses. In ``microbatch_step`` each microbatch would
    gather only its own rows, and also the padding rows of ranks without samples.

    Args:
        x: ``[n, ...]``, plain, floating, on the device of the training group. ``n`` may differ between ranks, down to 0. The
            other dimensions, the dtype and ``requires_grad`` must be equal on all ranks. A rank without rows must also call
            this function and run backward.

    Collective: a record of three numbers on the control channel, and one all-gather of ``world_size * max(n)`` rows on the
        training group. In backward one reduce-scatter of the same size. Every rank must run backward through the result.
    Host sync: none.

    Example:
        def loss_fn(model, batch):
            queries, keys = model(batch)  # [n, dim] each
            keys = dt.dist.all_gather_with_grad(keys)  # [sum of n, dim]
            return dt.LossSum(total=contrastive_loss(queries, keys), weight=len(queries))

    Raises:
        ConfigError: a DTensor; a dtype that is not floating; no dimension; or dtype, shape or ``requires_grad`` differ between
            ranks; on all ranks.
    """
    problem = _find_problem(x)
    mine = [-1.0, 0.0, 0.0] if problem else [float(len(x)), float(x.requires_grad and torch.is_grad_enabled()), _layout_hash(x)]
    rows = all_gather_numbers(mine, caller=_CALLER)
    if problem:
        raise ConfigError(f"{_CALLER}: {problem}")
    for rank, row in enumerate(rows):
        if row[0] < 0:
            raise ConfigError(f"{_CALLER}: rank {rank} has a tensor that cannot be gathered. See the error of rank {rank}.")
        if row[1:] != mine[1:]:
            difference = "dtype or shape after the first dimension" if row[2] != mine[2] else "requires_grad"
            raise ConfigError(
                f"{_CALLER}: {difference} must be equal on all ranks, got {x.dtype}, {tuple(x.shape)}, "
                f"requires_grad={bool(mine[1])} on this rank. Rank {rank} differs."
            )
    if len(rows) == 1:
        return x.view_as(x)
    return cast(Tensor, _AllGatherRows.apply(x, [int(row[0]) for row in rows]))  # type: ignore[no-untyped-call]


def _find_problem(x: Tensor) -> str | None:
    if not isinstance(x, Tensor):
        return f"x must be a tensor, got {type(x).__name__}"
    # Only dtrain.dist.dtensor may use the attributes of a DTensor.
    if hasattr(x, "placements"):
        return "x must be a plain tensor, got a DTensor. Pass this rank's own rows."
    if not x.is_floating_point() or x.dim() == 0:
        return f"x must be a floating tensor with rows, got {x.dtype} of shape {tuple(x.shape)}. Convert labels."
    return None


def _layout_hash(x: Tensor) -> float:
    """Hash dtype and row shape to a number below 2**53, which float64 holds exactly."""
    return float(derive_seed(str(x.dtype), *x.shape[1:]) >> 10)


class _AllGatherRows(torch.autograd.Function):
    """All-gather of rows, padded to the largest number of rows of a rank; reduce-scatter in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int]) -> Tensor:
        ctx.counts, ctx.rank = counts, get_dist_info().rank
        longest = max(counts)
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: len(x)] = x
        everyone = x.new_empty(len(counts) * longest, *x.shape[1:])
        if everyone.numel():
            with report_missing_ranks(_CALLER):
                all_gather_single(everyone, padded)
        blocks = everyone.view(len(counts), longest, *x.shape[1:])
        return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        longest, row = max(ctx.counts), grad.shape[1:]
        blocks = grad.new_zeros(len(ctx.counts), longest, *row)
        for block, piece in zip(blocks, grad.split(ctx.counts), strict=True):
            block[: len(piece)] = piece
        mine = grad.new_zeros(longest, *row)
        if mine.numel():
            with report_missing_ranks(f"{_CALLER}, backward"):
                _reduce_scatter_single(mine, blocks.view(-1, *row))
        return mine[: ctx.counts[ctx.rank]], None


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Tensor, *, vocab_start: int, group: dist.ProcessGroup, ignore_index: int
) -> Tensor:
    """Compute the summed cross entropy ``[]`` of logits that are sharded over the vocabulary, without gathering the logits.

    The result is equal on all ranks of ``group``. Backward computes the gradient of one such sum, not of one sum per rank, as
    is usual for tensor parallelism.

    Args:
        logits: ``[n, part]``, this rank's columns of the whole logits, at least one.
        targets: ``[n]`` int64, columns of the whole logits, equal on all ranks. A target out of range makes the sum NaN.
        vocab_start: index of this rank's first column.
        group: ranks that hold the other columns.
        ignore_index: target that does not count.

    Collective: one all-reduce of ``[n]``, one of ``[3, n]``; none in backward.
    """
    return cast(Tensor, _VocabParallelCrossEntropy.apply(logits, targets, vocab_start, group, ignore_index))  # type: ignore[no-untyped-call]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """``sum(log(sum_j exp(z_j)) - z_target)``, computed after subtracting the largest logit."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocab_start: int, group: dist.ProcessGroup, ignore_index: int
    ) -> Tensor:
        largest = logits.amax(dim=1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        here = (targets >= vocab_start) & (targets < vocab_start + logits.shape[1])
        column = (targets - vocab_start).clamp(0, logits.shape[1] - 1)
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
        grad_logits = torch.where(counted[:, None], probabilities, 0.0)
        grad_logits.scatter_add_(1, column[:, None], -hit.to(grad_logits.dtype)[:, None])
        return grad_logits.mul_(grad), None, None, None, None
