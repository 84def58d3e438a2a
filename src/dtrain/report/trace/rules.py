"""What stands out in the shares of all ranks: one small function for each rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import TypeAlias

from dtrain.report.trace.share import KernelShare

DATA_WAIT = 0.10  # of a step
COMMUNICATION = 0.20  # of a step, while nothing computes
HOST_BOUND = 0.20  # of a step, in which a GPU has nothing to do
STRAGGLER = 1.25  # times the work of the other ranks,
LOST = 0.05  # and so much of a step more than theirs
SPIKE = 2.0  # times what is held half of the time
SPIKE_BYTES = 64 * 2**20  # a peak below it is nobody's trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that stands out: which rule says so, in words, and the numbers that it rests on."""

    rule: str
    text: str
    numbers: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Of one device of one rank, in bytes: the most, and what is held half of the time."""

    rank: int
    device: str
    peak: int
    median: int


Rule: TypeAlias = Callable[[Sequence[KernelShare]], Finding | None]


def data_wait(shares: Sequence[KernelShare]) -> Finding | None:
    """The loader is late: on some rank, more than a tenth of the step is spent waiting for it."""
    worst = max(shares, key=_waited)
    share = _waited(worst)
    if share <= DATA_WAIT:
        return None
    where = "between steps, where the loader is" if worst.data_from == "between" else "waiting for data"
    return Finding(
        rule="data_wait",
        text=f"data wait: rank {worst.rank} spends {share:.0%} of a step {where} ({_ms(worst, worst.data)} of {_step(worst)}); "
        "more loader workers, or less to do in them",
        numbers={"rank": worst.rank, "share": share, "limit": DATA_WAIT, "seconds_per_step": worst.data / worst.steps},
    )


def communication(shares: Sequence[KernelShare]) -> Finding | None:
    """Collectives hold the step up: by what they take of the rank that waits least in them for the others."""
    if len(shares) == 1 and shares[0].communication == 0:
        return None
    least = min(shares, key=lambda share: share.exposed / share.seconds)
    share = least.exposed / least.seconds
    if share <= COMMUNICATION:
        return None
    return Finding(
        rule="communication",
        text=f"communication: {share:.0%} of a step is spent in collectives while nothing computes (rank {least.rank}, which "
        f"waits least: {_ms(least, least.exposed)} of {_step(least)}; in all {_ms(least, least.communication)}); "
        "larger batches on each rank, or fewer ranks that shard",
        numbers={
            "rank": least.rank,
            "share": share,
            "limit": COMMUNICATION,
            "mean_share": mean(each.exposed / each.seconds for each in shares),
            "overlapped_share": (least.communication - least.exposed) / least.seconds,
        },
    )


def host_bound(shares: Sequence[KernelShare]) -> Finding | None:
    """GPUs have nothing to do, and it is not for want of data: the host does not launch fast enough."""
    on_device = [share for share in shares if share.on_device]
    if not on_device:
        return None
    worst = max(on_device, key=_gaps)
    share = _gaps(worst)
    if share <= HOST_BOUND:
        return None
    return Finding(
        rule="host_bound",
        text=f"host-bound: the GPU of rank {worst.rank} has nothing to do for {share:.0%} of a step, data wait aside; compile, "
        "fuse small operations, or look for what makes the host wait",
        numbers={"rank": worst.rank, "share": share, "limit": HOST_BOUND, "idle_share": worst.idle / worst.seconds},
    )


def stragglers(shares: Sequence[KernelShare]) -> Finding | None:
    """One rank has more to do than the others, which wait for it: computing, copying, and waiting for its data."""
    if len(shares) < 2:
        return None
    slowest = max(shares, key=_own)
    others = median(_own(share) for share in shares if share is not slowest)
    times = _own(slowest) / others if others > 0 else 1.0
    if times <= STRAGGLER or _own(slowest) - others <= LOST * slowest.seconds / slowest.steps:
        return None
    return Finding(
        rule="stragglers",
        text=f"straggler: rank {slowest.rank} works {times:.2f} times as long in a step as the other ranks "
        f"({_own(slowest) * 1e3:.1f} ms against {others * 1e3:.1f} ms), which wait for it",
        numbers={"rank": slowest.rank, "times": times, "limit": STRAGGLER, "seconds": _own(slowest), "others": others},
    )


def memory_spike(memories: Sequence[Memory]) -> Finding | None:
    """At some moment a device holds far more than for most of the step: that moment decides what fits."""
    large = [memory for memory in memories if memory.peak >= SPIKE_BYTES and memory.peak > SPIKE * max(memory.median, 0)]
    if not large:
        return None
    worst = max(large, key=lambda memory: memory.peak / max(memory.median, 1))
    return Finding(
        rule="memory_spike",
        text=f"memory spike: {worst.device} of rank {worst.rank} holds {worst.peak / 2**20:,.0f} MiB at its peak, and half of "
        f"the time at most {worst.median / 2**20:,.0f} MiB; what is allocated then decides what fits",
        numbers={"rank": worst.rank, "peak_bytes": worst.peak, "median_bytes": worst.median, "limit": SPIKE},
    )


RULES: tuple[Rule, ...] = (data_wait, communication, host_bound, stragglers)


def _waited(share: KernelShare) -> float:
    """For data, as a share: of a GPU, no more than it had nothing to do, since the host may wait while it works."""
    return (min(share.data, share.idle) if share.on_device else share.data) / share.seconds


def _gaps(share: KernelShare) -> float:
    return max(0.0, share.idle / share.seconds - _waited(share))


def _own(share: KernelShare) -> float:
    """Seconds of a step that are this rank's own work."""
    return (share.compute + share.copies + share.data) / share.steps


def _ms(share: KernelShare, seconds: float) -> str:
    return f"{seconds / share.steps * 1e3:.1f} ms"


def _step(share: KernelShare) -> str:
    return _ms(share, share.seconds)
