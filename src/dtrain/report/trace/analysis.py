"""Stretches of time, as sorted lists of (start, end) that do not touch.

``kernel_breakdown``: what the time of the steps in a trace went to.

``memory_timeline``: what allocations add up to, over the steps of a trace."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeAlias

from dtrain import storage
from dtrain.report.trace.trace_file import ProfilerTrace, TraceEvent, TraceStep, read_trace

Intervals: TypeAlias = list[tuple[float, float]]


def union(parts: Iterable[tuple[float, float]]) -> Intervals:
    """All time that is in one of ``parts`` at least.

    >>> union([(5, 6), (0, 2), (1, 3), (4, 4)])
    [(0, 3), (5, 6)]
    """
    found: Intervals = []
    for start, end in sorted(part for part in parts if part[1] > part[0]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def subtract(these: Intervals, those: Intervals) -> Intervals:
    """What is in ``these`` and not in ``those``; both as ``union`` returns them.

    >>> without([(0, 10)], [(2, 3), (9, 12)])
    [(0, 2), (3, 9)]
    """
    found: Intervals = []
    at = 0
    for start, end in these:
        while at < len(those) and those[at][1] <= start:
            at += 1
        here = at
        while here < len(those) and those[here][0] < end:
            if those[here][0] > start:
                found.append((start, those[here][0]))
            start = max(start, those[here][1])
            here += 1
        if start < end:
            found.append((start, end))
    return found


def intersect(these: Intervals, those: Intervals) -> Intervals:
    """What is in both.

    >>> within([(0, 10)], [(2, 3), (9, 12)])
    [(2, 3), (9, 10)]
    """
    return subtract(these, subtract(these, those))


def total_length(these: Intervals) -> float:
    """How long they are together."""
    return sum(end - start for start, end in these)


TOP_OPERATIONS = 10
_COMMUNICATION_KERNEL = re.compile(r"nccl|rccl", re.IGNORECASE)  # a kernel that communicates
_BACKEND_MARKS = ("gloo:", "mpi:", "ucc:")  # marks of a backend's own threads, for as long as a collective takes
_COLLECTIVE_PREFIXES = (
    "c10d::",
    "_c10d_functional::",
    "record_param_comms",
)  # operations that begin a collective, or wait for it
_LOADER_MARKS = ("enumerate(DataLoader)", "data")
_UNNAMED_SPANS = {"data", "other"}  # spans in which a loader may be that is not dtrain's


class OperationTime(NamedTuple):
    """An operation by name: its own seconds, without those of others inside it, and how often it ran."""

    name: str
    seconds: float
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBreakdown:
    """Seconds of one rank in the steps of a trace. Parts overlap, except for those that say otherwise.

    Args:
        rank: whose they are.
        steps: how many.
        seconds: of them together, wall time.
        to_device_async: whether operations are those of a GPU; else those of the host.
        compute: with an operation that computes.
        communication: with a collective, waiting for other ranks included.
        exposed: of ``communication``, those in which nothing computes.
        copies: of a GPU, with a copy between it and the host, or within it.
        data: the loop waited for the loader. What spans say, else marks in the trace; else the time between steps.
        data_from: which of these: ``spans``, ``marks``, ``between`` or ``nothing``.
        idle: with none of these operations on the device; on a CPU, with none at all, ``data`` and Python's own time included.
        top: the ten operations with the most time of their own.
    """

    rank: int
    steps: int
    seconds: float
    on_device: bool
    compute: float
    communication: float
    exposed: float
    copies: float
    data: float
    data_from: str
    idle: float
    top: tuple[OperationTime, ...] = ()


def kernel_breakdown(trace: ProfilerTrace | str | Path) -> KernelBreakdown:
    """What the time of the recorded steps went to: compute, communication, copies, waiting for data, nothing; and the top ten.

    Of a GPU, kernels and copies count, those of NCCL (RCCL) as communication. On a CPU operations count, those of
    ``torch.distributed`` and the time of gloo's threads as communication.

    Args:
        trace: a file, or what ``read_trace`` made of it.

    Raises:
        ConfigError: there is no such file.
        DataError: it is damaged, or no trace.
    """
    trace = trace if isinstance(trace, ProfilerTrace) else read_trace(trace)
    steps = union((step.start, step.end) for step in trace.steps)
    compute, communication, copies = (intersect(part, steps) for part in _activity_intervals(trace))
    data, data_from = _data_wait(trace, steps)
    total = total_length(steps)
    return KernelBreakdown(
        rank=trace.rank,
        steps=len(trace.steps),
        seconds=total / 1e6,
        on_device=trace.on_device,
        compute=total_length(compute) / 1e6,
        communication=total_length(communication) / 1e6,
        exposed=total_length(subtract(communication, compute)) / 1e6,
        copies=total_length(copies) / 1e6,
        data=data,
        data_from=data_from,
        idle=(total - total_length(union([*compute, *communication, *copies]))) / 1e6,
        top=_top_operations(trace, steps),
    )


def sum_windows(shares: Sequence[KernelBreakdown]) -> KernelBreakdown:
    """The sum over windows of one rank."""
    summed = {
        each.name: sum(getattr(share, each.name) for share in shares)
        for each in fields(KernelBreakdown)
        if each.name not in ("rank", "to_device_async", "data_from", "top")
    }
    operations: dict[str, tuple[float, int]] = {}
    for name, seconds, count in (operation for share in shares for operation in share.top):
        before = operations.get(name, (0.0, 0))
        operations[name] = (before[0] + seconds, before[1] + count)
    return replace(shares[0], **summed, top=_largest_operations(operations))


def _activity_intervals(trace: ProfilerTrace) -> tuple[Intervals, Intervals, Intervals]:
    """When it computes, communicates, and copies."""
    if trace.on_device:
        kernels = [event for event in trace.events if event.category == "kernel"]
        talks = [bool(_COMMUNICATION_KERNEL.search(event.name)) for event in kernels]
        return (
            union((event.start, event.end) for event, talk in zip(kernels, talks, strict=True) if not talk),
            union((event.start, event.end) for event, talk in zip(kernels, talks, strict=True) if talk),
            union((event.start, event.end) for event in trace.events if event.category in ("gpu_memcpy", "gpu_memset")),
        )
    backend = [event for event in trace.events if event.category == "user_annotation" and event.name.startswith(_BACKEND_MARKS)]
    theirs = {(event.pid, event.tid) for event in backend}
    calls: dict[tuple[object, object], list[tuple[float, float]]] = defaultdict(list)
    works: dict[tuple[object, object], list[tuple[float, float]]] = defaultdict(list)
    for event in trace.events:
        if event.category == "cpu_op" and (event.pid, event.tid) not in theirs:
            (calls if event.name.startswith(_COLLECTIVE_PREFIXES) else works)[(event.pid, event.tid)].append(
                (event.start, event.end)
            )
    # An operation may have a collective inside it (the hooks of backward), and waits there.
    compute = union(part for thread, parts in works.items() for part in subtract(union(parts), union(calls[thread])))
    waits = [(event.start, event.end) for event in backend]
    return compute, union([*waits, *(part for parts in calls.values() for part in parts)]), []


def _data_wait(trace: ProfilerTrace, steps: Intervals) -> tuple[float, str]:
    """Seconds in which the loop waited for its loader, and how that is known."""
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
    """Seconds outside of the step function, without what has a name: saving, evaluating, waiting where metrics are reduced."""
    if step.step_fn_us is None:
        return 0.0
    inside = step.step_fn_us / 1e6
    # Spans say how long, not where. All of the step function is in some named one, so what they have beyond it is the loop's.
    named = sum(seconds for name, seconds in step.spans.items() if name not in _UNNAMED_SPANS)
    return max(0.0, (step.end - step.start) / 1e6 - inside - max(0.0, named - inside))


def _top_operations(trace: ProfilerTrace, steps: Intervals) -> tuple[OperationTime, ...]:
    """By their own time, of those that begin in a step; of one thread, an operation may hold others."""
    if not steps:
        return ()
    kind = ("kernel", "gpu_memcpy", "gpu_memset") if trace.on_device else ("cpu_op",)
    totals: dict[str, tuple[float, int]] = {}
    open_: dict[tuple[object, object], list[TraceEvent]] = defaultdict(list)
    for event in trace.events:
        if event.category not in kind or not steps[0][0] <= event.start < steps[-1][1]:
            continue
        stack = open_[(event.pid, event.tid)]
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
    """What a device's allocator held from a time on: seconds after the first step began, and bytes."""

    at: float
    bytes: int


def memory_timeline(trace: ProfilerTrace | str | Path, path: str | Path | None = None) -> dict[str, list[MemorySample]]:
    """What is held after each allocation, by device (``"cpu"``, ``"cuda:0"``); empty without ``profile(memory=True)``.

    On CUDA that is all of the caching allocator. On a CPU torch counts from the beginning of the recording: parameters made
    before are not in it, and what was there before and is freed may bring it below zero.

    Args:
        trace: a file, or what ``read_trace`` made of it.
        path: a file for it, replaced if it is there: ``{"rank": ..., "devices": {"cpu": [[seconds, bytes], ...]}}``.

    Raises:
        ConfigError: there is no such trace.
        DataError: it is damaged, or no trace.
    """
    trace = trace if isinstance(trace, ProfilerTrace) else read_trace(trace)
    begin = trace.steps[0].start if trace.steps else (trace.allocations[0].at if trace.allocations else 0.0)
    found: dict[str, list[MemorySample]] = {}
    for each in trace.allocations:
        found.setdefault(each.device, []).append(MemorySample((each.at - begin) / 1e6, each.bytes))
    if path is not None:
        storage.replace_file(storage.resolve_path(path), json.dumps({"rank": trace.rank, "devices": found}).encode())
    return found


def peak_and_median(timeline: list[MemorySample]) -> tuple[int, int]:
    """The most bytes, and those that half of the time no more than were held.

    >>> peak_and_median([Held(0.0, 10), Held(1.0, 50), Held(1.5, 20), Held(3.0, 0)])
    (50, 20)
    """
    times = sorted((now.bytes, later.at - now.at) for now, later in pairwise(timeline))
    peak = max((held.bytes for held in timeline), default=0)
    left = sum(seconds for _, seconds in times) / 2
    for held, seconds in times:
        left -= seconds
        if left <= 0:
            return peak, held
    return peak, peak
