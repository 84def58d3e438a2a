"""``Window``: torch's profiler over some steps of this rank, from its preparation to the files that it leaves."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from dtrain import spans, storage
from dtrain.dist.init import current
from dtrain.memory.snapshot import snapshot_suffix, write_snapshot
from dtrain.observe.profiling.offset import Offset

FORMAT = 1
"""Of what is under ``dtrain`` in a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class What:
    """What is recorded, and where it goes."""

    folder: Path
    record_shapes: bool
    memory: bool
    stacks: bool
    flops: bool
    compress: bool


@dataclass(slots=True, eq=False)
class Window:
    """One recording. ``start`` after the warm-up, ``mark`` at the start of each step, ``write`` at the end.

    Args:
        what: is recorded.
        offset: of this rank's clock.
    """

    what: What
    offset: Offset
    first: int | None = None
    _profiler: torch.profiler.profile = field(init=False)
    _steps: list[dict[str, Any]] = field(default_factory=list)
    _before: Mapping[str, spans.Total] | None = None  # what had been counted when the step in progress began
    _marks: list[record_function] = field(default_factory=list)  # that are open: the step, and what is inside it
    _history: bool = False  # of CUDA's allocations was switched on here; one that was on already stays on

    def __post_init__(self) -> None:
        on_device = current().device.type == "cuda"
        self._profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])],
            record_shapes=self.what.record_shapes,
            profile_memory=self.what.memory,
            with_stack=self.what.stacks,
            with_flops=self.what.flops,
        )
        self._profiler.prepare_trace()

    def start(self, step: int) -> None:
        """Record from now on; ``step`` is about to begin."""
        if self.what.memory and current().device.type == "cuda" and not torch._C._cuda_isHistoryEnabled():
            torch.cuda.memory._record_memory_history(stacks="python")
            self._history = True
        self._profiler.start_trace()
        self.first = step

    def mark(self, step: int) -> None:
        """``step`` begins."""
        self._steps.append({"step": step, "done": False, "spans": {}})
        self._before = spans.totals()
        self._open(f"ProfilerStep#{step}")

    def end_step(self, *, done: bool) -> None:
        """The step in progress ends, if there is one: ``done``, or cut short by the end of the window."""
        while self._marks:
            self._marks.pop().__exit__(None, None, None)
        before, self._before = self._before, None
        if before is not None:
            none = spans.Total(0, 0.0)
            passed = {name: total.seconds - before.get(name, none).seconds for name, total in spans.totals().items()}
            named = {name: seconds for name, seconds in passed.items() if seconds > 0}
            self._steps[-1] |= {"done": done, "spans": named}

    def enter(self) -> None:
        """The step function begins; before it was the loop around it."""
        self._open("dtrain.step")

    def leave(self) -> None:
        """The step function ends."""
        if len(self._marks) == 2:
            self._marks.pop().__exit__(None, None, None)

    def write(self) -> Path | None:
        """Stop, write what was recorded, and return the file; None if nothing was."""
        recorded = self.first is not None
        try:
            self.end_step(done=False)
            if not recorded:
                self._profiler.start_trace()  # what was prepared can be ended in no other way
            else:
                self._profiler.add_metadata_json("dtrain", json.dumps(self._about()))
            self._profiler.stop_trace()
            return self._written() if recorded else None
        finally:
            if self._history:
                torch.cuda.memory._record_memory_history(enabled=None)

    def _open(self, name: str) -> None:
        mark = record_function(name)
        mark.__enter__()
        self._marks.append(mark)

    def _about(self) -> dict[str, Any]:
        info = current()
        return {
            "format": FORMAT,
            "rank": info.rank,
            "world_size": info.world_size,
            "device": info.device.type,
            "offset_ns": self.offset.ahead_ns,
            "offset_bound_ns": self.offset.bound_ns,
            "steps": self._steps,
        }

    def _written(self) -> Path:
        storage.make_folders(self.what.folder)
        label = f"rank-{current().rank:05d}-step-{self.first:08d}"
        path = self.what.folder / f"trace-{label}.pt.trace.json{'.gz' if self.what.compress else ''}"
        self._export(path)
        suffix = snapshot_suffix() if self.what.memory else None
        if suffix is not None:
            write_snapshot(self.what.folder / f"memory-{label}{suffix}")
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
            if self.what.compress:
                with plain.open("rb") as source, gzip.open(packed, "wb") as target:
                    shutil.copyfileobj(source, target)
            storage.rename(packed if self.what.compress else plain, path)
        finally:
            for left in (plain, packed, partial):
                with suppress(OSError):
                    storage.remove_file(left)
