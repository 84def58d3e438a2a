"""Traces by hand, in the form that torch's profiler writes."""

import json
from pathlib import Path
from typing import Any

HOST, DEVICE = 7, 0  # processes


def op(name: str, start: float, end: float, *, cat: str = "cpu_op", pid: Any = HOST, tid: Any = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "pid": pid, "tid": tid}


def mark(name: str, start: float, end: float, *, tid: Any = 1) -> dict[str, Any]:
    return op(name, start, end, cat="user_annotation", tid=tid)


def kernel(name: str, start: float, end: float, *, cat: str = "kernel", stream: int = 20) -> dict[str, Any]:
    return op(name, start, end, cat=cat, pid=DEVICE, tid=stream)


def allocation(time_us: float, total: int, *, kind: int = 0, index: int = -1) -> dict[str, Any]:
    args = {"Total Allocated": total, "Bytes": 1, "Device Type": kind, "Device Id": index}
    return {"ph": "i", "name": "[memory]", "ts": time_us, "pid": HOST, "tid": 1, "args": args}


def trace(*events: dict[str, Any], base_ns: int = 0, **about: Any) -> dict[str, Any]:
    content: dict[str, Any] = {"schemaVersion": 1, "baseTimeNanoseconds": base_ns, "traceEvents": list(events)}
    return {**content, "dtrain": about} if about else content


def written(folder: Path, content: dict[str, Any], *, rank: int = 0, step: int = 0) -> Path:
    path = folder / f"trace-rank-{rank:05d}-step-{step:08d}.pt.trace.json"
    path.write_text(json.dumps(content))
    return path
