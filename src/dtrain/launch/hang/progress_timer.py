"""Detect a hang with a timer that every progress report restarts. No side effects: the time is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dtrain.heartbeats import ProgressKind, ProgressRecord

BlockPhase = Literal["open", "leaving", "closed"]
"""Phase of a rank in ``init_dist``'s block. A rank that is ``leaving`` waits for the other ranks at the end of the block."""

_PHASES: Mapping[ProgressKind, BlockPhase] = {
    ProgressKind.OPENED: "open",
    ProgressKind.LEAVING: "leaving",
    ProgressKind.CLOSED: "closed",
}
# A supervisor that wakes up so many seconds late was suspended itself, perhaps together with its ranks.
_SUSPENDED_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """Last progress of a rank since the start of ``init_dist``'s block. ``at`` is a time of the host's monotonic clock."""

    phase: BlockPhase
    at: float
    passed: int = 0
    doing: str = ""


class ProgressTimer:
    """Progress timer for the ranks of one node, for one attempt.

    A job hangs when *no* rank has made progress for ``timeout_s`` and at least one rank is in ``init_dist``'s block. A rank
    that stops soon stops the other ranks, which wait for it. While one rank makes progress, the other ranks may wait for good
    reason: one rank may save a checkpoint alone. After the block, a rank must exit once another rank has exited.

    Args:
        timeout_s: seconds, > 0; None never reports a hang and only records progress.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._progress: dict[int, RankProgress] = {}
        # Time at which each exit was seen first.
        self._exited_at: dict[int, float] = {}
        # The timer does not start before this time.
        self._not_before = 0.0

    @property
    def progress(self) -> Mapping[int, RankProgress]:
        """Last progress by rank."""
        return dict(self._progress)

    def record(self, report: ProgressRecord) -> None:
        """Record a progress report of a rank. Mutates: this timer."""
        last = self._progress.get(report.rank)
        if report.kind in _PHASES:
            passed, doing = (last.passed, last.doing) if last is not None and report.kind != ProgressKind.OPENED else (0, "")
            self._progress[report.rank] = RankProgress(phase=_PHASES[report.kind], at=report.at, passed=passed, doing=doing)
        elif report.kind == ProgressKind.PROGRESS and last is not None:
            self._progress[report.rank] = replace(last, at=report.at, passed=report.value, doing=report.activity)

    def record_exit(self, rank: int, now: float) -> None:
        """Record that the process of ``rank`` exited by ``now``. Mutates: this timer."""
        self._exited_at.setdefault(rank, now)

    def deadline(self) -> float | None:
        """Return the time at which the job hangs if no further progress is reported.

        None without a timeout, and while every rank is outside of ``init_dist``'s block. The deadline still applies outside of
        the block if one rank exited and another rank runs on.
        """
        phases = [progress.phase for rank, progress in self._progress.items() if rank not in self._exited_at]
        if self.timeout_s is None or not phases:
            return None
        times = [self._not_before, *(progress.at for progress in self._progress.values())]
        if all(phase == "closed" for phase in phases):
            if not self._exited_at:
                return None
            times += self._exited_at.values()
        return max(times) + self.timeout_s

    def is_hung(self, now: float) -> bool:
        """Return True if the job hangs. Record all progress reports before the call.

        Mutates: this timer, if the call is much later than ``deadline``. The supervisor was then suspended (a frozen container,
        a paused machine), so the timeout starts again.
        """
        deadline = self.deadline()
        if deadline is None or self.timeout_s is None or now < deadline:
            return False
        if now > deadline + max(_SUSPENDED_S, self.timeout_s / 2):
            self._not_before = now
            return False
        return True
