"""Track the memory of a step by its purpose, and sum its collectives by kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias

from torch import Tensor

from dtrain.dtensor import to_local
from dtrain.memory.live_tensors import LiveBytes
from dtrain.testing.collective_counter import CollectiveCall

MemoryPart: TypeAlias = Literal[
    "parameters", "gradients", "optimizer", "transforms", "gathered", "communication", "activations"
]
StepPhase: TypeAlias = Literal["forward", "backward", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Bytes of one rank by purpose.

    Args:
        parameters: shards of this rank, unsharded parameters, and buffers.
        gradients: full gradients before their reduction, and gradients of the shards.
        optimizer: optimizer state, and temporary tensors of its step.
        transforms: transform states, such as an average of the weights.
        gathered: parameters gathered for the current units.
        communication: buffers of collectives.
        activations: all other tensors: activations kept for backward, temporary tensors, and the batch.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    transforms: int = 0
    gathered: int = 0
    communication: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(getattr(self, f.name) for f in fields(self))


class MemoryTracker:
    """Tracker of the storages of fake tensors by purpose.

    A storage belongs to the part of the context (``attribute_to``) of its allocation, until ``assign`` moves it. The runner of
    the step sets ``phase``.
    """

    def __init__(self) -> None:
        self.live = LiveBytes(fake=True, on_change=self._on_change)
        self.phase: StepPhase = "forward"
        self._part: MemoryPart = "activations"
        self._storages: dict[int, tuple[MemoryPart, int]] = {}
        self._current: dict[MemoryPart, int] = {f.name: 0 for f in fields(MemoryBreakdown)}  # type: ignore[misc]
        self.reset()

    def reset(self) -> None:
        """Start the measurements of a new step."""
        self._max_by_part = dict(self._current)
        self._peaks: dict[StepPhase, int] = {}
        self._at_peak = dict(self._current)
        self._peak_total = 0

    def usage(self, traffic: Sequence[CollectiveTraffic]) -> StepUsage:
        """Return the measurements since ``reset``, with the step's collectives."""
        return StepUsage(
            peaks=dict(self._peaks),
            at_peak=MemoryBreakdown(**self._at_peak),
            max_by_part=MemoryBreakdown(**self._max_by_part),
            traffic=tuple(traffic),
        )

    @contextmanager
    def attribute_to(self, part: MemoryPart) -> Iterator[None]:
        """Attribute allocations inside the context to ``part``."""
        previous, self._part = self._part, part
        try:
            yield
        finally:
            self._part = previous

    def assign(self, part: MemoryPart, tensors: Iterable[Tensor]) -> None:
        """Attribute the storages of ``tensors`` to ``part``, whether counted before or not."""
        with self.attribute_to(part):
            for tensor in map(to_local, tensors):
                self.live.count([tensor])
                key = id(tensor.untyped_storage())
                previous, size = self._storages.get(key, (part, 0))
                if previous != part:
                    self._storages[key] = part, size
                    self._current[previous] -= size
                    self._grow(part, size)

    def _on_change(self, key: int, change: int) -> None:
        part, size = self._storages.get(key, (self._part, 0))
        if size + change:
            self._storages[key] = part, size + change
        else:
            self._storages.pop(key, None)
        if change < 0:
            self._current[part] += change
            return
        self._grow(part, change)
        total = sum(self._current.values())
        if total > self._peaks.get(self.phase, -1):
            self._peaks[self.phase] = total
        if total > self._peak_total:
            self._peak_total, self._at_peak = total, dict(self._current)

    def _grow(self, part: MemoryPart, size: int) -> None:
        self._current[part] += size
        self._max_by_part[part] = max(self._max_by_part[part], self._current[part])


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTraffic:
    """Collectives of one kind in a step of one rank.

    Args:
        op: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast`` and so on, as in ``count_collectives``.
        ranks: number of ranks in each.
        count: number of collectives.
        bytes: logical size: of the whole gathered parameters, of the whole reduced gradients.
        bytes_sent: bytes sent by this rank in a ring: (n - 1) / n of the bytes, twice that for an all-reduce.
    """

    op: str
    ranks: int
    count: int
    bytes: int

    @property
    def bytes_sent(self) -> int:
        passes = 2 if self.op == "all_reduce" else 1
        return round(passes * self.bytes * (self.ranks - 1) / self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUsage:
    """Memory and collectives of one step.

    Args:
        peaks: most bytes held at once in each phase.
        at_peak: parts at the time of the peak.
        max_by_part: most bytes of each part, at any time.
        traffic: collectives by kind.
    """

    peaks: dict[StepPhase, int]
    at_peak: MemoryBreakdown
    max_by_part: MemoryBreakdown
    traffic: tuple[CollectiveTraffic, ...]


def sum_traffic(calls: Sequence[CollectiveCall]) -> tuple[CollectiveTraffic, ...]:
    """Return the collectives by kind, sorted by the bytes sent; collectives of one rank are left out."""
    rows: dict[tuple[str, int], tuple[int, int]] = {}
    for call in calls:
        count, size = rows.get((call.op, call.group_size), (0, 0))
        if call.group_size > 1:
            rows[call.op, call.group_size] = count + 1, size + call.bytes
    traffic = [CollectiveTraffic(op=op, ranks=ranks, count=count, bytes=size) for (op, ranks), (count, size) in rows.items()]
    return tuple(sorted(traffic, key=lambda t: -t.bytes_sent))


def extrapolate_traffic(
    two: Sequence[CollectiveTraffic], three: Sequence[CollectiveTraffic], microbatches: int
) -> tuple[CollectiveTraffic, ...]:
    """Extrapolate the traffic of ``microbatches`` microbatches from that of two and of three."""
    by_kind = {(t.op, t.ranks): t for t in two}
    traffic = []
    for t in three:
        base = by_kind.get((t.op, t.ranks))
        more = microbatches - 3
        count = t.count + more * (t.count - (base.count if base else 0))
        size = t.bytes + more * (t.bytes - (base.bytes if base else 0))
        traffic.append(replace(t, count=count, bytes=size))
    return tuple(traffic)
