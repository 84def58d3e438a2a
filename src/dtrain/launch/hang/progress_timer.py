"""When a job hangs: a clock that every report of progress starts again. Pure: time comes as an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dtrain.heartbeats import ProgressKind, ProgressRecord

BlockPhase = Literal["open", "leaving", "closed"]
"""Where a rank is in ``init_dist``'s block; at its end it waits for the others, leaving."""

_PHASES: Mapping[ProgressKind, BlockPhase] = {
    ProgressKind.OPENED: "open",
    ProgressKind.LEAVING: "leaving",
    ProgressKind.CLOSED: "closed",
}
_SUSPENDED_S = 5.0  # a supervisor that wakes up so much too late was stopped itself, and its ranks perhaps with it


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """The last that was heard of a rank which has come to ``init_dist``'s block. ``at`` is of the host's monotonic clock."""

    phase: BlockPhase
    at: float
    passed: int = 0
    doing: str = ""


class ProgressTimer:
    """The clock of one node's ranks, from one start of them to its end.

    A job hangs when *no* rank has made progress for ``timeout_s``, and one of them is in ``init_dist``'s block. One rank that
    stops soon stops the others, which wait for it. As long as one goes on, the others may be right to wait: it may save alone.
    After the block, a rank is expected to end once another rank has ended.

    Args:
        timeout_s: seconds, > 0; None: it never counts as hung, and what is heard is only remembered.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._progress: dict[int, RankProgress] = {}
        self._exited_at: dict[int, float] = {}  # when that was seen first
        self._not_before = 0.0  # the clock does not start before this

    @property
    def progress(self) -> Mapping[int, RankProgress]:
        """What was heard last, by rank."""
        return dict(self._progress)

    def record(self, pulse: ProgressRecord) -> None:
        """Take note of what a rank reports. Mutates: this watch."""
        last = self._progress.get(pulse.rank)
        if pulse.kind in _PHASES:
            passed, doing = (last.passed, last.doing) if last is not None and pulse.kind != ProgressKind.OPENED else (0, "")
            self._progress[pulse.rank] = RankProgress(phase=_PHASES[pulse.kind], at=pulse.at, passed=passed, doing=doing)
        elif pulse.kind == ProgressKind.PROGRESS and last is not None:
            self._progress[pulse.rank] = replace(last, at=pulse.at, passed=pulse.value, doing=pulse.activity)

    def record_exit(self, rank: int, now: float) -> None:
        """Note that the process of ``rank`` has ended by ``now``: nothing more is expected of it. Mutates: this watch."""
        self._exited_at.setdefault(rank, now)

    def deadline(self) -> float | None:
        """Return when the job hangs if nothing more is heard.

        None without a time-out, and while every rank is outside of ``init_dist``'s block, unless a rank has ended and another,
        which has left the block, runs on.
        """
        here = [seen.phase for rank, seen in self._progress.items() if rank not in self._exited_at]
        if self.timeout_s is None or not here:
            return None
        heard = [self._not_before, *(seen.at for seen in self._progress.values())]
        if all(phase == "closed" for phase in here):
            if not self._exited_at:
                return None
            heard += self._exited_at.values()
        return max(heard) + self.timeout_s

    def is_hung(self, now: float) -> bool:
        """Whether the job hangs. Feed all that the ranks have reported before asking.

        Mutates: this watch, when the caller comes much later than ``deadline`` said: it was stopped itself (a frozen container,
        a paused machine), so the ranks get their time once more.
        """
        deadline = self.deadline()
        if deadline is None or self.timeout_s is None or now < deadline:
            return False
        if now > deadline + max(_SUSPENDED_S, self.timeout_s / 2):
            self._not_before = now
            return False
        return True
