"""Diagnose the traces of a run: find bottlenecks with one small rule each, and describe them in words (``diagnose``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

from dtrain.errors import ConfigError, DataError
from dtrain.profiling.trace.analysis import KernelBreakdown, kernel_breakdown, memory_timeline, peak_and_median, sum_windows
from dtrain.profiling.trace.trace_file import ProfilerTrace, find_traces, read_trace

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
