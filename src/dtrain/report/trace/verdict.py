"""``verdict``: what stands out in the traces of a run, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtrain.errors import ConfigError, DataError
from dtrain.report.trace.parsed import Trace, read_trace, trace_files
from dtrain.report.trace.rules import RULES, Finding, Memory, memory_spike
from dtrain.report.trace.share import KernelShare, added, kernel_share
from dtrain.report.trace.timeline import memory_timeline, peak_and_median

NOTHING = "nothing stands out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What stands out, and what it rests on. As text it is one line for each.

    Args:
        findings: what the rules say, the data first; empty if nothing stands out.
        shares: of each rank, over all its windows.
        memory: of each rank and device, where memory was recorded.
        problems: traces that could not be used.
    """

    findings: tuple[Finding, ...]
    shares: tuple[KernelShare, ...]
    memory: tuple[Memory, ...]
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(
            [*(finding.text for finding in self.findings), *self.problems] if self.findings or self.problems else [NOTHING]
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data: the fields by name, and ``text``."""
        return {**asdict(self), "text": str(self)}


def verdict(folder: str | Path) -> Verdict:
    """What stands out in the traces of ``profile`` in a folder, or that nothing does.

    The rules are in ``report.trace.rules``, each with its limit: a tenth of the step waiting for data, a fifth in collectives
    while nothing computes, a GPU without work for a fifth, a rank that works a quarter longer than the others, memory whose
    peak is twice what is held half of the time.

    Args:
        folder: where ``profile`` has written. Traces that cannot be read are in ``problems``.

    Raises:
        ConfigError: no trace in it.
    """
    files = trace_files(folder)
    if not files:
        raise ConfigError(f"verdict: {folder} has no trace-rank-*.pt.trace.json; was it profiled?")
    traces, problems = [], []
    for path in files:
        try:
            traces.append(read_trace(path))
        except (DataError, ConfigError) as error:
            problems.append(str(error))
    return judge(traces, problems=problems)


def judge(traces: Sequence[Trace], *, problems: Sequence[str] = ()) -> Verdict:
    """The verdict on traces. Pure.

    Args:
        traces: of any ranks, and of any number of windows of each.
        problems: what is known already to be missing.
    """
    windows: dict[int, list[KernelShare]] = {}
    memories: list[Memory] = []
    missing = list(problems)
    for trace in traces:
        share = kernel_share(trace)
        if share.seconds > 0:
            windows.setdefault(trace.rank, []).append(share)
        else:
            missing.append(f"{trace.source}: nothing was recorded in it")
        for device, timeline in memory_timeline(trace).items():
            peak, median = peak_and_median(timeline)
            memories.append(Memory(rank=trace.rank, device=device, peak=peak, median=median))
    shares = tuple(added(windows[rank]) for rank in sorted(windows))
    found = [rule(shares) for rule in RULES] if shares else []
    return Verdict(
        findings=tuple(finding for finding in [*found, memory_spike(memories)] if finding is not None),
        shares=shares,
        memory=tuple(memories),
        problems=tuple(missing),
    )
