"""``all_gather_with_grad``: everybody's rows in everybody's loss, with the exact gradient.

The cross entropy of logits whose vocabulary is cut over ranks, without putting it together on any of them."""

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
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13


def all_gather_with_grad(x: Tensor) -> Tensor:
    """The rows of all ranks, ``[sum of n, ...]`` in the order of ranks, for a loss over all of them (contrastive losses).

    The gradient is that of the loss *summed* over ranks, which is what a step of this library divides by the global weight:
    each rank's rows get the sum of what all ranks' losses say about them. So a loss over this rank's rows against everybody's,
    with their number as its weight, trains like one process with the whole batch. ``grad_cache_step`` is the step for
    it: in ``microbatch_step`` each microbatch would gather rows of its own, and those that a rank repeats for want of samples.

        z = dt.dist.all_gather_with_grad(model(batch))  # [n, dim] -> [sum of n, dim]

    Args:
        x: ``[n, ...]``, plain, floating, on the device of the training group. ``n`` may differ between ranks, down to 0; the
            other dimensions and the dtype are the same on all. It must require a gradient on all ranks or on none; a rank
            without rows still calls this, and backward.

    Collective: a record of three numbers on the control group, and one all-gather of ``world_size * max(n)`` rows on the
        training group; in backward one reduce-scatter of the same size. Every rank must run backward through the result.
    Host sync: none.

    Raises:
        ConfigError: a DTensor; a dtype that is not floating; no dimension; or ranks that differ in what they must not; on all
            ranks.
    """
    problem = _find_problem(x)
    mine = [-1.0, 0.0, 0.0] if problem else [float(len(x)), float(x.requires_grad and torch.is_grad_enabled()), _layout_hash(x)]
    rows = all_gather_numbers(mine, caller=_CALLER)
    if problem:
        raise ConfigError(f"{_CALLER}: {problem}")
    for rank, row in enumerate(rows):
        if row[0] < 0:
            raise ConfigError(f"{_CALLER}: rank {rank} has a tensor that cannot be gathered; see its error")
        if row[1:] != mine[1:]:
            what = "dtype or shape after the first dimension" if row[2] != mine[2] else "whether a gradient is required"
            raise ConfigError(f"{_CALLER}: ranks differ in {what} (this rank: {x.dtype}, {tuple(x.shape)}, "
                              f"requires_grad={bool(mine[1])}; rank {rank} differs); give all the same")  # fmt: skip
    if len(rows) == 1:
        return x.view_as(x)
    return cast(Tensor, _AllGatherRows.apply(x, [int(row[0]) for row in rows]))  # type: ignore[no-untyped-call]


def _find_problem(x: Tensor) -> str | None:
    if not isinstance(x, Tensor):
        return f"takes a tensor, got {type(x).__name__}"
    if hasattr(x, "placements"):  # a DTensor, which only dtrain.dtensor looks into
        return "takes a plain tensor, got a DTensor; pass this rank's own rows"
    if not x.is_floating_point() or x.dim() == 0:
        return (
            f"takes floating tensors with rows, got {x.dtype} of shape {tuple(x.shape)}; labels need no gradient: convert them"
        )
    return None


def _layout_hash(x: Tensor) -> float:
    """A number that differs when dtype or row shape do; below 2**53, so that it travels exactly."""
    return float(derive_seed(str(x.dtype), *x.shape[1:]) >> 10)


class _AllGatherRows(torch.autograd.Function):
    """Rows travel padded to the longest rank's, in one collective each way."""

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
    """The summed cross entropy ``[]``, the same on all ranks of ``group``.

    Args:
        logits: ``[n, part]``, this rank's columns, from column ``vocab_start`` of the whole; at least one of them.
        targets: ``[n]`` int64, columns of the whole, the same on all ranks. One that no rank has makes the sum NaN.
        vocab_start: as above.
        group: the ranks that have the other columns.
        ignore_index: the target that is left out.

    Backward takes the gradient of one such sum, not of as many as there are ranks, as tensor parallelism does.

    Collective: one all-reduce of ``[n]``, one of ``[3, n]``; none in backward.
    """
    return cast(Tensor, _VocabParallelCrossEntropy.apply(logits, targets, vocab_start, group, ignore_index))  # type: ignore[no-untyped-call]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """``sum(log(sum_j exp(z_j)) - z_target)``, with the largest logit taken off for the exponentials."""

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
        found = torch.where(counted[:, None], probabilities, 0.0)
        found.scatter_add_(1, column[:, None], -hit.to(found.dtype)[:, None])
        return found.mul_(grad), None, None, None, None
