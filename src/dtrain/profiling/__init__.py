"""Profile steps, take memory snapshots, read and diagnose traces.

    schedule = dt.profiling.schedule(wait=5, active=3)
    with dt.profiling.profile("traces", schedule=schedule) as profiler:
        for batch in loader:
            state, metrics = step(state, batch)
            profiler.step()
    print(dt.profiling.diagnose("traces"))

Each rank writes its own trace. Without a recorded step, no profiler runs.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.profiling.profiler import ProfilerContext as ProfilerContext
    from dtrain.profiling.profiler import profile as profile
    from dtrain.profiling.profiler import schedule as schedule
    from dtrain.profiling.profiler import snapshot_on_oom as snapshot_on_oom
    from dtrain.profiling.profiler import step_profiler as step_profiler
    from dtrain.profiling.trace.diagnosis import KernelBreakdown as KernelBreakdown
    from dtrain.profiling.trace.diagnosis import TraceDiagnosis as TraceDiagnosis
    from dtrain.profiling.trace.diagnosis import TraceFinding as TraceFinding
    from dtrain.profiling.trace.diagnosis import diagnose as diagnose
    from dtrain.profiling.trace.diagnosis import kernel_breakdown as kernel_breakdown
    from dtrain.profiling.trace.diagnosis import memory_timeline as memory_timeline
    from dtrain.profiling.trace.trace_file import ProfilerTrace as ProfilerTrace
    from dtrain.profiling.trace.trace_file import merge_traces as merge_traces
    from dtrain.profiling.trace.trace_file import read_trace as read_trace

__getattr__, __dir__ = attach(__name__, __file__)
