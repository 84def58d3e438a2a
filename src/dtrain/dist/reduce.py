"""Reduce one number or tensor per rank over all ranks: ``reduce_sum``, ``reduce_mean`` and ``reduce_max``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain import spans
from dtrain.dist.collectives import all_gather_numbers, check_rank
from dtrain.dist.timeout_report import report_missing_ranks
from dtrain.errors import ConfigError
from dtrain.launch import heartbeats

TensorOrNumber = TypeVar("TensorOrNumber", Tensor, float)


@overload
def reduce_sum(x: TensorOrNumber, dst: None = None) -> TensorOrNumber: ...
@overload
def reduce_sum(x: TensorOrNumber, dst: int) -> TensorOrNumber | None: ...
def reduce_sum(x: Tensor | float, dst: int | None = None) -> Tensor | float | None:
    """Sum ``x`` over all ranks.

    Args:
        x: plain tensor of one shape and dtype on every rank, floating or integer, on the device of the training group; or a
            Python number. ``x`` is not changed, and no gradient flows through the result.
        dst: rank that receives the result; None gives the result to all ranks.

    Returns:
        A new tensor of ``x``'s shape and dtype, on its device. For a number a float, exact for integers below 2**53. None on
        ranks other than ``dst``.

    Collective: for a tensor one all-reduce, with ``dst`` one reduce, on the training group. For a number one all-gather of one
        float64 on the control channel.
    Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> dt.dist.reduce_sum(2.5)  # one rank
        2.5

    Raises:
        ConfigError: a DTensor, a tensor that is not dense, bool, complex, or not a number; or ``dst`` is not a rank.
    """
    return _reduce("reduce_sum", x, dst, numbers=sum, tensors=_sum_tensor)


@overload
def reduce_mean(x: TensorOrNumber, dst: None = None) -> TensorOrNumber: ...
@overload
def reduce_mean(x: TensorOrNumber, dst: int) -> TensorOrNumber | None: ...
def reduce_mean(x: Tensor | float, dst: int | None = None) -> Tensor | float | None:
    """Average ``x`` over all ranks, each rank counted once; see ``reduce_sum``.

    If ranks have different numbers of samples, the mean of means is not the mean over samples. Then sum totals and weights with
    ``reduce_sum`` and divide, or use ``reduce_metrics``.

    Args:
        x: as in ``reduce_sum``, but not an integer tensor.
        dst: as in ``reduce_sum``.

    Collective: as ``reduce_sum``.

    Example:
        >>> import dtrain as dt
        >>> dt.dist.reduce_mean(torch.tensor([1.0, 3.0]))
        tensor([1., 3.])

    Raises:
        ConfigError: as in ``reduce_sum``; or an integer tensor, whose mean would need another dtype.
    """
    if isinstance(x, Tensor) and not (x.is_floating_point() or x.dtype in _UNSUPPORTED_DTYPES):
        raise ConfigError(f"reduce_mean: the mean of {x.dtype} has no dtype. Convert x first, for example x.double().")
    total = _reduce("reduce_mean", x, dst, numbers=sum, tensors=_sum_tensor)
    world = check_rank("reduce_mean", "dst", 0).world_size
    return total if total is None else total / world


@overload
def reduce_max(x: TensorOrNumber, dst: None = None) -> TensorOrNumber: ...
@overload
def reduce_max(x: TensorOrNumber, dst: int) -> TensorOrNumber | None: ...
def reduce_max(x: Tensor | float, dst: int | None = None) -> Tensor | float | None:
    """Return the elementwise maximum of ``x`` over all ranks; see ``reduce_sum``. NaN on any rank gives NaN.

    Args:
        x: as in ``reduce_sum``.
        dst: as in ``reduce_sum``.

    Collective: as ``reduce_sum``, but twice the size for a floating tensor. The second half marks NaN, because backends differ
        in the maximum of NaN.

    Example:
        >>> import dtrain as dt
        >>> dt.dist.reduce_max(7)
        7.0

    Raises:
        ConfigError: as in ``reduce_sum``.
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
            raise ConfigError(
                f"{caller}: x must be a tensor or a number, got {type(x).__name__}. "
                "Convert the value with torch.as_tensor first."
            )
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
    # Only dtrain.dist.dtensor may use the attributes of a DTensor.
    if hasattr(x, "placements"):
        raise ConfigError(f"{caller}: x must be a plain tensor, got a DTensor. Pass x.full_tensor() or x.to_local().")
    if x.dtype in _UNSUPPORTED_DTYPES:
        raise ConfigError(f"{caller}: x must be a floating or integer tensor, got {x.dtype}. Convert x, for example x.int().")
    if x.layout is not torch.strided:
        raise ConfigError(f"{caller}: x must be a dense tensor, got {x.layout}. Pass x.to_dense().")


def _sum_tensor(x: Tensor, exchange: Callable[[Tensor, dist.ReduceOp.RedOpType], None]) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    exchange(total, dist.ReduceOp.SUM)
    return total


def _max_tensor(x: Tensor, exchange: Callable[[Tensor, dist.ReduceOp.RedOpType], None]) -> Tensor:
    if not x.is_floating_point():
        largest = x.clone(memory_format=torch.contiguous_format)
        exchange(largest, dist.ReduceOp.MAX)
        return largest
    nan = x.isnan()
    both = torch.stack([x.masked_fill(nan, -math.inf), nan.to(x.dtype)])
    exchange(both, dist.ReduceOp.MAX)
    return both[0].masked_fill(both[1] > 0, math.nan)


def _max_number(numbers: Iterable[float]) -> float:
    values = list(numbers)
    return math.nan if any(math.isnan(value) for value in values) else max(values)
