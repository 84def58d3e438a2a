"""Record the storages of a step as a trace of changes by purpose, and predict the trace of other microbatch sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from dtrain.dist.dtensor import to_local
from dtrain.memory.live_tensors import LiveBytes

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


_PHASES: tuple[StepPhase, ...] = get_args(StepPhase)
_PARTS: tuple[MemoryPart, ...] = tuple(f.name for f in fields(MemoryBreakdown))  # type: ignore[misc]
_PHASE_NUMBERS = {phase: number for number, phase in enumerate(_PHASES)}
_PART_NUMBERS = {part: number for number, part in enumerate(_PARTS)}

# Kinds of changes. A move between parts is two changes, and not a new peak.
_ALLOCATED, _FREED, _MOVED_IN, _MOVED_OUT = range(4)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTrace:
    """Changes of memory in one step, in order.

    Args:
        at_rest: bytes of each part before the step, ``[parts]``.
        rounding_at_rest: bytes that the allocator adds to ``at_rest``.
        labels: phase, part and kind of each change, ``[changes, 3]``.
        changes: bytes of each change, ``[changes]``.
    """

    at_rest: np.ndarray[Any, np.dtype[np.int64]]
    rounding_at_rest: int
    labels: np.ndarray[Any, np.dtype[np.int8]]
    changes: np.ndarray[Any, np.dtype[np.int64]]

    def memory(self) -> dict[str, Any]:
        """Return the fields of ``MemoryEstimate`` that the trace determines: the peaks, and bytes by part."""
        phases, parts, kinds = self.labels.T
        by_part = np.zeros((len(self.changes) + 1, len(_PARTS)), dtype=np.int64)
        by_part[0] = self.at_rest
        by_part[np.arange(1, len(by_part)), parts] = self.changes
        by_part = by_part.cumsum(axis=0)
        allocated = np.flatnonzero(kinds == _ALLOCATED)
        totals = by_part[allocated + 1].sum(axis=1)
        peaks: dict[StepPhase, int] = {}
        for number, phase in enumerate(_PHASES):
            in_phase = totals[phases[allocated] == number]
            if len(in_phase):
                peaks[phase] = int(in_phase.max())
        at_peak = by_part[allocated[totals.argmax()] + 1] if len(totals) else self.at_rest
        peak_phase = max(peaks, key=lambda phase: peaks[phase])
        rounded = np.sign(self.changes) * allocated_bytes(np.abs(self.changes))
        rounded_totals = self.at_rest.sum() + self.rounding_at_rest + rounded.cumsum()[allocated]
        return {
            "rounding": int(rounded_totals.max()) - peaks[peak_phase],
            "peak": peaks[peak_phase],
            "peak_phase": peak_phase,
            "peaks": peaks,
            "at_rest": _breakdown(self.at_rest),
            "at_peak": _breakdown(at_peak),
            "max_by_part": _breakdown(by_part.max(axis=0)),
        }


def allocated_bytes(sizes: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the bytes that torch's caching allocator on CUDA hands out for each of ``sizes``, ``[sizes]``.

    A size is rounded up to 512 bytes. From 10 MiB it gets a segment of its own, rounded up to 2 MiB, and takes the whole
    segment if at most 1 MiB would remain. Smaller sizes share segments, which are assumed to be filled without a rest.

    Source: the constants in ``c10/core/AllocatorConfig.h`` of torch, ``get_allocation_size`` and ``should_split`` in
    ``c10/cuda/CUDACachingAllocator.cpp``.
    """
    blocks = -(-sizes // _BLOCK) * _BLOCK
    segments = -(-sizes // _ROUND_LARGE) * _ROUND_LARGE
    return np.where((blocks >= _MIN_LARGE) & (segments - blocks <= _MAX_SMALL), segments, blocks)


_BLOCK, _MAX_SMALL, _ROUND_LARGE, _MIN_LARGE = 512, 2**20, 2 * 2**20, 10 * 2**20


def _breakdown(sizes: np.ndarray[Any, np.dtype[np.int64]]) -> MemoryBreakdown:
    return MemoryBreakdown(**{part: int(size) for part, size in zip(_PARTS, sizes, strict=True)})


@dataclass(frozen=True, slots=True, eq=False)
class LinearTrace:
    """Trace of any microbatch size, from the traces of two sizes: each change is a linear function of the size.

    Example:
        linear = LinearTrace.between({1: trace_of_1, 4: trace_of_4})
        if linear is not None:
            print(linear.at(64).memory()["peaks"])
    """

    base: MemoryTrace
    size: int
    slopes: np.ndarray[Any, np.dtype[np.int64]]

    @staticmethod
    def between(traces: dict[int, MemoryTrace]) -> LinearTrace | None:
        """Return the line through the traces of two sizes; None if the sizes run different operations."""
        (small, first), (large, second) = sorted(traces.items())
        if not np.array_equal(first.labels, second.labels) or not np.array_equal(first.at_rest, second.at_rest):
            return None
        slopes, rest = np.divmod(second.changes - first.changes, large - small)
        # Memory that grows by no whole number of bytes a sample, or shrinks with the size, is not linear.
        growth = np.where(first.changes < 0, -slopes, slopes)
        if rest.any() or (growth < 0).any():
            return None
        return LinearTrace(first, small, slopes)

    def at(self, size: int) -> MemoryTrace:
        """Return the trace of ``size`` samples, which is not smaller than the sizes of the line."""
        changes = self.base.changes + self.slopes * (size - self.size)
        return replace(self.base, changes=changes)


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
        self._current: dict[MemoryPart, int] = dict.fromkeys(_PARTS, 0)
        self._changes: list[tuple[int, int, int, int]] = []
        self.reset()

    def reset(self) -> None:
        """Start the trace of a new step."""
        # Storages that ended in the previous step are counted with the next read.
        self.live.reset()
        self._at_rest = dict(self._current)
        sizes = np.array([size for _, size in self._storages.values()], dtype=np.int64)
        self._rounding = int((allocated_bytes(sizes) - sizes).sum())
        self._changes = []

    def trace(self) -> MemoryTrace:
        """Return the changes since ``reset``."""
        rows = np.array(self._changes, dtype=np.int64).reshape(-1, 4)
        at_rest = np.array([self._at_rest[part] for part in _PARTS], dtype=np.int64)
        return MemoryTrace(at_rest, self._rounding, rows[:, :3].astype(np.int8), rows[:, 3].copy())

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
        # With gradients, the shard of a DTensor would be a new view, which is an operation.
        with self.attribute_to(part), torch.no_grad():
            for tensor in map(to_local, tensors):
                self.live.count([tensor])
                key = id(tensor.untyped_storage())
                previous, size = self._storages.get(key, (part, 0))
                if previous != part:
                    self._storages[key] = part, size
                    self._record(previous, _MOVED_OUT, -size)
                    self._record(part, _MOVED_IN, size)

    def _on_change(self, key: int, change: int) -> None:
        part, size = self._storages.get(key, (self._part, 0))
        if size + change:
            self._storages[key] = part, size + change
        else:
            self._storages.pop(key, None)
        self._record(part, _FREED if change < 0 else _ALLOCATED, change)

    def _record(self, part: MemoryPart, kind: int, change: int) -> None:
        self._current[part] += change
        self._changes.append((_PHASE_NUMBERS[self.phase], _PART_NUMBERS[part], kind, change))
