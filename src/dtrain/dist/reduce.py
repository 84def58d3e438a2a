"""``reduce_sum``, ``reduce_mean`` and ``reduce_max``: one number or tensor out of one on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import overload

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain import heartbeats, spans
from dtrain.dist.collectives import all_gather_numbers, check_rank
from dtrain.dist.timeout_report import report_missing_ranks
from dtrain.errors import ConfigError


@overload
def reduce_sum(x: Tensor, dst: None = None) -> Tensor: ...
@overload
def reduce_sum(x: float, dst: None = None) -> float: ...
@overload
def reduce_sum(x: Tensor, dst: int) -> Tensor | None: ...
@overload
def reduce_sum(x: float, dst: int) -> float | None: ...
def reduce_sum(x: Tensor | float, dst: int | None = None) -> Tensor | float | None:
    """The sum of ``x`` over all ranks.

    >>> reduce_sum(2.5)
    2.5

    Args:
        x: a plain tensor of one shape and dtype on every rank, floating or integer, on the device of the training group; or a
            Python number. It is not changed, and no gradient flows through the result.
        dst: the rank that gets the result; by default all do.

    Returns:
        A new tensor of ``x``'s shape and dtype, on its device; for a number a float (exact for integers below 2**53). None on
        ranks other than ``dst``.

    Collective: for a tensor one all-reduce, with ``dst`` one reduce, on the training group; for a number one all-gather of one
        float64 on the control group.
    Host sync: none.

    Raises:
        ConfigError: a DTensor, or one that is not dense; bool, complex, or no number; no rank ``dst``.
    """
    return _reduce("reduce_sum", x, dst, numbers=sum, tensors=_sum_tensor)


@overload
def reduce_mean(x: Tensor, dst: None = None) -> Tensor: ...
@overload
def reduce_mean(x: float, dst: None = None) -> float: ...
@overload
def reduce_mean(x: Tensor, dst: int) -> Tensor | None: ...
@overload
def reduce_mean(x: float, dst: int) -> float | None: ...
def reduce_mean(x: Tensor | float, dst: int | None = None) -> Tensor | float | None:
    """The mean of ``x`` over all ranks, each rank counted once; see ``reduce_sum``.

    A mean of per-rank means is not the mean over samples when ranks hold different numbers of them: sum totals and weights with
    ``reduce_sum`` and divide, or use ``reduce_metrics``.

    Collective: as ``reduce_sum``.

    Raises:
        ConfigError: as ``reduce_sum``; and an integer tensor, whose mean has no dtype (convert it, as for ``torch.mean``).
    """
    if isinstance(x, Tensor) and not (x.is_floating_point() or x.dtype in _UNSUPPORTED_DTYPES):
        raise ConfigError(f"reduce_mean: the mean of {x.dtype} has no dtype; convert it first, for example x.double()")
    total = _reduce("reduce_mean", x, dst, numbers=sum, tensors=_sum_tensor)
    world = check_rank("reduce_mean", "dst", 0).world_size
    return total if total is None else total / world


@overload
def reduce_max(x: Tensor, dst: None = None) -> Tensor: ...
@overload
def reduce_max(x: float, dst: None = None) -> float: ...
@overload
def reduce_max(x: Tensor, dst: int) -> Tensor | None: ...
@overload
def reduce_max(x: float, dst: int) -> float | None: ...
def reduce_max(x: Tensor | float, dst: int | None = None) -> Tensor | float | None:
    """The largest ``x`` of all ranks, element by element; see ``reduce_sum``. NaN on any rank gives NaN.

    Collective: as ``reduce_sum``, but a floating tensor travels twice, the second time to say where it is NaN: backends differ
    in what they make of one.
    """
    return _reduce("reduce_max", x, dst, numbers=_max_number, tensors=_max_tensor)


_UNSUPPORTED_DTYPES = {torch.bool, torch.complex32, torch.complex64, torch.complex128}


def _reduce(
    caller: str,
    x: Tensor | float,
    dst: int | None,
    *,
    numbers: Callable[[Iterable[float]], float],
    tensors: Callable[[Tensor, Callable[[Tensor, dist.ReduceOp.RedOpType], None]], Tensor],
) -> Tensor | float | None:
    info = check_rank(caller, "dst", 0 if dst is None else dst)
    wanted = dst is None or dst == info.rank
    heartbeats.heartbeat(caller)
    if not isinstance(x, Tensor):
        if isinstance(x, bool) or not isinstance(x, int | float):
            raise ConfigError(f"{caller}: takes a tensor or a number, got {type(x).__name__}; bool and None are neither")
        result = numbers(row[0] for row in all_gather_numbers([x], caller=caller))
        return result if wanted else None
    _check_tensor(caller, x)

    def exchange(buffer: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if info.world_size == 1 or buffer.numel() == 0:
            return
        with spans.outermost_span("collective"), report_missing_ranks(caller):
            if dst is None:
                dist.all_reduce(buffer, op)
            else:
                dist.reduce(buffer, dst, op)

    reduced = tensors(x.detach(), exchange)
    return reduced if wanted else None


def _check_tensor(caller: str, x: Tensor) -> None:
    if hasattr(x, "placements"):  # a DTensor, which only dtrain.dtensor looks into
        raise ConfigError(f"{caller}: takes a plain tensor, got a DTensor; pass x.full_tensor() or x.to_local()")
    if x.dtype in _UNSUPPORTED_DTYPES:
        raise ConfigError(f"{caller}: takes floating or integer tensors, got {x.dtype}; convert it, for example x.int()")
    if x.layout is not torch.strided:
        raise ConfigError(f"{caller}: takes dense tensors, got {x.layout}; pass x.to_dense()")


def _sum_tensor(x: Tensor, exchange: Callable[[Tensor, dist.ReduceOp.RedOpType], None]) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    exchange(total, dist.ReduceOp.SUM)
    return total


def _max_tensor(x: Tensor, exchange: Callable[[Tensor, dist.ReduceOp.RedOpType], None]) -> Tensor:
    if not x.is_floating_point():
        largest = x.clone(memory_format=torch.contiguous_format)
        exchange(largest, dist.ReduceOp.MAX)
        return largest
    missing = x.isnan()
    both = torch.stack([x.masked_fill(missing, -math.inf), missing.to(x.dtype)])
    exchange(both, dist.ReduceOp.MAX)
    return both[0].masked_fill(both[1] > 0, math.nan)


def _max_number(numbers: Iterable[float]) -> float:
    values = list(numbers)
    return math.nan if any(math.isnan(value) for value in values) else max(values)
