"""Rows: the profiler and the snapshot, which change nothing either."""

from __future__ import annotations

import tempfile
from pathlib import Path

from battery.row import Points, Row
from battery.rows.gradients import line
from dtrain.profiling.profiler import schedule, snapshot_on_oom, step_profiler
from dtrain.profiling.trace.trace_file import find_traces, read_trace

FOLDER = Path(tempfile.gettempdir()) / "dtrain-battery-traces"  # never made: no run gets as far


def recorded() -> Points:
    """Of five steps, skip the first, warm up in the second, and record the next two."""
    with tempfile.TemporaryDirectory() as folder:
        line(step_profiler(folder, schedule=schedule(skip_first=1, warmup=1, active=2)), [[1.0]], [3.0], steps=5)
        (file,) = find_traces(folder)
        steps = [step.number for step in read_trace(file).steps]
    return [(float(steps[0]), 2.0), (float(steps[1]), 3.0), (float(len(steps)), 2.0)]


ROWS: dict[str, Row] = {
    "step_profiler": Row(
        make=lambda: step_profiler(FOLDER, schedule=schedule(skip_first=10**6)),
        of=("step_profiler",),
        points=recorded,
    ),
    "snapshot_on_oom": Row(make=lambda: snapshot_on_oom(FOLDER)),
}
