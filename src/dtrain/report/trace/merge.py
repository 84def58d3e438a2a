"""``merge_traces``: the traces of all ranks as one, on the clock of rank 0."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain import storage
from dtrain.errors import ConfigError
from dtrain.report.trace.trace_file import dtrain_metadata, find_traces, read_trace_json, trace_rank

_PIDS_PER_RANK = 1000  # of one rank: its process, and one for each device
_REPLACED_METADATA = ("process_name", "process_labels", "process_sort_index")  # which are given here


def merge_traces(traces: str | Path | Sequence[str | Path], path: str | Path) -> Path:
    """Write one trace of all ranks, on one clock, and return its path. Perfetto and ``chrome://tracing`` show it.

    Each rank is a process, ``rank 3``, and its GPU one beside it. Times are of rank 0's clock: each trace of ``profile`` says
    how far its rank's was ahead, and within what bound, and that is taken off. Traces without it are taken to be right, as
    on one host they are.

    Args:
        traces: the folder of ``profile``, or some files. All of them are read whole, one after another.
        path: of the new file, replaced if it is there; compressed if its name ends in ``.gz``.

    Raises:
        ConfigError: no traces there.
        DataError: one of them is damaged.
    """
    if isinstance(traces, str | Path):
        files = find_traces(traces)
        if not files:
            raise ConfigError(f"merge_traces: {traces} has no trace-rank-*.pt.trace.json; was it profiled?")
    else:
        files = [Path(each) for each in traces]
        if not files:
            raise ConfigError("merge_traces: needs the traces, got an empty list")
    sources = [_read_source(number, path) for number, path in enumerate(files)]
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
    """New numbers for processes: torch uses the system's, which two hosts may share, and texts, and devices' numbers."""

    seen: dict[tuple[int, str], int] = field(default_factory=dict)
    titles: dict[int, str] = field(default_factory=dict)

    def assign(self, rank: int, pid: Any, labels: Mapping[str, str]) -> int:
        label = labels.get(str(pid), "")
        key = "CPU" if label == "CPU" else f"{label} {pid}"  # a process that was started again is the same rank
        found = self.seen.get((rank, key))
        if found is None:
            mine = [number for (other, _), number in self.seen.items() if other == rank]
            # The host's process comes first of its rank.
            found = rank * _PIDS_PER_RANK if key == "CPU" else max([rank * _PIDS_PER_RANK, *mine]) + 1
            self.seen[rank, key] = found
            self.titles[found] = f"rank {rank}" if key == "CPU" else f"rank {rank}: {label or pid or 'other'}"
        return found

    def metadata_events(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for number, title in sorted(self.titles.items()):
            about = {"ph": "M", "ts": 0, "pid": number, "tid": 0}
            rows.append({**about, "name": "process_name", "args": {"name": title}})
            rows.append({**about, "name": "process_sort_index", "args": {"sort_index": number}})
        return rows


@dataclass(slots=True, eq=False)
class _TraceSource:
    """One file: ``shift_ns`` is added to its times to have them on rank 0's clock, since 1970."""

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
        changed = {**event, "pid": pid}
        if "ts" in event:
            changed["ts"] = 0 if event.get("ph") == "M" else round(float(event["ts"]) + shift, 3)
        if isinstance(event.get("id"), int):  # arrows between events are joined by it, and must not join two files
            changed["id"] = event["id"] * of + self.number
        return changed


def _read_source(number: int, path: Path) -> _TraceSource:
    found = read_trace_json(path)
    about, rank = dtrain_metadata(found), trace_rank(found, path.name)
    ahead = int(about.get("offset_ns", 0))
    shift = int(found.get("baseTimeNanoseconds", 0)) - ahead
    starts = [float(event["ts"]) for event in found["traceEvents"] if event.get("ph") != "M" and "ts" in event]
    return _TraceSource(
        number=number,
        rank=rank,
        events=found["traceEvents"],
        shift_ns=shift,
        begin_ns=shift + round(min(starts) * 1000) if starts else None,
        about={
            "file": path.name,
            "rank": rank,
            "offset_ns": ahead,
            "offset_bound_ns": about.get("offset_bound_ns"),
            "steps": [step["step"] for step in about.get("steps", ())],
        },
    )
