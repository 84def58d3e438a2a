"""Ledgers of ranks put together: the attempts of a run in order of time, what they lost, and how they ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean as mean_of
from typing import Any

from dtrain.report.model import Attempt, How
from dtrain.report.reading.curve import Curve
from dtrain.report.reading.ledger import RankAttemptLines, RankLedger
from dtrain.report.reading.lines import Row

_SKEW_S = 5.0  # clocks of two hosts, and a file system's delays
_SILENT_S = 120.0  # a run writes at its next step after ten seconds; a long evaluation is one step
_ERROR = 500  # characters


@dataclass(slots=True, kw_only=True)
class Together:
    """One attempt of all ranks, in seconds since 1970.

    Args:
        number: which.
        ranks: what each wrote.
        begin: the start of the first process.
        end: the last line.
        down_s: since the end of the attempt before.
        first_step: steps that were done when it began.
        last_step: and when it ended.
        lost_from: the step from which later attempts did it again; ``last_step`` if they did not.
    """

    number: int
    ranks: dict[int, RankAttemptLines]
    begin: float = 0.0
    end: float = 0.0
    down_s: float = 0.0
    first_step: int = 0
    last_step: int = 0
    lost_from: int = 0

    def __post_init__(self) -> None:
        self.begin = min(lines.curve.at[0] for lines in self.ranks.values())
        self.end = max(lines.ended_at for lines in self.ranks.values())
        self.first_step = min(lines.first_step for lines in self.ranks.values())
        self.last_step = self.lost_from = max(lines.last_step for lines in self.ranks.values())

    @property
    def curve(self) -> Curve:
        """That of the lowest rank."""
        return self.ranks[min(self.ranks)].curve

    def reach(self, ends: Sequence[tuple[float, float]]) -> None:
        """Have all ranks that were killed reach to the end: the last line of any, or a record of metrics after that."""
        killed = [lines for lines in self.ranks.values() if lines.closed is None]
        for at, step in ends if killed else ():
            if at > self.end and step >= self.last_step:
                self.end, self.last_step = at, int(step)
        for lines in killed:
            lines.reach(self.end, self.last_step)

    def lost_since(self, lines: RankAttemptLines) -> float:
        """The moment from which on a rank's time was lost; its end if none was."""
        if self.lost_from >= self.last_step:
            return lines.ended_at
        return max(lines.curve.moment_of(self.lost_from), lines.opened_at)

    @property
    def lost_at(self) -> float:
        """The same for the lowest rank; the end if nothing was lost."""
        return self.end if self.lost_from >= self.last_step else self.lost_since(self.ranks[min(self.ranks)])


def together(ledgers: list[RankLedger], ends: Sequence[tuple[float, float]] = ()) -> tuple[list[Together], list[str]]:
    """The attempts of a run, in order, and what is odd about them.

    Args:
        ledgers: of the ranks.
        ends: moments and steps of the last records of metrics before the run went back: a rank that is killed has done steps
            that its last line does not tell of.

    Mutates: the ledgers: of ranks that were killed they reach to the end of their attempt, and where the clock was put back
        between two attempts, the later ones are moved to follow.
    """
    by_number: dict[int, dict[int, RankAttemptLines]] = {}
    for ledger in ledgers:
        for number, lines in ledger.attempts.items():
            if lines.curve.at:
                by_number.setdefault(number, {})[ledger.rank] = lines
    found = [Together(number=number, ranks=dict(sorted(ranks.items()))) for number, ranks in sorted(by_number.items())]
    mixed = sorted({number for ledger in ledgers for number in ledger.mixed})
    twice = sorted(each.number for each in found if any(lines.open_count > 1 for lines in each.ranks.values()))
    odd = []
    if mixed or twice:
        which = ", ".join(map(str, sorted({*mixed, *twice})))
        odd.append(f"several runs have written into this folder at once (attempt {which}): their numbers are mixed")
    back = max((lines.back_s for each in found for lines in each.ranks.values()), default=0.0)
    if back > _SKEW_S:
        odd.append(f"the clock was put back by {back:.0f} s during an attempt; times after that are counted on from before")
    in_order = not mixed and all(before.end <= each.begin for before, each in pairwise(found))
    for before, each in pairwise(found):
        if in_order:
            before.reach([end for end in ends if before.begin < end[0] < each.begin])
        gap = each.begin - before.end
        if gap < 0 and not mixed:
            if gap < -_SKEW_S:
                odd.append(f"the clock was put back by {-gap:.0f} s before attempt {each.number}, which is moved to follow")
            _move(each, -gap)
        each.down_s = max(0.0, gap)
    least: float = float("inf")
    for each in reversed(found):
        each.lost_from = int(max(each.first_step, min(each.last_step, least)))
        least = min(least, each.first_step)
    return found, odd


def _move(each: Together, by: float) -> None:
    for lines in each.ranks.values():
        lines.move(by)
    each.begin, each.end = each.begin + by, each.end + by


def as_model(found: list[Together], abouts: dict[int, Row], *, started_at: float, now: float) -> list[Attempt]:
    """The attempts as the report has them."""
    return [
        Attempt(
            number=each.number,
            at=each.begin - started_at,
            ended_at=each.end - started_at,
            how=how_ended(each, last=each is found[-1], now=now),
            error=_error(each),
            first_step=each.first_step,
            last_step=each.last_step,
            resumed_from=_resumed(each),
            world_size=world_size(each, abouts.get(each.number, {})),
            hosts=sorted({host_of(lines) for lines in each.ranks.values()} - {""}),
            setup_s=mean_of(lines.setup_s for lines in each.ranks.values()),
            lost_steps=each.last_step - each.lost_from,
            lost_s=mean_of(lines.ended_at - each.lost_since(lines) for lines in each.ranks.values()),
            down_s=each.down_s,
        )
        for each in found
    ]


def how_ended(each: Together, *, last: bool, now: float) -> How:
    """What the ranks said at the end; that they are still running, if the newest line is not old."""
    reasons = {lines.closed.get("reason") if lines.closed else None for lines in each.ranks.values()}
    if "failed" in reasons:
        return "failed"
    if None in reasons:
        at = each.curve.at
        longest = max((high - low for low, high in pairwise(at)), default=0.0)
        return "running" if last and now - each.end < max(_SILENT_S, 3 * longest) else "killed"
    return "stopped" if "stopped" in reasons else "done"


def _error(each: Together) -> str | None:
    failed = [
        (lines.ended_at, rank, str(lines.closed.get("error") or "no text"))
        for rank, lines in each.ranks.items()
        if lines.closed and lines.closed.get("reason") == "failed"
    ]
    if not failed:
        return None
    _, rank, text = min(failed)
    return f"rank {rank}: {' '.join(text.split())[:_ERROR]}"


def _resumed(each: Together) -> str | None:
    for lines in each.ranks.values():
        for event in lines.events:
            if event["name"] == "resumed" and isinstance(event.get("path"), str):
                return str(event["path"])[:_ERROR]
    return None


def world_size(each: Together, about: Row) -> int:
    """Ranks of an attempt: as its file says, at least as many as have written."""
    said: Any = about.get("world_size")
    seen = max(each.ranks) + 1
    return max(said, seen) if isinstance(said, int) and said < 10**7 else seen


def host_of(lines: RankAttemptLines) -> str:
    """Where a rank was; empty if nobody says."""
    return str(lines.opened.get("host", ""))[:200]
