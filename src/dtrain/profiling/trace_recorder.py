"""Record a trace of some steps with torch's profiler, and measure clock offsets so that traces of ranks can be merged."""

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
from torch.profiler import ProfilerActivity, record_function, supported_activities

from dtrain import spans, storage
from dtrain.device import is_accelerator
from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.init import get_dist_info
from dtrain.memory.device_memory import snapshot_suffix, write_snapshot

# The tightest bounds of all rounds are used. The first rounds are slow.
_ROUNDS = 8


class ClockOffset(NamedTuple):
    """Offset of a clock in nanoseconds: the true value is within ``error_bound_ns`` of ``ahead_ns``."""

    ahead_ns: int
    error_bound_ns: int


def measure_clock_offset() -> ClockOffset:
    """Measure this rank's ``time.time_ns`` minus that of rank 0; zeros on rank 0 and for a single rank.

    No rank leaves a gather before all ranks have entered. So the time of rank r after the gather is later than the time of
    rank 0 before the gather, and vice versa: each round gives a lower and an upper bound, and the tightest bounds of all
    rounds are used. The bounds hold on any network, unless a clock is set in the meantime.

    Collective: ten all-gathers of two numbers on the control channel, about a millisecond.
    """
    info = get_dist_info()
    if info.world_size == 1:
        return ClockOffset(0, 0)
    # Seconds of each rank as origin: float64 then holds the rest to a fraction of a nanosecond.
    zero = time.time_ns() // 10**9
    starts = [int(row[0]) for row in all_gather_numbers([zero, 0], caller="profile")]
    entry_times, rows_of_rank_0, exit_times = [], [], [0.0]
    for _ in range(_ROUNDS + 1):
        entry_times.append(float(time.time_ns() - zero * 10**9))
        # Each gather also sends the exit time of the last gather.
        rows = all_gather_numbers([entry_times[-1], exit_times[-1]], caller="profile")
        rows_of_rank_0.append(rows[0])
        exit_times.append(float(time.time_ns() - zero * 10**9))
    lower = max(entry - later[1] for entry, later in zip(entry_times[:-1], rows_of_rank_0[1:], strict=True))
    upper = min(exit_time - first[0] for exit_time, first in zip(exit_times[1:-1], rows_of_rank_0[:-1], strict=True))
    origin_offset = (zero - starts[0]) * 10**9
    if info.rank == 0:
        return ClockOffset(0, 0)
    return ClockOffset(origin_offset + round((lower + upper) / 2), round(abs(upper - lower) / 2))


TRACE_FORMAT = 1
"""Version of the metadata under ``dtrain`` in a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """Recording options and the output folder."""

    folder: Path
    record_shapes: bool
    memory: bool
    stacks: bool
    flops: bool
    compress: bool


@dataclass(slots=True, eq=False)
class TraceRecorder:
    """Recorder of one trace: ``begin_step`` at the start of each step after the warm-up, ``write`` at the end.

    Args:
        options: recording options.
        offset: offset of this rank's clock.
    """

    options: ProfileOptions
    offset: ClockOffset
    first_step: int | None = None
    _profiler: torch.profiler.profile = field(init=False)
    _steps: list[dict[str, Any]] = field(default_factory=list)
    # span totals at the start of the step in progress
    _last_totals: Mapping[str, spans.SpanTime] | None = None
    # open marks: the step, then the step function
    _open_marks: list[record_function] = field(default_factory=list)
    # True if this recorder enabled CUDA's allocation history; a history enabled earlier stays on
    _records_history: bool = False

    def __post_init__(self) -> None:
        on_device = is_accelerator(get_dist_info().device)
        self._profiler = torch.profiler.profile(
            activities=supported_activities() if on_device else [ProfilerActivity.CPU],
            record_shapes=self.options.record_shapes,
            profile_memory=self.options.memory,
            with_stack=self.options.stacks,
            with_flops=self.options.flops,
            # There is one cycle. torch 2.11 warns otherwise that the events of earlier cycles are lost.
            acc_events=True,
        )
        self._profiler.prepare_trace()

    def begin_step(self, step: int) -> None:
        """Mark the start of ``step``. The first step starts the recording."""
        if self.first_step is None:
            if self.options.memory and get_dist_info().device.type == "cuda" and not torch._C._cuda_isHistoryEnabled():
                torch.cuda.memory._record_memory_history(stacks="python")
                self._records_history = True
            self._profiler.start_trace()
            self.first_step = step
        self._steps.append({"step": step, "done": False, "spans": {}})
        self._last_totals = spans.totals()
        self._open(f"ProfilerStep#{step}")

    def end_step(self, *, done: bool) -> None:
        """Mark the end of the step in progress, if any. ``done`` is False if the end of the recording cuts the step short."""
        while self._open_marks:
            self._open_marks.pop().__exit__(None, None, None)
        before, self._last_totals = self._last_totals, None
        if before is not None:
            zero = spans.SpanTime(0, 0.0)
            passed = {name: total.seconds - before.get(name, zero).seconds for name, total in spans.totals().items()}
            positive = {name: seconds for name, seconds in passed.items() if seconds > 0}
            self._steps[-1] |= {"done": done, "spans": positive}

    def enter_step_fn(self) -> None:
        """Mark the start of the step function. The time before belongs to the loop."""
        self._open("dtrain.step")

    def leave_step_fn(self) -> None:
        """Mark the end of the step function."""
        if len(self._open_marks) == 2:
            self._open_marks.pop().__exit__(None, None, None)

    def write(self) -> Path | None:
        """Stop, write the recorded steps and return the file; None if no step was recorded."""
        recorded = self.first_step is not None
        try:
            self.end_step(done=False)
            if not recorded:
                # A prepared profiler can be stopped only after a start.
                self._profiler.start_trace()
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
        """Write the trace under a temporary name and rename the file, so that a trace is complete or absent.

        torch first writes ``NAME.tmp`` and raises nothing on a full disk. Its own compression would use the system's folder
        for temporary files.
        """
        plain = path.with_name(f".unfinished-{path.name.removesuffix('.gz')}")
        packed, partial = plain.with_name(f"{plain.name}.gz"), plain.with_name(f"{plain.name}.tmp")
        try:
            with suppress(FileNotFoundError):
                # A killed process may have left the file.
                storage.remove_file(plain)
            self._profiler.export_chrome_trace(str(plain))
            if not storage.exists(plain):
                raise OSError(f"torch could not write {path}. Check that the disk is not full")
            if self.options.compress:
                with plain.open("rb") as source, gzip.open(packed, "wb") as target:
                    shutil.copyfileobj(source, target)
            storage.rename(packed if self.options.compress else plain, path)
        finally:
            for file in (plain, packed, partial):
                with suppress(OSError):
                    storage.remove_file(file)
