"""Analyze the traces of a run (``kernel_breakdown``, ``memory_timeline``), and describe bottlenecks in words (``diagnose``).

Each bottleneck has one small rule. Intervals are sorted lists of disjoint (start, end) pairs.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple, TypeAlias

from dtrain import storage
from dtrain.errors import ConfigError, DataError
from dtrain.profiling.trace.trace_file import ProfilerTrace, TraceEvent, TraceStep, find_traces, read_trace

Intervals: TypeAlias = list[tuple[float, float]]
# largest fraction of a step spent waiting for data
DATA_WAIT = 0.10
# largest fraction of a step in collectives without compute
EXPOSED_COMMUNICATION = 0.20
# largest idle fraction of a step on a GPU, without data wait
HOST_BOUND = 0.20
# largest ratio of a rank's work to the work of other ranks, and smallest difference as a fraction of a step
STRAGGLER = 1.25
STRAGGLER_MARGIN = 0.05
# largest ratio of peak and median memory
MEMORY_SPIKE = 2.0
# Smaller peaks are ignored.
MEMORY_SPIKE_MIN_BYTES = 64 * 2**20
TOP_OPERATIONS = 10
_COMMUNICATION_KERNEL = re.compile(r"nccl|rccl", re.IGNORECASE)
# Threads of a backend mark the duration of a collective.
_BACKEND_MARKS = ("gloo:", "mpi:", "ucc:")
# operations that start or wait for a collective
_COLLECTIVE_PREFIXES = ("c10d::", "_c10d_functional::", "record_param_comms")
_LOADER_MARKS = ("enumerate(DataLoader)", "data")
# A loader other than dtrain's may run in these spans.
_UNNAMED_SPANS = {"data", "other"}


def union(parts: Iterable[tuple[float, float]]) -> Intervals:
    """Return the union of intervals.

    >>> union([(5, 6), (0, 2), (1, 3), (4, 4)])
    [(0, 3), (5, 6)]
    """
    merged: Intervals = []
    for start, end in sorted(part for part in parts if part[1] > part[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtract(first: Intervals, second: Intervals) -> Intervals:
    """Return the time in ``first`` and not in ``second``, both in the form of ``union``.

    >>> subtract([(0, 10)], [(2, 3), (9, 12)])
    [(0, 2), (3, 9)]
    """
    rest: Intervals = []
    begin = 0
    for start, end in first:
        while begin < len(second) and second[begin][1] <= start:
            begin += 1
        index = begin
        while index < len(second) and second[index][0] < end:
            if second[index][0] > start:
                rest.append((start, second[index][0]))
            start = max(start, second[index][1])
            index += 1
        if start < end:
            rest.append((start, end))
    return rest


def intersect(first: Intervals, second: Intervals) -> Intervals:
    """Return the time in both ``first`` and ``second``.

    >>> intersect([(0, 10)], [(2, 3), (9, 12)])
    [(2, 3), (9, 10)]
    """
    return subtract(first, subtract(first, second))


def total_length(intervals: Intervals) -> float:
    """Return the total length of the intervals."""
    return sum(end - start for start, end in intervals)


class OperationTime(NamedTuple):
    """Operation by name: self time in seconds and number of calls."""

    name: str
    seconds: float
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBreakdown:
    """Seconds of one rank in the steps of a trace. Parts may overlap, unless stated otherwise.

    Args:
        rank: rank of the trace.
        steps: number of steps.
        seconds: wall time of all steps.
        on_device: if True, operations are those of a GPU; else those of the host.
        compute: seconds with a compute operation.
        communication: seconds with a collective, including waits for other ranks.
        exposed_communication: seconds of ``communication`` without a compute operation.
        copies: on a GPU, seconds with a copy between GPU and host, or within the GPU.
        data_wait: seconds of waiting for the loader: from spans, else from marks in the trace, else the time between steps.
        data_wait_source: source of ``data_wait``: ``spans``, ``marks``, ``between`` or ``nothing``.
        idle: seconds without an operation on the device; on a CPU, without any operation, including data wait and Python.
        top: the ten operations with the largest self time.
    """

    rank: int
    steps: int
    seconds: float
    on_device: bool
    compute: float
    communication: float
    exposed_communication: float
    copies: float
    data_wait: float
    data_wait_source: str
    idle: float
    top: tuple[OperationTime, ...] = ()


def kernel_breakdown(trace: ProfilerTrace | str | Path) -> KernelBreakdown:
    """Break down the time of the recorded steps into compute, communication, copies, data wait and idle time.

    On a GPU, kernels and copies count; kernels of NCCL (RCCL) are communication. On a CPU, operations count; operations of
    ``torch.distributed`` and the time of gloo's threads are communication.

    Args:
        trace: file, or result of ``read_trace``.

    Example:
        import dtrain as dt

        breakdown = dt.profiling.kernel_breakdown("traces/trace-rank-00000-step-00000002.pt.trace.json")
        print(breakdown.compute / breakdown.seconds, breakdown.top[0])

    Raises:
        ConfigError: the file does not exist.
        DataError: the file is damaged or not a trace.
    """
    trace = trace if isinstance(trace, ProfilerTrace) else read_trace(trace)
    steps = union((step.start, step.end) for step in trace.steps)
    compute, communication, copies = (intersect(part, steps) for part in _activity_intervals(trace))
    data_wait, data_wait_source = _data_wait(trace, steps)
    total = total_length(steps)
    return KernelBreakdown(
        rank=trace.rank,
        steps=len(trace.steps),
        seconds=total / 1e6,
        on_device=trace.on_device,
        compute=total_length(compute) / 1e6,
        communication=total_length(communication) / 1e6,
        exposed_communication=total_length(subtract(communication, compute)) / 1e6,
        copies=total_length(copies) / 1e6,
        data_wait=data_wait,
        data_wait_source=data_wait_source,
        idle=(total - total_length(union([*compute, *communication, *copies]))) / 1e6,
        top=_top_operations(trace, steps),
    )


def sum_windows(breakdowns: Sequence[KernelBreakdown]) -> KernelBreakdown:
    """Sum the breakdowns of all traces of a rank."""
    summed = {
        each.name: sum(getattr(breakdown, each.name) for breakdown in breakdowns)
        for each in fields(KernelBreakdown)
        if each.name not in ("rank", "on_device", "data_wait_source", "top")
    }
    operations: dict[str, tuple[float, int]] = {}
    for name, seconds, count in (operation for breakdown in breakdowns for operation in breakdown.top):
        before = operations.get(name, (0.0, 0))
        operations[name] = (before[0] + seconds, before[1] + count)
    return replace(breakdowns[0], **summed, top=_largest_operations(operations))


def _activity_intervals(trace: ProfilerTrace) -> tuple[Intervals, Intervals, Intervals]:
    """Return the intervals of compute, communication and copies."""
    if trace.on_device:
        kernels = [event for event in trace.events if event.category == "kernel"]
        communicates = [bool(_COMMUNICATION_KERNEL.search(event.name)) for event in kernels]
        return (
            union((event.start, event.end) for event, is_comm in zip(kernels, communicates, strict=True) if not is_comm),
            union((event.start, event.end) for event, is_comm in zip(kernels, communicates, strict=True) if is_comm),
            union((event.start, event.end) for event in trace.events if event.category in ("gpu_memcpy", "gpu_memset")),
        )
    backend = [event for event in trace.events if event.category == "user_annotation" and event.name.startswith(_BACKEND_MARKS)]
    backend_threads = {(event.pid, event.tid) for event in backend}
    collectives: dict[tuple[object, object], list[tuple[float, float]]] = defaultdict(list)
    operations: dict[tuple[object, object], list[tuple[float, float]]] = defaultdict(list)
    for event in trace.events:
        thread = (event.pid, event.tid)
        if event.category == "cpu_op" and thread not in backend_threads:
            by_thread = collectives if event.name.startswith(_COLLECTIVE_PREFIXES) else operations
            by_thread[thread].append((event.start, event.end))
    # An operation may wait for a collective inside, such as a hook of backward.
    compute = union(part for thread, parts in operations.items() for part in subtract(union(parts), union(collectives[thread])))
    waits = [(event.start, event.end) for event in backend]
    return compute, union([*waits, *(part for parts in collectives.values() for part in parts)]), []


def _data_wait(trace: ProfilerTrace, steps: Intervals) -> tuple[float, str]:
    """Return the seconds of waiting for the loader, and the source of the number."""
    by_span = sum(step.spans.get("data", 0.0) for step in trace.steps)
    if by_span > 0:
        return by_span, "spans"
    marks = union(
        (event.start, event.end)
        for event in trace.events
        if event.category in ("user_annotation", "cpu_op")
        and (event.name == _LOADER_MARKS[1] or event.name.startswith(_LOADER_MARKS[0]))
        and trace.thread in (None, (event.pid, event.tid))
    )
    if marks:
        return total_length(intersect(marks, steps)) / 1e6, "marks"
    if any(step.step_fn_us is not None for step in trace.steps):
        return sum(_between_steps(step) for step in trace.steps), "between"
    return 0.0, "nothing"


def _between_steps(step: TraceStep) -> float:
    """Return the seconds outside of the step function, without named spans such as saving, evaluation and metric reduction."""
    if step.step_fn_us is None:
        return 0.0
    inside = step.step_fn_us / 1e6
    # Spans have no position. Named spans cover the whole step function, so their excess belongs to the loop.
    named = sum(seconds for name, seconds in step.spans.items() if name not in _UNNAMED_SPANS)
    return max(0.0, (step.end - step.start) / 1e6 - inside - max(0.0, named - inside))


def _top_operations(trace: ProfilerTrace, steps: Intervals) -> tuple[OperationTime, ...]:
    """Return the operations that begin in a step by self time. An operation may contain operations of the same thread."""
    if not steps:
        return ()
    kind = ("kernel", "gpu_memcpy", "gpu_memset") if trace.on_device else ("cpu_op",)
    totals: dict[str, tuple[float, int]] = {}
    open_events: dict[tuple[object, object], list[TraceEvent]] = defaultdict(list)
    for event in trace.events:
        if event.category not in kind or not steps[0][0] <= event.start < steps[-1][1]:
            continue
        stack = open_events[(event.pid, event.tid)]
        while stack and stack[-1].end <= event.start:
            stack.pop()
        if stack:
            seconds, count = totals[stack[-1].name]
            totals[stack[-1].name] = (seconds - (min(event.end, stack[-1].end) - event.start) / 1e6, count)
        seconds, count = totals.get(event.name, (0.0, 0))
        totals[event.name] = (seconds + (event.end - event.start) / 1e6, count + 1)
        stack.append(event)
    return _largest_operations(totals)


def _largest_operations(totals: dict[str, tuple[float, int]]) -> tuple[OperationTime, ...]:
    ordered = sorted(totals.items(), key=lambda item: (-item[1][0], item[0]))
    return tuple(OperationTime(name, seconds, count) for name, (seconds, count) in ordered[:TOP_OPERATIONS])


class MemorySample(NamedTuple):
    """Allocated bytes of a device from a time on, in seconds after the start of the first step."""

    at: float
    bytes: int


def memory_timeline(trace: ProfilerTrace | str | Path, path: str | Path | None = None) -> dict[str, list[MemorySample]]:
    """Return the allocated memory over time by device (``"cpu"``, ``"cuda:0"``); empty without ``profile(memory=True)``.

    On CUDA, the bytes are those of the caching allocator. On a CPU, torch counts from the start of the recording: earlier
    parameters are missing, and freeing earlier tensors may give negative values.

    Args:
        trace: file, or result of ``read_trace``.
        path: output file, replaced if present: ``{"rank": ..., "devices": {"cpu": [[seconds, bytes], ...]}}``; None writes no
            file.

    Example:
        import dtrain as dt

        timeline = dt.profiling.memory_timeline("traces/trace-rank-00000-step-00000002.pt.trace.json")
        print(max(sample.bytes for sample in timeline["cuda:0"]))

    Raises:
        ConfigError: the trace does not exist.
        DataError: the file is damaged or not a trace.
    """
    trace = trace if isinstance(trace, ProfilerTrace) else read_trace(trace)
    begin = trace.steps[0].start if trace.steps else (trace.allocations[0].at if trace.allocations else 0.0)
    timelines: dict[str, list[MemorySample]] = {}
    for each in trace.allocations:
        timelines.setdefault(each.device, []).append(MemorySample((each.at - begin) / 1e6, each.bytes))
    if path is not None:
        storage.replace_file(storage.resolve_path(path), json.dumps({"rank": trace.rank, "devices": timelines}).encode())
    return timelines


def peak_and_median(timeline: list[MemorySample]) -> tuple[int, int]:
    """Return the peak and the time-weighted median of allocated bytes.

    >>> peak_and_median(
    ...     [
    ...         MemorySample(0.0, 10),
    ...         MemorySample(1.0, 50),
    ...         MemorySample(1.5, 20),
    ...         MemorySample(3.0, 0),
    ...     ]
    ... )
    (50, 20)
    """
    times = sorted((now.bytes, later.at - now.at) for now, later in pairwise(timeline))
    peak = max((sample.bytes for sample in timeline), default=0)
    remaining = sum(seconds for _, seconds in times) / 2
    for size, seconds in times:
        remaining -= seconds
        if remaining <= 0:
            return peak, size
    return peak, peak


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFinding:
    """Bottleneck found by a rule: name of the rule, description and numbers."""

    rule: str
    text: str
    numbers: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemoryUse:
    """Memory of a device of a rank in bytes: peak and median over time."""

    rank: int
    device: str
    peak: int
    median: int


DiagnosisRule: TypeAlias = Callable[[Sequence[KernelBreakdown]], TraceFinding | None]


def check_data_wait(shares: Sequence[KernelBreakdown]) -> TraceFinding | None:
    """Find a rank that waits for data for more than a tenth of a step."""
    worst = max(shares, key=_data_wait_share)
    share = _data_wait_share(worst)
    if share <= DATA_WAIT:
        return None
    waiting = "between steps, where the loader is" if worst.data_wait_source == "between" else "waiting for data"
    return TraceFinding(
        rule="data_wait",
        text=f"data wait: rank {worst.rank} spends {share:.0%} of a step {waiting} ({_format_ms(worst, worst.data_wait)} of "
        f"{_format_step(worst)}); use more loader workers, or less work in them",
        numbers={"rank": worst.rank, "share": share, "limit": DATA_WAIT, "seconds_per_step": worst.data_wait / worst.steps},
    )


def check_communication(shares: Sequence[KernelBreakdown]) -> TraceFinding | None:
    """Find steps limited by collectives, measured on the rank that waits least for other ranks."""
    if len(shares) == 1 and shares[0].communication == 0:
        return None
    least = min(shares, key=lambda share: share.exposed_communication / share.seconds)
    share = least.exposed_communication / least.seconds
    if share <= EXPOSED_COMMUNICATION:
        return None
    return TraceFinding(
        rule="communication",
        text=f"communication: {share:.0%} of a step is spent in collectives without compute (rank {least.rank}, which waits "
        f"least: {_format_ms(least, least.exposed_communication)} of {_format_step(least)}; in all "
        f"{_format_ms(least, least.communication)}); use larger batches on each rank, or shard over fewer ranks",
        numbers={
            "rank": least.rank,
            "share": share,
            "limit": EXPOSED_COMMUNICATION,
            "mean_share": mean(each.exposed_communication / each.seconds for each in shares),
            "overlapped_share": (least.communication - least.exposed_communication) / least.seconds,
        },
    )


def check_host_bound(shares: Sequence[KernelBreakdown]) -> TraceFinding | None:
    """Find a GPU that is idle without waiting for data: the host launches kernels too slowly."""
    on_device = [share for share in shares if share.on_device]
    if not on_device:
        return None
    worst = max(on_device, key=_idle_share)
    share = _idle_share(worst)
    if share <= HOST_BOUND:
        return None
    return TraceFinding(
        rule="host_bound",
        text=f"host-bound: the GPU of rank {worst.rank} is idle for {share:.0%} of a step, without data wait; compile, fuse "
        "small operations, or look for host synchronizations",
        numbers={"rank": worst.rank, "share": share, "limit": HOST_BOUND, "idle_share": worst.idle / worst.seconds},
    )


def check_stragglers(shares: Sequence[KernelBreakdown]) -> TraceFinding | None:
    """Find a rank that computes, copies and waits for data longer than the other ranks."""
    if len(shares) < 2:
        return None
    slowest = max(shares, key=_own_seconds)
    others = median(_own_seconds(share) for share in shares if share is not slowest)
    times = _own_seconds(slowest) / others if others > 0 else 1.0
    if times <= STRAGGLER or _own_seconds(slowest) - others <= STRAGGLER_MARGIN * slowest.seconds / slowest.steps:
        return None
    return TraceFinding(
        rule="stragglers",
        text=f"straggler: rank {slowest.rank} works {times:.2f} times as long in a step as the other ranks "
        f"({_own_seconds(slowest) * 1e3:.1f} ms against {others * 1e3:.1f} ms), which wait for rank {slowest.rank}",
        numbers={"rank": slowest.rank, "times": times, "limit": STRAGGLER, "seconds": _own_seconds(slowest), "others": others},
    )


def check_memory_spike(memories: Sequence[DeviceMemoryUse]) -> TraceFinding | None:
    """Find a device with a peak far above its median memory; the peak limits the batch size."""
    large = [
        memory
        for memory in memories
        if memory.peak >= MEMORY_SPIKE_MIN_BYTES and memory.peak > MEMORY_SPIKE * max(memory.median, 0)
    ]
    if not large:
        return None
    worst = max(large, key=lambda memory: memory.peak / max(memory.median, 1))
    return TraceFinding(
        rule="memory_spike",
        text=f"memory spike: {worst.device} of rank {worst.rank} holds {worst.peak / 2**20:,.0f} MiB at its peak, and half of "
        f"the time at most {worst.median / 2**20:,.0f} MiB; the peak limits the batch size",
        numbers={"rank": worst.rank, "peak_bytes": worst.peak, "median_bytes": worst.median, "limit": MEMORY_SPIKE},
    )


RULES: tuple[DiagnosisRule, ...] = (check_data_wait, check_communication, check_host_bound, check_stragglers)


def _data_wait_share(share: KernelBreakdown) -> float:
    """Return the data wait as a fraction. On a GPU, the idle time is the limit, since the host may wait while the GPU works."""
    return (min(share.data_wait, share.idle) if share.on_device else share.data_wait) / share.seconds


def _idle_share(share: KernelBreakdown) -> float:
    return max(0.0, share.idle / share.seconds - _data_wait_share(share))


def _own_seconds(share: KernelBreakdown) -> float:
    """Return the seconds of a step that are the rank's own work."""
    return (share.compute + share.copies + share.data_wait) / share.steps


def _format_ms(share: KernelBreakdown, seconds: float) -> str:
    return f"{seconds / share.steps * 1e3:.1f} ms"


def _format_step(share: KernelBreakdown) -> str:
    return _format_ms(share, share.seconds)


NO_FINDINGS = "nothing stands out"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDiagnosis:
    """Diagnosis of traces. As text, one line per finding.

    Args:
        findings: bottlenecks found by the rules, data wait first; empty if none.
        shares: breakdown of each rank over all traces.
        memory: memory of each rank and device, if recorded.
        problems: unusable traces.
    """

    findings: tuple[TraceFinding, ...]
    shares: tuple[KernelBreakdown, ...]
    memory: tuple[DeviceMemoryUse, ...]
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(
            [*(finding.text for finding in self.findings), *self.problems] if self.findings or self.problems else [NO_FINDINGS]
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain data, and the text as ``text``."""
        return {**asdict(self), "text": str(self)}


def diagnose(path: str | Path) -> TraceDiagnosis:
    """Diagnose the traces of ``profile`` in a folder.

    Each rule of ``dtrain.profiling.trace.diagnosis`` has a limit: a tenth of a step waiting for data, a fifth in collectives
    without compute, a fifth with an idle GPU, a rank with a quarter more work than the other ranks, a peak of twice the median
    memory.

    Args:
        path: output folder of ``profile``. Unreadable traces are listed in ``problems``.

    Example:
        import dtrain as dt

        diagnosis = dt.profiling.diagnose("traces")
        print(diagnosis)
        worst = max(diagnosis.shares, key=lambda share: share.data_wait)

    Raises:
        ConfigError: the folder has no trace.
    """
    files = find_traces(path)
    if not files:
        raise ConfigError(f"diagnose: path must contain trace-rank-*.pt.trace.json, got {path}. Run the loop in profile.")
    traces, problems = [], []
    for file in files:
        try:
            traces.append(read_trace(file))
        except (DataError, ConfigError) as error:
            problems.append(str(error))
    return diagnose_traces(traces, problems=problems)


def diagnose_traces(traces: Sequence[ProfilerTrace], *, problems: Sequence[str] = ()) -> TraceDiagnosis:
    """Diagnose traces. Pure.

    Args:
        traces: traces of any ranks, any number per rank.
        problems: known problems.
    """
    windows: dict[int, list[KernelBreakdown]] = {}
    memories: list[DeviceMemoryUse] = []
    missing = list(problems)
    for trace in traces:
        share = kernel_breakdown(trace)
        if share.seconds > 0:
            windows.setdefault(trace.rank, []).append(share)
        else:
            missing.append(f"{trace.name}: nothing was recorded in it")
        for device, timeline in memory_timeline(trace).items():
            peak, median = peak_and_median(timeline)
            memories.append(DeviceMemoryUse(rank=trace.rank, device=device, peak=peak, median=median))
    shares = tuple(sum_windows(windows[rank]) for rank in sorted(windows))
    findings = [rule(shares) for rule in RULES] if shares else []
    return TraceDiagnosis(
        findings=tuple(finding for finding in [*findings, check_memory_spike(memories)] if finding is not None),
        shares=shares,
        memory=tuple(memories),
        problems=tuple(missing),
    )
