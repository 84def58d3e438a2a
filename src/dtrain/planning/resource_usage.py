"""``Ledger``: what the live bytes of a step are held for, and when there were most of them.

What a step sends: its collectives by kind, and the bytes that a rank puts on the wire for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
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
    """Bytes of one rank by what they are held for.

    Args:
        parameters: the shards that this rank keeps, parameters that are whole on every rank, and buffers.
        gradients: whole ones that wait for their reduction, and those of the shards.
        optimizer: its state, and what its step needs for a moment.
        transforms: their slices (an average of the weights).
        gathered: whole parameters for the units that compute.
        communication: what is being sent and received.
        activations: all else: what forward keeps for backward, what they compute with, and the batch.
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
        """All of them together."""
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """What one step held.

    Args:
        peaks: the most bytes at once in each phase that ran.
        at_peak: the parts at the moment when there were most.
        max_by_part: the most of each part, at whatever moment.
    """

    peaks: dict[StepPhase, int]
    at_peak: MemoryBreakdown
    max_by_part: MemoryBreakdown


class MemoryTracker:
    """Counts the storages of fake tensors by the part that they belong to.

    A storage belongs to the part of the block (``attribute_to``) in which it got its bytes, until ``assign`` says otherwise.
    ``phase`` is set by whoever runs the step.
    """

    def __init__(self) -> None:
        self.live = LiveBytes(fake=True, on_change=self._on_change)
        self.phase: StepPhase = "forward"
        self._part: MemoryPart = "activations"
        self._storages: dict[int, tuple[MemoryPart, int]] = {}
        self._current: dict[MemoryPart, int] = {f.name: 0 for f in fields(MemoryBreakdown)}  # type: ignore[misc]
        self.reset()

    def reset(self) -> None:
        """Start a new page."""
        self._max_by_part = dict(self._current)
        self._peaks: dict[StepPhase, int] = {}
        self._at_peak = dict(self._current)
        self._peak_total = 0

    def step_memory(self) -> StepMemory:
        """What there was since ``begin``."""
        return StepMemory(
            peaks=dict(self._peaks), at_peak=MemoryBreakdown(**self._at_peak), max_by_part=MemoryBreakdown(**self._max_by_part)
        )

    @contextmanager
    def attribute_to(self, part: MemoryPart) -> Iterator[None]:
        """A context in which what is allocated belongs to ``part``."""
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before

    def assign(self, part: MemoryPart, tensors: Iterable[Tensor]) -> None:
        """Say that the storages of ``tensors``, counted before or not, belong to ``part``."""
        with self.attribute_to(part):
            for tensor in map(to_local, tensors):
                self.live.count([tensor])
                key = id(tensor.untyped_storage())
                was, size = self._storages.get(key, (part, 0))
                if was != part:
                    self._storages[key] = part, size
                    self._current[was] -= size
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
    """The collectives of one kind in a step of one rank.

    Args:
        op: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast`` and so on, as in ``count_collectives``.
        ranks: how many ranks take part in each.
        count: how many there are.
        bytes: their logical size: of the whole parameters that are gathered, of the whole gradients that are reduced.
        bytes_sent: what this rank sends for them when they run in a ring: (n - 1) / n of the bytes, twice that for an all-reduce.
    """

    op: str
    ranks: int
    count: int
    bytes: int

    @property
    def bytes_sent(self) -> int:
        turns = 2 if self.op == "all_reduce" else 1
        return round(turns * self.bytes * (self.ranks - 1) / self.ranks)


def sum_traffic(found: Sequence[CollectiveCall]) -> tuple[CollectiveTraffic, ...]:
    """Collectives by kind, those that send most first; those of one rank are left out."""
    rows: dict[tuple[str, int], tuple[int, int]] = {}
    for each in found:
        count, size = rows.get((each.op, each.group_size), (0, 0))
        if each.group_size > 1:
            rows[each.op, each.group_size] = count + 1, size + each.bytes
    made = [CollectiveTraffic(op=op, ranks=ranks, count=count, bytes=size) for (op, ranks), (count, size) in rows.items()]
    return tuple(sorted(made, key=lambda t: -t.bytes_sent))


def extrapolate_traffic(
    two: Sequence[CollectiveTraffic], three: Sequence[CollectiveTraffic], microbatches: int
) -> tuple[CollectiveTraffic, ...]:
    """The traffic of a step of more microbatches, from those of two and of three."""
    before = {(t.op, t.ranks): t for t in two}
    made = []
    for t in three:
        was = before.get((t.op, t.ranks), CollectiveTraffic(op=t.op, ranks=t.ranks, count=0, bytes=0))
        more = microbatches - 3
        count, size = t.count + more * (t.count - was.count), t.bytes + more * (t.bytes - was.bytes)
        made.append(CollectiveTraffic(op=t.op, ranks=t.ranks, count=count, bytes=size))
    return tuple(made)
