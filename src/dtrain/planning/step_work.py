"""Count the work of a step: floating-point operations by dtype, memory traffic of the optimizer, collectives by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from dtrain.testing.counters import CollectiveCall


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Work of one rank in one step.

    Args:
        flops: floating-point operations of forward and backward by dtype (``"bfloat16"``), with recomputed operations. A
            multiply-add is two. Operations without a formula (norms, activation functions) are not counted.
        update_flops: the same of the optimizer.
        update_bytes: bytes that the operations of the optimizer read and write.
    """

    flops: Mapping[str, int]
    update_flops: Mapping[str, int]
    update_bytes: int

    def of_microbatches(self, measured: int, microbatches: int) -> StepWork:
        """Return the work of a step of ``microbatches``, from that of ``measured`` microbatches."""
        return replace(self, flops={name: count * microbatches // measured for name, count in self.flops.items()})


class WorkCounter:
    """Counter of the work of dispatched operations."""

    def __init__(self) -> None:
        self._in_update = False
        self.reset()

    def reset(self) -> None:
        """Start a new step."""
        self._flops: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
        self._update_bytes = 0

    def work(self) -> StepWork:
        """Return the work since ``reset``."""
        return StepWork(flops=dict(self._flops[False]), update_flops=dict(self._flops[True]), update_bytes=self._update_bytes)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Count the operations inside the context as those of the optimizer."""
        self._in_update = True
        try:
            yield
        finally:
            self._in_update = False

    def count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, flops: int) -> None:
        """Count one operation that ran, with its floating-point operations."""
        if flops:
            dtype = next(iter_tensors(args)).dtype
            self._flops[self._in_update][str(dtype).removeprefix("torch.")] += flops
        if self._in_update and not getattr(func, "is_view", False):
            # All inputs are read. New results and inputs that change in place are written.
            inputs = list(iter_tensors((args, kwargs)))
            read = {id(tensor) for tensor in inputs}
            moved = [*inputs, *(tensor for tensor in iter_tensors(out) if id(tensor) not in read)]
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    moved += iter_tensors(value)
            self._update_bytes += sum(tensor.nbytes for tensor in moved)


def iter_tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors of ``value``, at any depth of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from iter_tensors(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTraffic:
    """Collectives of one kind in a step of one rank.

    Args:
        op: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``permute`` and so on, as in ``count_collectives``.
        group_size: number of ranks in each.
        count: number of collectives.
        bytes: logical size: of the whole gathered parameters, of the whole reduced gradients.
        stride: distance between the global ranks of neighbours in the group; 1 for neighbours on a node.
        bytes_sent: bytes sent by this rank in a ring: (n - 1) / n of the bytes, twice that for an all-reduce, and all of them
            for a permute.
    """

    op: str
    group_size: int
    count: int
    bytes: int
    stride: int = 1

    @property
    def bytes_sent(self) -> int:
        if self.op == "permute":
            return self.bytes
        passes = 2 if self.op == "all_reduce" else 1
        return round(passes * self.bytes * (self.group_size - 1) / self.group_size)


def sum_traffic(calls: Sequence[CollectiveCall], strides: Mapping[str, int]) -> tuple[CollectiveTraffic, ...]:
    """Return the collectives by kind, sorted by the bytes sent; collectives of one rank are left out.

    ``strides`` has the stride of each mesh axis; other groups have stride 1."""
    rows: dict[tuple[str, int, int], tuple[int, int]] = {}
    for call in calls:
        key = call.op, call.group_size, strides.get(call.group, 1)
        count, size = rows.get(key, (0, 0))
        if call.group_size > 1:
            rows[key] = count + 1, size + call.bytes
    traffic = [
        CollectiveTraffic(op=op, group_size=ranks, count=count, bytes=size, stride=stride)
        for (op, ranks, stride), (count, size) in rows.items()
    ]
    return tuple(sorted(traffic, key=lambda t: -t.bytes_sent))


def extrapolate_traffic(
    two: Sequence[CollectiveTraffic], three: Sequence[CollectiveTraffic], microbatches: int
) -> tuple[CollectiveTraffic, ...]:
    """Extrapolate the traffic of ``microbatches`` microbatches from that of two and of three."""
    by_kind = {(t.op, t.group_size, t.stride): t for t in two}
    traffic = []
    for t in three:
        base = by_kind.get((t.op, t.group_size, t.stride))
        more = microbatches - 3
        count = t.count + more * (t.count - (base.count if base else 0))
        size = t.bytes + more * (t.bytes - (base.bytes if base else 0))
        traffic.append(replace(t, count=count, bytes=size))
    return tuple(traffic)
