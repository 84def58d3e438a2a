"""Read a trace of torch's profiler into steps, events and allocations (``read_trace``), and merge traces (``merge_traces``)."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from dtrain import storage
from dtrain.errors import ConfigError, DataError

_TRACE_NAME = re.compile(r"trace-rank-(\d{5,})-step-(\d+)\.pt\.trace\.json(\.gz)?")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_KEPT_CATEGORIES = {"cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset"}
_DEVICES = {0: "cpu", 1: "cuda"}
# metadata events that the merged trace replaces
_REPLACED_METADATA = ("process_name", "process_labels", "process_sort_index")
# process ids per rank: the process, and one per device
_PIDS_PER_RANK = 1000


class TraceEvent(NamedTuple):
    """Event with a duration, in microseconds of the trace's clock."""

    name: str
    category: str
    start: float
    end: float
    pid: Any
    tid: Any


class TraceStep(NamedTuple):
    """Step of the loop, from the end of the previous step to its own end, in microseconds, with seconds by span.

    ``step_fn_us`` is the duration of the step function; None if unmarked.
    """

    number: int
    start: float
    end: float
    step_fn_us: float | None
    spans: Mapping[str, float]


class AllocatorSample(NamedTuple):
    """Bytes of a device's allocator after an allocation, with the time in microseconds."""

    at: float
    device: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ProfilerTrace:
    """Trace of one rank.

    Args:
        name: name of the file.
        rank: rank of the trace.
        steps: steps in order; a trace without step marks has one step.
        events: events by start; an enclosing event precedes the events inside.
        allocations: allocations in order; empty unless memory was recorded.
        thread: thread of the loop.
    """

    name: str
    rank: int
    steps: tuple[TraceStep, ...]
    events: tuple[TraceEvent, ...]
    allocations: tuple[AllocatorSample, ...] = ()
    thread: tuple[Any, Any] | None = None

    @property
    def on_device(self) -> bool:
        """True if the trace has GPU kernels."""
        return any(event.category == "kernel" for event in self.events)


def find_traces(folder: str | Path) -> list[Path]:
    """List the traces of ``profile`` in a folder, by rank and step; empty without traces or folder."""
    place = Path(folder)
    names = storage.list_names(place) if storage.is_folder(place) else []
    files = sorted((int(match[1]), int(match[2]), name) for name in names if (match := _TRACE_NAME.fullmatch(name)))
    return [place / name for *_, name in files]


def read_trace(path: str | Path) -> ProfilerTrace:
    """Read a trace of ``profile``, or of any torch profiler.

    Example:
        import dtrain as dt

        trace = dt.profiling.read_trace("traces/trace-rank-00000-step-00000002.pt.trace.json")
        print(trace.rank, [step.end - step.start for step in trace.steps])

    Raises:
        ConfigError: the file does not exist.
        DataError: the file is damaged or not a trace.
    """
    return parse_trace(read_trace_json(Path(path)), Path(path).name)


def read_trace_json(path: Path) -> dict[str, Any]:
    """Read the JSON of a trace and check its form."""
    size = storage.file_size(path)
    if size is None:
        raise ConfigError(
            f"read_trace: path must be an existing file, got {path}. Name a file that torch.profiler has written."
        )
    try:
        data = storage.read_file(path, limit=size)
        content = json.loads(gzip.decompress(data) if path.name.endswith(".gz") else data, strict=False)
        if not isinstance(content, dict) or not isinstance(content["traceEvents"], list):
            raise TypeError("traceEvents must be a list")
        if not all(isinstance(event, dict) for event in content["traceEvents"]):
            raise TypeError("every event must be an object")
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        raise DataError(
            f"trace: {path} cannot be read as a trace of torch's profiler: {error}. "
            "Name a file that torch.profiler has written."
        ) from None
    return content


def parse_trace(content: Mapping[str, Any], source: str) -> ProfilerTrace:
    """Parse the JSON of a trace.

    Raises:
        DataError: an event has an invalid form.
    """
    try:
        about = dtrain_metadata(content)
        rows = content["traceEvents"]
        events, allocated = [], []
        for row in rows:
            if row.get("ph") == "X" and row.get("cat") in _KEPT_CATEGORIES:
                start, thread = float(row["ts"]), (row.get("pid"), row.get("tid"))
                events.append(TraceEvent(str(row["name"]), row["cat"], start, start + float(row["dur"]), *thread))
            elif row.get("name") == "[memory]":
                args = row["args"]
                kind, index = int(args["Device Type"]), int(args["Device Id"])
                device = _DEVICES.get(kind, f"device type {kind}") + (f":{index}" if index >= 0 else "")
                allocated.append(AllocatorSample(float(row["ts"]), device, int(args["Total Allocated"])))
        events.sort(key=lambda event: (event.start, -event.end))
        steps, loop_thread = _parse_steps(events, about.get("steps", ()))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"trace: {source} has an event or metadata of another form: {type(error).__name__}: {error}. "
            "Record the trace again."
        ) from None
    return ProfilerTrace(
        name=source,
        rank=trace_rank(content, source),
        steps=steps,
        events=tuple(events),
        allocations=tuple(sorted(allocated, key=lambda each: each.at)),
        thread=loop_thread,
    )


def dtrain_metadata(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the metadata that ``profile`` adds to a trace; empty for other traces."""
    about = content.get("dtrain")
    return about if isinstance(about, dict) else {}


def trace_rank(content: Mapping[str, Any], source: str) -> int:
    """Return the rank of a trace: from ``profile``, else from torch, else from the file name, else 0."""
    for facts in (dtrain_metadata(content), content.get("distributedInfo")):
        if isinstance(facts, dict) and type(facts.get("rank")) is int:
            return cast(int, facts["rank"])
    named = _TRACE_NAME.fullmatch(source)
    return int(named[1]) if named else 0


def _parse_steps(
    events: list[TraceEvent], metadata: Sequence[Mapping[str, Any]]
) -> tuple[tuple[TraceStep, ...], tuple[Any, Any] | None]:
    """Return the marked steps and their thread; one step for the whole trace without marks.

    A step cut short by the end of the recording counts only if no other step exists.
    """
    # dtrain's step number does not change during an evaluation, so several steps may have the same number.
    notes: dict[int, list[Mapping[str, Any]]] = {}
    for note in metadata:
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


def merge_traces(traces: str | Path | Sequence[str | Path], path: str | Path) -> Path:
    """Merge the traces of all ranks into one file and return its path. Perfetto and ``chrome://tracing`` show the file.

    Each rank is a process, ``rank 3``, with its GPU as a second process. Times are in rank 0's clock: each trace of
    ``profile`` stores the measured clock offset of its rank, which is subtracted. Traces without an offset are assumed to be
    in sync, as on one host.

    Args:
        traces: output folder of ``profile``, or a list of files; every file is loaded completely.
        path: output file, replaced if present; compressed if the name ends in ``.gz``.

    Example:
        import dtrain as dt

        dt.profiling.merge_traces("traces", "traces/merged.json.gz")

    Raises:
        ConfigError: no traces.
        DataError: a trace is damaged.
    """
    if isinstance(traces, str | Path):
        files = find_traces(traces)
        if not files:
            raise ConfigError(
                f"merge_traces: traces must contain trace-rank-*.pt.trace.json, got {traces}. Run the loop in profile."
            )
    else:
        files = [Path(each) for each in traces]
        if not files:
            raise ConfigError(
                "merge_traces: traces must be a folder or a list of files, got an empty list. "
                "Pass the folder given to dt.profiling.profile."
            )
    sources = [_TraceSource.read(file) for file in files]
    begin_ns = min((source.begin_ns for source in sources if source.begin_ns is not None), default=0)
    pids, events = _ProcessIds(), list[dict[str, Any]]()
    for number, source in enumerate(sources):
        shift = (source.shift_ns - begin_ns) / 1000
        labels = {
            str(event.get("pid")): str(event.get("args", {}).get("labels", ""))
            for event in source.events
            if event.get("name") == "process_labels"
        }
        for event in source.events:
            if event.get("name") in _REPLACED_METADATA:
                continue
            pid = event.get("pid")
            shifted = {**event, "pid": pids.assign(source.rank, pid, labels.get(str(pid), ""))}
            if "ts" in event:
                shifted["ts"] = 0 if event.get("ph") == "M" else round(float(event["ts"]) + shift, 3)
            # Ids join flow events, and must be unique across files.
            if isinstance(event.get("id"), int):
                shifted["id"] = event["id"] * len(sources) + number
            events.append(shifted)
    about = {"merged": [source.about for source in sources]}
    events += pids.metadata_events()
    text = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": begin_ns,
        "dtrain": about,
        "traceEvents": events,
    }
    data = json.dumps(text).encode()
    target = Path(path)
    storage.replace_file(target, gzip.compress(data) if target.name.endswith(".gz") else data)
    return target


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _TraceSource:
    """Trace file. ``shift_ns`` converts its times to rank 0's clock, since 1970."""

    rank: int
    events: list[dict[str, Any]]
    shift_ns: int
    begin_ns: int | None
    about: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> _TraceSource:
        content = read_trace_json(path)
        about, rank, events = dtrain_metadata(content), trace_rank(content, path.name), content["traceEvents"]
        offset_ns = int(about.get("offset_ns", 0))
        shift_ns = int(content.get("baseTimeNanoseconds", 0)) - offset_ns
        starts = [float(event["ts"]) for event in events if event.get("ph") != "M" and "ts" in event]
        facts = {"file": path.name, "rank": rank, "offset_ns": offset_ns, "offset_bound_ns": about.get("offset_bound_ns")}
        return cls(
            rank=rank,
            events=events,
            shift_ns=shift_ns,
            begin_ns=shift_ns + round(min(starts) * 1000) if starts else None,
            about=facts | {"steps": [step["step"] for step in about.get("steps", ())]},
        )


@dataclass(slots=True, eq=False)
class _ProcessIds:
    """Process ids of the merged trace. torch uses the ids of the system, which may be equal on two hosts, and texts."""

    numbers: dict[tuple[int, str], int] = field(default_factory=dict)
    titles: dict[int, str] = field(default_factory=dict)

    def assign(self, rank: int, pid: Any, label: str) -> int:
        # A restarted process belongs to the same rank.
        key = "CPU" if label == "CPU" else f"{label} {pid}"
        number = self.numbers.get((rank, key))
        if number is None:
            # The host process is the first process of a rank.
            first = rank * _PIDS_PER_RANK
            others = [number for (other, _), number in self.numbers.items() if other == rank]
            number = first if key == "CPU" else max([first, *others]) + 1
            self.numbers[rank, key] = number
            self.titles[number] = f"rank {rank}" if key == "CPU" else f"rank {rank}: {label or pid or 'other'}"
        return number

    def metadata_events(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for number, title in sorted(self.titles.items()):
            about = {"ph": "M", "ts": 0, "pid": number, "tid": 0}
            rows.append({**about, "name": "process_name", "args": {"name": title}})
            rows.append({**about, "name": "process_sort_index", "args": {"sort_index": number}})
        return rows
