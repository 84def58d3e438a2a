"""``kernel_share``: what the time of the steps in a trace went to."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from dtrain.report.trace.intervals import Stretches, length, union, within, without
from dtrain.report.trace.parsed import Event, Step, Trace, read_trace

TOP = 10
_KERNEL = re.compile(r"nccl|rccl", re.IGNORECASE)  # a kernel that communicates
_THREAD = ("gloo:", "mpi:", "ucc:")  # marks of a backend's own threads, for as long as a collective takes
_CALL = ("c10d::", "_c10d_functional::", "record_param_comms")  # operations that begin a collective, or wait for it
_LOADER = ("enumerate(DataLoader)", "data")
_UNNAMED = {"data", "other"}  # spans in which a loader may be that is not dtrain's


class Operation(NamedTuple):
    """An operation by name: its own seconds, without those of others inside it, and how often it ran."""

    name: str
    seconds: float
    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShare:
    """Seconds of one rank in the steps of a trace. Parts overlap, except for those that say otherwise.

    Args:
        rank: whose they are.
        steps: how many.
        seconds: of them together, wall time.
        on_device: whether operations are those of a GPU; else those of the host.
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
    top: tuple[Operation, ...] = ()


def kernel_share(trace: Trace | str | Path) -> KernelShare:
    """What the time of the recorded steps went to: compute, communication, copies, waiting for data, nothing; and the top ten.

    Of a GPU, kernels and copies count, those of NCCL (RCCL) as communication. On a CPU operations count, those of
    ``torch.distributed`` and the time of gloo's threads as communication.

    Args:
        trace: a file, or what ``read_trace`` made of it.

    Raises:
        ConfigError: there is no such file.
        DataError: it is damaged, or no trace.
    """
    trace = trace if isinstance(trace, Trace) else read_trace(trace)
    steps = union((step.start, step.end) for step in trace.steps)
    compute, communication, copies = (within(part, steps) for part in _parts(trace))
    data, data_from = _data(trace, steps)
    total = length(steps)
    return KernelShare(
        rank=trace.rank,
        steps=len(trace.steps),
        seconds=total / 1e6,
        on_device=trace.on_device,
        compute=length(compute) / 1e6,
        communication=length(communication) / 1e6,
        exposed=length(without(communication, compute)) / 1e6,
        copies=length(copies) / 1e6,
        data=data,
        data_from=data_from,
        idle=(total - length(union([*compute, *communication, *copies]))) / 1e6,
        top=_top(trace, steps),
    )


def added(shares: Sequence[KernelShare]) -> KernelShare:
    """The sum over windows of one rank."""
    summed = {
        each.name: sum(getattr(share, each.name) for share in shares)
        for each in fields(KernelShare)
        if each.name not in ("rank", "on_device", "data_from", "top")
    }
    operations: dict[str, tuple[float, int]] = {}
    for name, seconds, count in (operation for share in shares for operation in share.top):
        before = operations.get(name, (0.0, 0))
        operations[name] = (before[0] + seconds, before[1] + count)
    return replace(shares[0], **summed, top=_largest(operations))


def _parts(trace: Trace) -> tuple[Stretches, Stretches, Stretches]:
    """When it computes, communicates, and copies."""
    if trace.on_device:
        kernels = [event for event in trace.events if event.category == "kernel"]
        talks = [bool(_KERNEL.search(event.name)) for event in kernels]
        return (
            union((event.start, event.end) for event, talk in zip(kernels, talks, strict=True) if not talk),
            union((event.start, event.end) for event, talk in zip(kernels, talks, strict=True) if talk),
            union((event.start, event.end) for event in trace.events if event.category in ("gpu_memcpy", "gpu_memset")),
        )
    backend = [event for event in trace.events if event.category == "user_annotation" and event.name.startswith(_THREAD)]
    theirs = {(event.pid, event.tid) for event in backend}
    calls: dict[tuple[object, object], list[tuple[float, float]]] = defaultdict(list)
    works: dict[tuple[object, object], list[tuple[float, float]]] = defaultdict(list)
    for event in trace.events:
        if event.category == "cpu_op" and (event.pid, event.tid) not in theirs:
            (calls if event.name.startswith(_CALL) else works)[(event.pid, event.tid)].append((event.start, event.end))
    # An operation may have a collective inside it (the hooks of backward), and waits there.
    compute = union(part for thread, parts in works.items() for part in without(union(parts), union(calls[thread])))
    waits = [(event.start, event.end) for event in backend]
    return compute, union([*waits, *(part for parts in calls.values() for part in parts)]), []


def _data(trace: Trace, steps: Stretches) -> tuple[float, str]:
    """Seconds in which the loop waited for its loader, and how that is known."""
    by_span = sum(step.spans.get("data", 0.0) for step in trace.steps)
    if by_span > 0:
        return by_span, "spans"
    marks = union(
        (event.start, event.end)
        for event in trace.events
        if event.category in ("user_annotation", "cpu_op")
        and (event.name == _LOADER[1] or event.name.startswith(_LOADER[0]))
        and trace.thread in (None, (event.pid, event.tid))
    )
    if marks:
        return length(within(marks, steps)) / 1e6, "marks"
    if any(step.inside is not None for step in trace.steps):
        return sum(_between(step) for step in trace.steps), "between"
    return 0.0, "nothing"


def _between(step: Step) -> float:
    """Seconds outside of the step function, without what has a name: saving, evaluating, waiting where metrics are reduced."""
    if step.inside is None:
        return 0.0
    inside = step.inside / 1e6
    # Spans say how long, not where. All of the step function is in some named one, so what they have beyond it is the loop's.
    named = sum(seconds for name, seconds in step.spans.items() if name not in _UNNAMED)
    return max(0.0, (step.end - step.start) / 1e6 - inside - max(0.0, named - inside))


def _top(trace: Trace, steps: Stretches) -> tuple[Operation, ...]:
    """By their own time, of those that begin in a step; of one thread, an operation may hold others."""
    if not steps:
        return ()
    kind = ("kernel", "gpu_memcpy", "gpu_memset") if trace.on_device else ("cpu_op",)
    totals: dict[str, tuple[float, int]] = {}
    open_: dict[tuple[object, object], list[Event]] = defaultdict(list)
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
    return _largest(totals)


def _largest(totals: dict[str, tuple[float, int]]) -> tuple[Operation, ...]:
    ordered = sorted(totals.items(), key=lambda item: (-item[1][0], item[0]))
    return tuple(Operation(name, seconds, count) for name, (seconds, count) in ordered[:TOP])
