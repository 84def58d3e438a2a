"""Ledgers of ranks put together: the attempts of a run in order of time, what they lost, and how they ended.

What happened in a run: checkpoints, and all other events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean as mean_of
from typing import Any

from dtrain.report.model import AttemptOutcome, AttemptReport, CheckpointReport, RunEvent
from dtrain.report.reading.cumulative_curve import CumulativeCurve
from dtrain.report.reading.jsonl_reader import Row
from dtrain.report.reading.rank_ledger import AttemptLedger, RankLedger

_SKEW_S = 5.0  # clocks of two hosts, and a file system's delays
_SILENT_S = 120.0  # a run writes at its next step after ten seconds; a long evaluation is one step
_MAX_ERROR_LENGTH = 500  # characters


@dataclass(slots=True, kw_only=True)
class MergedAttempt:
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
    ranks: dict[int, AttemptLedger]
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
    def curve(self) -> CumulativeCurve:
        """That of the lowest rank."""
        return self.ranks[min(self.ranks)].curve

    def extend_to(self, ends: Sequence[tuple[float, float]]) -> None:
        """Have all ranks that were killed reach to the end: the last line of any, or a record of metrics after that."""
        killed = [lines for lines in self.ranks.values() if lines.closed is None]
        for at, step in ends if killed else ():
            if at > self.end and step >= self.last_step:
                self.end, self.last_step = at, int(step)
        for lines in killed:
            lines.extend_to(self.end, self.last_step)

    def lost_since_on(self, lines: AttemptLedger) -> float:
        """The moment from which on a rank's time was lost; its end if none was."""
        if self.lost_from >= self.last_step:
            return lines.ended_at
        return max(lines.curve.time_of_step(self.lost_from), lines.opened_at)

    @property
    def lost_since(self) -> float:
        """The same for the lowest rank; the end if nothing was lost."""
        return self.end if self.lost_from >= self.last_step else self.lost_since_on(self.ranks[min(self.ranks)])


def merge_attempts(
    ledgers: list[RankLedger], ends: Sequence[tuple[float, float]] = ()
) -> tuple[list[MergedAttempt], list[str]]:
    """The attempts of a run, in order, and what is odd about them.

    Args:
        ledgers: of the ranks.
        ends: moments and steps of the last records of metrics before the run went back: a rank that is killed has done steps
            that its last line does not tell of.

    Mutates: the ledgers: of ranks that were killed they reach to the end of their attempt, and where the clock was put back
        between two attempts, the later ones are moved to follow.
    """
    by_number: dict[int, dict[int, AttemptLedger]] = {}
    for ledger in ledgers:
        for number, lines in ledger.attempts.items():
            if lines.curve.at:
                by_number.setdefault(number, {})[ledger.rank] = lines
    found = [MergedAttempt(number=number, ranks=dict(sorted(ranks.items()))) for number, ranks in sorted(by_number.items())]
    mixed = sorted({number for ledger in ledgers for number in ledger.interleaved})
    twice = sorted(each.number for each in found if any(lines.open_count > 1 for lines in each.ranks.values()))
    odd = []
    if mixed or twice:
        which = ", ".join(map(str, sorted({*mixed, *twice})))
        odd.append(f"several runs have written into this folder at once (attempt {which}): their numbers are mixed")
    back = max((lines.clock_back_s for each in found for lines in each.ranks.values()), default=0.0)
    if back > _SKEW_S:
        odd.append(f"the clock was put back by {back:.0f} s during an attempt; times after that are counted on from before")
    in_order = not mixed and all(before.end <= each.begin for before, each in pairwise(found))
    for before, each in pairwise(found):
        if in_order:
            before.extend_to([end for end in ends if before.begin < end[0] < each.begin])
        gap = each.begin - before.end
        if gap < 0 and not mixed:
            if gap < -_SKEW_S:
                odd.append(f"the clock was put back by {-gap:.0f} s before attempt {each.number}, which is moved to follow")
            _shift(each, -gap)
        each.down_s = max(0.0, gap)
    least: float = float("inf")
    for each in reversed(found):
        each.lost_from = int(max(each.first_step, min(each.last_step, least)))
        least = min(least, each.first_step)
    return found, odd


def _shift(each: MergedAttempt, by: float) -> None:
    for lines in each.ranks.values():
        lines.shift(by)
    each.begin, each.end = each.begin + by, each.end + by


def attempt_reports(
    found: list[MergedAttempt], abouts: dict[int, Row], *, started_at: float, now: float
) -> list[AttemptReport]:
    """The attempts as the report has them."""
    return [
        AttemptReport(
            number=each.number,
            at=each.begin - started_at,
            ended_at=each.end - started_at,
            how=attempt_outcome(each, last=each is found[-1], now=now),
            error=_first_error(each),
            first_step=each.first_step,
            last_step=each.last_step,
            resumed_from=_resumed_from(each),
            world_size=world_size(each, abouts.get(each.number, {})),
            hosts=sorted({host_of(lines) for lines in each.ranks.values()} - {""}),
            setup_s=mean_of(lines.setup_s for lines in each.ranks.values()),
            lost_steps=each.last_step - each.lost_from,
            lost_s=mean_of(lines.ended_at - each.lost_since_on(lines) for lines in each.ranks.values()),
            down_s=each.down_s,
        )
        for each in found
    ]


def attempt_outcome(each: MergedAttempt, *, last: bool, now: float) -> AttemptOutcome:
    """What the ranks said at the end; that they are still running, if the newest line is not old."""
    reasons = {lines.closed.get("reason") if lines.closed else None for lines in each.ranks.values()}
    if "failed" in reasons:
        return "failed"
    if None in reasons:
        at = each.curve.at
        longest = max((high - low for low, high in pairwise(at)), default=0.0)
        return "running" if last and now - each.end < max(_SILENT_S, 3 * longest) else "killed"
    return "stopped" if "stopped" in reasons else "done"


def _first_error(each: MergedAttempt) -> str | None:
    failed = [
        (lines.ended_at, rank, str(lines.closed.get("error") or "no text"))
        for rank, lines in each.ranks.items()
        if lines.closed and lines.closed.get("reason") == "failed"
    ]
    if not failed:
        return None
    _, rank, text = min(failed)
    return f"rank {rank}: {' '.join(text.split())[:_MAX_ERROR_LENGTH]}"


def _resumed_from(each: MergedAttempt) -> str | None:
    for lines in each.ranks.values():
        for event in lines.events:
            if event["name"] == "resumed" and isinstance(event.get("path"), str):
                return str(event["path"])[:_MAX_ERROR_LENGTH]
    return None


def world_size(each: MergedAttempt, about: Row) -> int:
    """Ranks of an attempt: as its file says, at least as many as have written."""
    said: Any = about.get("world_size")
    seen = max(each.ranks) + 1
    return max(said, seen) if isinstance(said, int) and said < 10**7 else seen


def host_of(lines: AttemptLedger) -> str:
    """Where a rank was; empty if nobody says."""
    return str(lines.opened.get("host", ""))[:200]


MAX_CHECKPOINTS, MAX_EVENTS = 1000, 1000
ALL_RANK_EVENTS = {"save", "committed", "resumed", "evaluated", "stop", "desync", "early_stop"}  # each rank tells of the same
_STANDARD_KEYS = {"kind", "attempt", "at", "name", "step"}
_MAX_TEXT, _MAX_FIELDS, _MAX_DEPTH = 500, 20, 3


def checkpoint_reports(found: Sequence[MergedAttempt], *, started_at: float) -> tuple[list[CheckpointReport], int]:
    """The checkpoints in order of time, and how many there were."""
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for each, _, event in _iter_events(found):
        step = _event_step(event)
        if event["name"] not in ("save", "committed") or step is None:
            continue
        row = rows.setdefault((each.number, step), {})
        if event["name"] == "save":
            row["at"] = max(row.get("at", 0.0), event["at"])
            row["held_s"] = max(row.get("held_s", 0.0), _to_amount(event.get("held_s")) or 0.0)
        else:
            row.setdefault("at", event["at"])
            row["duration_s"], row["bytes"] = _to_amount(event.get("seconds")), _to_amount(event.get("bytes"))
    all_of_them = [
        CheckpointReport(
            step=step,
            attempt=attempt,
            at=row["at"] - started_at,
            held_s=row.get("held_s"),
            duration_s=row.get("duration_s"),
            bytes=None if row.get("bytes") is None else int(row["bytes"]),
        )
        for (attempt, step), row in rows.items()
    ]
    longest = sorted(all_of_them, key=lambda each: -(each.held_s or 0.0))[:MAX_CHECKPOINTS]
    return sorted(longest, key=lambda each: each.at), len(all_of_them)


def run_events(found: Sequence[MergedAttempt], *, started_at: float) -> tuple[list[RunEvent], dict[str, int]]:
    """Events in order of time, of a name with many the first and the last; and how many there were of each name."""
    told: set[tuple[int, str, Any]] = set()
    by_name: dict[str, list[RunEvent]] = {}
    for each, rank, event in _iter_events(found):
        name, step = event["name"][:_MAX_TEXT], _event_step(event)
        if name in ALL_RANK_EVENTS:
            key = (each.number, name, step)
            if key in told:
                continue
            told.add(key)
        by_name.setdefault(name, []).append(
            RunEvent(
                at=event["at"] - started_at,
                name=name,
                attempt=each.number,
                rank=rank,
                step=step,
                fields={
                    key[:_MAX_TEXT]: trim_data(value)
                    for key, value in list(event.items())[: _MAX_FIELDS + 5]
                    if key not in _STANDARD_KEYS
                },
            )
        )
    kept: list[RunEvent] = []
    half = max(1, MAX_EVENTS // max(1, 2 * len(by_name)))
    for several in by_name.values():
        several.sort(key=lambda event: event.at)
        kept += several if len(several) <= 2 * half else several[:half] + several[-half:]
    counts = dict(Counter({name: len(several) for name, several in by_name.items()}).most_common(MAX_EVENTS))
    return sorted(kept, key=lambda event: event.at)[:MAX_EVENTS], counts


def _iter_events(found: Sequence[MergedAttempt]) -> Iterator[tuple[MergedAttempt, int, Row]]:
    for each in found:
        for rank, lines in each.ranks.items():
            for event in lines.events:
                yield each, rank, event


def _event_step(event: Row) -> int | None:
    step = event.get("step")
    return step if isinstance(step, int) and 0 <= step < 10**15 else None


def _to_amount(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e18 else None


def trim_data(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Plain data of bounded size: a report shows it, and nobody reads a megabyte of it."""
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT else value[: _MAX_TEXT - 1] + "…"
    if isinstance(value, int) and abs(value) > 1e300:  # no float is so large
        return trim_data(str(value))
    if isinstance(value, dict | list) and not depth:
        return "…"
    if isinstance(value, dict):
        return {str(key)[:_MAX_TEXT]: trim_data(each, depth - 1) for key, each in list(value.items())[: 10 * _MAX_FIELDS]}
    if isinstance(value, list):
        return [trim_data(each, depth - 1) for each in value[: 10 * _MAX_FIELDS]]
    return value
