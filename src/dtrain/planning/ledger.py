"""``Ledger``: what the live bytes of a step are held for, and when there were most of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from torch import Tensor

from dtrain.memory.live import LiveBytes
from dtrain.tensors import local

Part: TypeAlias = Literal["parameters", "gradients", "optimizer", "transforms", "gathered", "communication", "activations"]
Phase: TypeAlias = Literal["forward", "backward", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
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
class Page:
    """What one step held.

    Args:
        peaks: the most bytes at once in each phase that ran.
        at_peak: the parts at the moment when there were most.
        most: the most of each part, at whatever moment.
    """

    peaks: dict[Phase, int]
    at_peak: Parts
    most: Parts


class Ledger:
    """Counts the storages of fake tensors by the part that they belong to.

    A storage belongs to the part of the block (``during``) in which it got its bytes, until ``assign`` says otherwise.
    ``phase`` is set by whoever runs the step.
    """

    def __init__(self) -> None:
        self.live = LiveBytes(fake=True, changed=self._changed)
        self.phase: Phase = "forward"
        self._part: Part = "activations"
        self._held: dict[int, tuple[Part, int]] = {}
        self._now: dict[Part, int] = {f.name: 0 for f in fields(Parts)}  # type: ignore[misc]
        self.begin()

    def begin(self) -> None:
        """Start a new page."""
        self._most = dict(self._now)
        self._peaks: dict[Phase, int] = {}
        self._at_peak = dict(self._now)
        self._top = 0

    def page(self) -> Page:
        """What there was since ``begin``."""
        return Page(peaks=dict(self._peaks), at_peak=Parts(**self._at_peak), most=Parts(**self._most))

    @contextmanager
    def during(self, part: Part) -> Iterator[None]:
        """A context in which what is allocated belongs to ``part``."""
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before

    def assign(self, part: Part, tensors: Iterable[Tensor]) -> None:
        """Say that the storages of ``tensors``, counted before or not, belong to ``part``."""
        with self.during(part):
            for tensor in map(local, tensors):
                self.live.count([tensor])
                key = id(tensor.untyped_storage())
                was, size = self._held.get(key, (part, 0))
                if was != part:
                    self._held[key] = part, size
                    self._now[was] -= size
                    self._grow(part, size)

    def _changed(self, key: int, change: int) -> None:
        part, size = self._held.get(key, (self._part, 0))
        if size + change:
            self._held[key] = part, size + change
        else:
            self._held.pop(key, None)
        if change < 0:
            self._now[part] += change
            return
        self._grow(part, change)
        total = sum(self._now.values())
        if total > self._peaks.get(self.phase, -1):
            self._peaks[self.phase] = total
        if total > self._top:
            self._top, self._at_peak = total, dict(self._now)

    def _grow(self, part: Part, size: int) -> None:
        self._now[part] += size
        self._most[part] = max(self._most[part], self._now[part])
