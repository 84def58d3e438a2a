"""``read_trace``: a trace of torch's profiler, as the parts that are looked at here."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from dtrain import storage
from dtrain.errors import ConfigError, DataError

TRACE_FORMAT = 1  # of what the profiler of dtrain adds to a trace
_TRACE_NAME = re.compile(r"trace-rank-(\d{5,})-step-(\d+)\.pt\.trace\.json(\.gz)?")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_KEPT_CATEGORIES = {"cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset"}
_DEVICES = {0: "cpu", 1: "cuda"}


class TraceEvent(NamedTuple):
    """Something that took time: microseconds on the trace's own clock."""

    name: str
    category: str
    start: float
    end: float
    pid: Any
    tid: Any


class TraceStep(NamedTuple):
    """A step of the loop: from the end of the one before to its own; microseconds, and seconds by span.

    ``step_fn_us`` is how long the step function ran of it, None where that is not marked.
    """

    number: int
    start: float
    end: float
    step_fn_us: float | None
    spans: Mapping[str, float]


class AllocatorSample(NamedTuple):
    """What a device's allocator held after an allocation: microseconds, and bytes."""

    at: float
    device: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ProfilerTrace:
    """One window of one rank.

    Args:
        source: the file's name.
        rank: whose it is.
        steps: in order; a trace without marks is one step.
        events: what took time, by start; where one is inside another of its thread, the outer one first.
        allocations: in order; empty unless memory was recorded.
        thread: which the loop ran in.
    """

    source: str
    rank: int
    steps: tuple[TraceStep, ...]
    events: tuple[TraceEvent, ...]
    allocations: tuple[AllocatorSample, ...] = ()
    thread: tuple[Any, Any] | None = None

    @property
    def on_device(self) -> bool:
        """Whether there is anything in it that a GPU did."""
        return any(event.category == "kernel" for event in self.events)


def find_traces(folder: str | Path) -> list[Path]:
    """The traces that ``profile`` has left in a folder, by rank and step; empty if there is none, or no such folder."""
    place = Path(folder)
    names = storage.list_names(place) if storage.is_folder(place) else []
    found = sorted((int(match[1]), int(match[2]), name) for name in names if (match := _TRACE_NAME.fullmatch(name)))
    return [place / name for *_, name in found]


def read_trace(path: str | Path) -> ProfilerTrace:
    """A trace that was written by ``profile``, or by any profiler of torch.

    Raises:
        ConfigError: there is no such file.
        DataError: it is damaged, or no trace.
    """
    return parse_trace(read_trace_json(Path(path)), Path(path).name)


def read_trace_json(path: Path) -> dict[str, Any]:
    """The file as it is, checked to be a trace."""
    size = storage.file_size(path)
    if size is None:
        raise ConfigError(f"trace: there is no file {path}")
    try:
        data = storage.read_file(path, limit=size)
        found = json.loads(gzip.decompress(data) if path.name.endswith(".gz") else data, strict=False)
        if not isinstance(found, dict) or not isinstance(found["traceEvents"], list):
            raise TypeError("no list of events in it")
        if not all(isinstance(event, dict) for event in found["traceEvents"]):
            raise TypeError("an event that is no object")
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        raise DataError(f"trace: {path} cannot be read as a trace of torch's profiler: {error}") from None
    return found


def parse_trace(found: Mapping[str, Any], source: str) -> ProfilerTrace:
    """The parts of a trace's JSON.

    Raises:
        DataError: an event without its time.
    """
    try:
        about = dtrain_metadata(found)
        rows = found["traceEvents"]
        events = [_parse_event(row) for row in rows if row.get("ph") == "X" and row.get("cat") in _KEPT_CATEGORIES]
        allocated = [_parse_allocation(row) for row in rows if row.get("name") == "[memory]"]
        events.sort(key=lambda event: (event.start, -event.end))
        steps, thread = _parse_steps(events, about.get("steps", ()))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"trace: {source} has an event or metadata of another form: {type(error).__name__}: {error}") from None
    return ProfilerTrace(
        source=source,
        rank=trace_rank(found, source),
        steps=steps,
        events=tuple(events),
        allocations=tuple(sorted(allocated, key=lambda each: each.at)),
        thread=thread,
    )


def dtrain_metadata(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """What ``profile`` has added to a trace; empty in those of others."""
    about = found.get("dtrain")
    return about if isinstance(about, dict) else {}


def trace_rank(found: Mapping[str, Any], source: str) -> int:
    """Whose trace it is: as ``profile`` says, else torch, else the file's name; else 0."""
    for where in (dtrain_metadata(found), found.get("distributedInfo")):
        if isinstance(where, dict) and type(where.get("rank")) is int:
            return cast(int, where["rank"])
    named = _TRACE_NAME.fullmatch(source)
    return int(named[1]) if named else 0


def _parse_event(row: Mapping[str, Any]) -> TraceEvent:
    start = float(row["ts"])
    return TraceEvent(str(row["name"]), row["cat"], start, start + float(row["dur"]), row.get("pid"), row.get("tid"))


def _parse_allocation(row: Mapping[str, Any]) -> AllocatorSample:
    args = row["args"]
    kind, index = int(args["Device Type"]), int(args["Device Id"])
    device = _DEVICES.get(kind, f"device type {kind}") + (f":{index}" if index >= 0 else "")
    return AllocatorSample(float(row["ts"]), device, int(args["Total Allocated"]))


def _parse_steps(
    events: list[TraceEvent], noted: Sequence[Mapping[str, Any]]
) -> tuple[tuple[TraceStep, ...], tuple[Any, Any] | None]:
    """The marked steps and their thread; one step of everything where none is marked.

    A step that the end of the window has cut short counts only if there is no other.
    """
    # By number and in order: where dtrain's own step stands still, as over an evaluation, several steps have its number.
    notes: dict[int, list[Mapping[str, Any]]] = {}
    for note in noted:
        notes.setdefault(int(note["step"]), []).append(note)
    marks = [(event, match) for event in events if (match := _STEP.fullmatch(event.name)) and event.category[:3] != "gpu"]
    if not marks:
        ends = [event.end for event in events]
        return ((TraceStep(0, events[0].start, max(ends), None, {}),) if events else ()), None
    thread = (marks[0][0].pid, marks[0][0].tid)
    inner = [event for event in events if event.name == "dtrain.step" and (event.pid, event.tid) == thread]
    steps, done = [], []
    for mark, match in marks:
        inside = [event.end - event.start for event in inner if mark.start <= event.start < mark.end]
        number = int(match[1])
        note = notes[number].pop(0) if notes.get(number) else {}
        step = TraceStep(number, mark.start, mark.end, sum(inside) if inside else None, dict(note.get("spans", {})))
        steps.append(step)
        if note.get("done", True):
            done.append(step)
    return tuple(done or steps), thread
