"""Merge the traces of all ranks into one trace on the clock of rank 0 (``merge_traces``)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain import storage
from dtrain.errors import ConfigError
from dtrain.profiling.trace.trace_file import dtrain_metadata, find_traces, read_trace_json, trace_rank

# process ids per rank: the process, and one per device
_PIDS_PER_RANK = 1000
# metadata events that the merged trace replaces
_REPLACED_METADATA = ("process_name", "process_labels", "process_sort_index")


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
    sources = [_read_source(number, file) for number, file in enumerate(files)]
    begin = min((source.begin_ns for source in sources if source.begin_ns is not None), default=0)
    merged: list[dict[str, Any]] = []
    pids = _ProcessIds()
    for source in sources:
        merged += source.shifted_events(begin, pids, of=len(sources))
    merged += pids.metadata_events()
    about = {"merged": [source.about for source in sources]}
    text = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": begin, "dtrain": about, "traceEvents": merged}
    data = json.dumps(text).encode()
    target = Path(path)
    storage.replace_file(target, gzip.compress(data) if target.name.endswith(".gz") else data)
    return target


@dataclass(slots=True, eq=False)
class _ProcessIds:
    """Process ids of the merged trace. torch uses the ids of the system, which may be equal on two hosts, and texts."""

    seen: dict[tuple[int, str], int] = field(default_factory=dict)
    titles: dict[int, str] = field(default_factory=dict)

    def assign(self, rank: int, pid: Any, labels: Mapping[str, str]) -> int:
        label = labels.get(str(pid), "")
        # A restarted process belongs to the same rank.
        key = "CPU" if label == "CPU" else f"{label} {pid}"
        number = self.seen.get((rank, key))
        if number is None:
            numbers = [known for (other, _), known in self.seen.items() if other == rank]
            # The host process is the first process of a rank.
            number = rank * _PIDS_PER_RANK if key == "CPU" else max([rank * _PIDS_PER_RANK, *numbers]) + 1
            self.seen[rank, key] = number
            self.titles[number] = f"rank {rank}" if key == "CPU" else f"rank {rank}: {label or pid or 'other'}"
        return number

    def metadata_events(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for number, title in sorted(self.titles.items()):
            about = {"ph": "M", "ts": 0, "pid": number, "tid": 0}
            rows.append({**about, "name": "process_name", "args": {"name": title}})
            rows.append({**about, "name": "process_sort_index", "args": {"sort_index": number}})
        return rows


@dataclass(slots=True, eq=False)
class _TraceSource:
    """Trace file. ``shift_ns`` converts its times to rank 0's clock, since 1970."""

    number: int
    rank: int
    events: list[dict[str, Any]]
    shift_ns: int
    begin_ns: int | None
    about: dict[str, Any]

    def shifted_events(self, begin_ns: int, pids: _ProcessIds, *, of: int) -> list[dict[str, Any]]:
        labels = {
            str(event.get("pid")): str(event.get("args", {}).get("labels", ""))
            for event in self.events
            if event.get("name") == "process_labels"
        }
        shift = (self.shift_ns - begin_ns) / 1000
        return [
            self._shift_event(event, shift, pids.assign(self.rank, event.get("pid"), labels), of)
            for event in self.events
            if event.get("name") not in _REPLACED_METADATA
        ]

    def _shift_event(self, event: dict[str, Any], shift: float, pid: int, of: int) -> dict[str, Any]:
        shifted = {**event, "pid": pid}
        if "ts" in event:
            shifted["ts"] = 0 if event.get("ph") == "M" else round(float(event["ts"]) + shift, 3)
        # Ids join flow events, and must be unique across files.
        if isinstance(event.get("id"), int):
            shifted["id"] = event["id"] * of + self.number
        return shifted


def _read_source(number: int, path: Path) -> _TraceSource:
    content = read_trace_json(path)
    about, rank = dtrain_metadata(content), trace_rank(content, path.name)
    offset = int(about.get("offset_ns", 0))
    shift = int(content.get("baseTimeNanoseconds", 0)) - offset
    starts = [float(event["ts"]) for event in content["traceEvents"] if event.get("ph") != "M" and "ts" in event]
    return _TraceSource(
        number=number,
        rank=rank,
        events=content["traceEvents"],
        shift_ns=shift,
        begin_ns=shift + round(min(starts) * 1000) if starts else None,
        about={
            "file": path.name,
            "rank": rank,
            "offset_ns": offset,
            "offset_bound_ns": about.get("offset_bound_ns"),
            "steps": [step["step"] for step in about.get("steps", ())],
        },
    )
