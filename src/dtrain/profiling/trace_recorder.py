"""How far this rank's clock is ahead of that of rank 0.

``Window``: torch's profiler over some steps of this rank, from its preparation to the files that it leaves."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, record_function

from dtrain import spans, storage
from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.init import get_dist_info
from dtrain.memory.snapshot import snapshot_suffix, write_snapshot

_ROUNDS = 8  # the best of them counts, and the first ones are slow


class ClockOffset(NamedTuple):
    """Of a clock, in nanoseconds: the true value is within ``error_bound_ns`` of ``ahead_ns``."""

    ahead_ns: int
    error_bound_ns: int


def measure_clock_offset() -> ClockOffset:
    """This rank's ``time.time_ns`` less that of rank 0, at one moment; zeros for one rank and on rank 0.

    Nobody leaves a gather before all have entered it. So what rank r read after it is later than what rank 0 read before it,
    and the other way round: each round gives a lower and an upper bound, and the tightest ones of some rounds are used. That
    holds whatever the network does; only a clock that is set meanwhile would spoil it.

    Collective: ten all-gathers of two numbers on the control group, about a millisecond.
    """
    info = get_dist_info()
    if info.world_size == 1:
        return ClockOffset(0, 0)
    zero = time.time_ns() // 10**9  # by rank: float64 holds the seconds since it to a fraction of a nanosecond
    starts = [int(row[0]) for row in all_gather_numbers([zero, 0], caller="profile")]
    entered, firsts, left = [], [], [0.0]
    for _ in range(_ROUNDS + 1):
        entered.append(float(time.time_ns() - zero * 10**9))
        rows = all_gather_numbers([entered[-1], left[-1]], caller="profile")  # with when the gather before was left
        firsts.append(rows[0])
        left.append(float(time.time_ns() - zero * 10**9))
    least = max(mine - later[1] for mine, later in zip(entered[:-1], firsts[1:], strict=True))
    most = min(mine - first[0] for mine, first in zip(left[1:-1], firsts[:-1], strict=True))
    apart = (zero - starts[0]) * 10**9
    if info.rank == 0:
        return ClockOffset(0, 0)
    return ClockOffset(apart + round((least + most) / 2), round(abs(most - least) / 2))


TRACE_FORMAT = 1
"""Of what is under ``dtrain`` in a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What is recorded, and where it goes."""

    folder: Path
    record_shapes: bool
    memory: bool
    stacks: bool
    flops: bool
    compress: bool


@dataclass(slots=True, eq=False)
class TraceRecorder:
    """One recording. ``start`` after the warm-up, ``begin_step`` at the start of each step, ``write`` at the end.

    Args:
        options: is recorded.
        offset: of this rank's clock.
    """

    options: ProfileOptions
    offset: ClockOffset
    first_step: int | None = None
    _profiler: torch.profiler.profile = field(init=False)
    _steps: list[dict[str, Any]] = field(default_factory=list)
    _last_totals: Mapping[str, spans.SpanTime] | None = None  # what had been counted when the step in progress began
    _open_marks: list[record_function] = field(default_factory=list)  # that are open: the step, and what is inside it
    _records_history: bool = False  # of CUDA's allocations was switched on here; one that was on already stays on

    def __post_init__(self) -> None:
        on_device = get_dist_info().device.type == "cuda"
        self._profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])],
            record_shapes=self.options.record_shapes,
            profile_memory=self.options.memory,
            with_stack=self.options.stacks,
            with_flops=self.options.flops,
        )
        self._profiler.prepare_trace()

    def start(self, step: int) -> None:
        """Record from now on; ``step`` is about to begin."""
        if self.options.memory and get_dist_info().device.type == "cuda" and not torch._C._cuda_isHistoryEnabled():
            torch.cuda.memory._record_memory_history(stacks="python")
            self._records_history = True
        self._profiler.start_trace()
        self.first_step = step

    def begin_step(self, step: int) -> None:
        """``step`` begins."""
        self._steps.append({"step": step, "done": False, "spans": {}})
        self._last_totals = spans.totals()
        self._open(f"ProfilerStep#{step}")

    def end_step(self, *, done: bool) -> None:
        """The step in progress ends, if there is one: ``done``, or cut short by the end of the window."""
        while self._open_marks:
            self._open_marks.pop().__exit__(None, None, None)
        before, self._last_totals = self._last_totals, None
        if before is not None:
            none = spans.SpanTime(0, 0.0)
            passed = {name: total.seconds - before.get(name, none).seconds for name, total in spans.totals().items()}
            named = {name: seconds for name, seconds in passed.items() if seconds > 0}
            self._steps[-1] |= {"done": done, "spans": named}

    def enter_step_fn(self) -> None:
        """The step function begins; before it was the loop around it."""
        self._open("dtrain.step")

    def leave_step_fn(self) -> None:
        """The step function ends."""
        if len(self._open_marks) == 2:
            self._open_marks.pop().__exit__(None, None, None)

    def write(self) -> Path | None:
        """Stop, write what was recorded, and return the file; None if nothing was."""
        recorded = self.first_step is not None
        try:
            self.end_step(done=False)
            if not recorded:
                self._profiler.start_trace()  # what was prepared can be ended in no other way
            else:
                self._profiler.add_metadata_json("dtrain", json.dumps(self._metadata()))
            self._profiler.stop_trace()
            return self._write_files() if recorded else None
        finally:
            if self._records_history:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _open(self, name: str) -> None:
        mark = record_function(name)
        mark.__enter__()
        self._open_marks.append(mark)

    def _metadata(self) -> dict[str, Any]:
        info = get_dist_info()
        return {
            "format": TRACE_FORMAT,
            "rank": info.rank,
            "world_size": info.world_size,
            "device": info.device.type,
            "offset_ns": self.offset.ahead_ns,
            "offset_bound_ns": self.offset.error_bound_ns,
            "steps": self._steps,
        }

    def _write_files(self) -> Path:
        storage.make_folders(self.options.folder)
        label = f"rank-{get_dist_info().rank:05d}-step-{self.first_step:08d}"
        path = self.options.folder / f"trace-{label}.pt.trace.json{'.gz' if self.options.compress else ''}"
        self._export(path)
        suffix = snapshot_suffix() if self.options.memory else None
        if suffix is not None:
            write_snapshot(self.options.folder / f"memory-{label}{suffix}")
        return path

    def _export(self, path: Path) -> None:
        """Written under another name, and then renamed: a trace is there whole, or not at all.

        torch writes it first to ``NAME.tmp``, and where the disk is full it raises nothing. It would compress a trace by way of
        the system's folder for temporary files, and whatever has come there.
        """
        plain = path.with_name(f".unfinished-{path.name.removesuffix('.gz')}")
        packed, partial = plain.with_name(f"{plain.name}.gz"), plain.with_name(f"{plain.name}.tmp")
        try:
            with suppress(FileNotFoundError):
                storage.remove_file(plain)  # of a process that was killed here
            self._profiler.export_chrome_trace(str(plain))
            if not storage.exists(plain):
                raise OSError(f"torch could not write {path}: is the disk full?")
            if self.options.compress:
                with plain.open("rb") as source, gzip.open(packed, "wb") as target:
                    shutil.copyfileobj(source, target)
            storage.rename(packed if self.options.compress else plain, path)
        finally:
            for left in (plain, packed, partial):
                with suppress(OSError):
                    storage.remove_file(left)
