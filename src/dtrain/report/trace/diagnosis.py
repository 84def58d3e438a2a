"""What stands out in the shares of all ranks: one small function for each rule.

``diagnose``: what stands out in the traces of a run, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

from dtrain.errors import ConfigError, DataError
from dtrain.report.trace.analysis import KernelBreakdown, kernel_breakdown, memory_timeline, peak_and_median, sum_windows
from dtrain.report.trace.trace_file import ProfilerTrace, find_traces, read_trace

DATA_WAIT = 0.10  # of a step
EXPOSED_COMMUNICATION = 0.20  # of a step, while nothing computes
HOST_BOUND = 0.20  # of a step, in which a GPU has nothing to do
STRAGGLER = 1.25  # times the work of the other ranks,
STRAGGLER_MARGIN = 0.05  # and so much of a step more than theirs
MEMORY_SPIKE = 2.0  # times what is held half of the time
MEMORY_SPIKE_MIN_BYTES = 64 * 2**20  # a peak below it is nobody's trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFinding:
    """Something that stands out: which rule says so, in words, and the numbers that it rests on."""

    rule: str
    text: str
    numbers: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemoryUse:
    """Of one device of one rank, in bytes: the most, and what is held half of the time."""

    rank: int
    device: str
    peak: int
    median: int


DiagnosisRule: TypeAlias = Callable[[Sequence[KernelBreakdown]], TraceFinding | None]


def check_data_wait(shares: Sequence[KernelBreakdown]) -> TraceFinding | None:
    """The loader is late: on some rank, more than a tenth of the step is spent waiting for it."""
    worst = max(shares, key=_data_wait_share)
    share = _data_wait_share(worst)
    if share <= DATA_WAIT:
        return None
    where = "between steps, where the loader is" if worst.data_from == "between" else "waiting for data"
    return TraceFinding(
        rule="check_data_wait",
        text=f"data wait: rank {worst.rank} spends {share:.0%} of a step {where} ({_format_ms(worst, worst.data)} of {_format_step(worst)}); "
        "more loader workers, or less to do in them",
        numbers={"rank": worst.rank, "share": share, "limit": DATA_WAIT, "seconds_per_step": worst.data / worst.steps},
    )


def check_communication(shares: Sequence[KernelBreakdown]) -> TraceFinding | None:
    """Collectives hold the step up: by what they take of the rank that waits least in them for the others."""
    if len(shares) == 1 and shares[0].communication == 0:
        return None
    least = min(shares, key=lambda share: share.exposed / share.seconds)
    share = least.exposed / least.seconds
    if share <= EXPOSED_COMMUNICATION:
        return None
    return TraceFinding(
        rule="communication",
        text=f"communication: {share:.0%} of a step is spent in collectives while nothing computes (rank {least.rank}, which "
        f"waits least: {_format_ms(least, least.exposed)} of {_format_step(least)}; in all {_format_ms(least, least.communication)}); "
        "larger batches on each rank, or fewer ranks that shard",
        numbers={
            "rank": least.rank,
            "share": share,
            "limit": EXPOSED_COMMUNICATION,
            "mean_share": mean(each.exposed / each.seconds for each in shares),
            "overlapped_share": (least.communication - least.exposed) / least.seconds,
        },
    )


def check_host_bound(shares: Sequence[KernelBreakdown]) -> TraceFinding | None:
    """GPUs have nothing to do, and it is not for want of data: the host does not launch fast enough."""
    on_device = [share for share in shares if share.on_device]
    if not on_device:
        return None
    worst = max(on_device, key=_idle_share)
    share = _idle_share(worst)
    if share <= HOST_BOUND:
        return None
    return TraceFinding(
        rule="check_host_bound",
        text=f"host-bound: the GPU of rank {worst.rank} has nothing to do for {share:.0%} of a step, data wait aside; compile, "
        "fuse small operations, or look for what makes the host wait",
        numbers={"rank": worst.rank, "share": share, "limit": HOST_BOUND, "idle_share": worst.idle / worst.seconds},
    )


def check_stragglers(shares: Sequence[KernelBreakdown]) -> TraceFinding | None:
    """One rank has more to do than the others, which wait for it: computing, copying, and waiting for its data."""
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
        f"({_own_seconds(slowest) * 1e3:.1f} ms against {others * 1e3:.1f} ms), which wait for it",
        numbers={"rank": slowest.rank, "times": times, "limit": STRAGGLER, "seconds": _own_seconds(slowest), "others": others},
    )


def check_memory_spike(memories: Sequence[DeviceMemoryUse]) -> TraceFinding | None:
    """At some moment a device holds far more than for most of the step: that moment decides what fits."""
    large = [
        memory
        for memory in memories
        if memory.peak >= MEMORY_SPIKE_MIN_BYTES and memory.peak > MEMORY_SPIKE * max(memory.median, 0)
    ]
    if not large:
        return None
    worst = max(large, key=lambda memory: memory.peak / max(memory.median, 1))
    return TraceFinding(
        rule="check_memory_spike",
        text=f"memory spike: {worst.device} of rank {worst.rank} holds {worst.peak / 2**20:,.0f} MiB at its peak, and half of "
        f"the time at most {worst.median / 2**20:,.0f} MiB; what is allocated then decides what fits",
        numbers={"rank": worst.rank, "peak_bytes": worst.peak, "median_bytes": worst.median, "limit": MEMORY_SPIKE},
    )


RULES: tuple[DiagnosisRule, ...] = (check_data_wait, check_communication, check_host_bound, check_stragglers)


def _data_wait_share(share: KernelBreakdown) -> float:
    """For data, as a share: of a GPU, no more than it had nothing to do, since the host may wait while it works."""
    return (min(share.data, share.idle) if share.on_device else share.data) / share.seconds


def _idle_share(share: KernelBreakdown) -> float:
    return max(0.0, share.idle / share.seconds - _data_wait_share(share))


def _own_seconds(share: KernelBreakdown) -> float:
    """Seconds of a step that are this rank's own work."""
    return (share.compute + share.copies + share.data) / share.steps


def _format_ms(share: KernelBreakdown, seconds: float) -> str:
    return f"{seconds / share.steps * 1e3:.1f} ms"


def _format_step(share: KernelBreakdown) -> str:
    return _format_ms(share, share.seconds)


NO_FINDINGS = "nothing stands out"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDiagnosis:
    """What stands out, and what it rests on. As text it is one line for each.

    Args:
        findings: what the rules say, the data first; empty if nothing stands out.
        shares: of each rank, over all its windows.
        memory: of each rank and device, where memory was recorded.
        problems: traces that could not be used.
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
        """Plain data: the fields by name, and ``text``."""
        return {**asdict(self), "text": str(self)}


def diagnose(folder: str | Path) -> TraceDiagnosis:
    """What stands out in the traces of ``profile`` in a folder, or that nothing does.

    The rules are in ``report.trace.rules``, each with its limit: a tenth of the step waiting for data, a fifth in collectives
    while nothing computes, a GPU without work for a fifth, a rank that works a quarter longer than the others, memory whose
    peak is twice what is held half of the time.

    Args:
        folder: where ``profile`` has written. Traces that cannot be read are in ``problems``.

    Raises:
        ConfigError: no trace in it.
    """
    files = find_traces(folder)
    if not files:
        raise ConfigError(f"verdict: {folder} has no trace-rank-*.pt.trace.json; was it profiled?")
    traces, problems = [], []
    for path in files:
        try:
            traces.append(read_trace(path))
        except (DataError, ConfigError) as error:
            problems.append(str(error))
    return diagnose_traces(traces, problems=problems)


def diagnose_traces(traces: Sequence[ProfilerTrace], *, problems: Sequence[str] = ()) -> TraceDiagnosis:
    """The verdict on traces. Pure.

    Args:
        traces: of any ranks, and of any number of windows of each.
        problems: what is known already to be missing.
    """
    windows: dict[int, list[KernelBreakdown]] = {}
    memories: list[DeviceMemoryUse] = []
    missing = list(problems)
    for trace in traces:
        share = kernel_breakdown(trace)
        if share.seconds > 0:
            windows.setdefault(trace.rank, []).append(share)
        else:
            missing.append(f"{trace.source}: nothing was recorded in it")
        for device, timeline in memory_timeline(trace).items():
            peak, median = peak_and_median(timeline)
            memories.append(DeviceMemoryUse(rank=trace.rank, device=device, peak=peak, median=median))
    shares = tuple(sum_windows(windows[rank]) for rank in sorted(windows))
    found = [rule(shares) for rule in RULES] if shares else []
    return TraceDiagnosis(
        findings=tuple(finding for finding in [*found, check_memory_spike(memories)] if finding is not None),
        shares=shares,
        memory=tuple(memories),
        problems=tuple(missing),
    )
