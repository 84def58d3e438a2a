"""Merge the ledgers of ranks into attempts, with lost time and outcome, and collect checkpoints and events."""

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

# difference between clocks of two hosts, and delays of a file system
_SKEW_S = 5.0
# A run writes at the first step after ten seconds, but a long evaluation is one step.
_SILENT_S = 120.0
# characters
_MAX_ERROR_LENGTH = 500


@dataclass(slots=True, kw_only=True)
class MergedAttempt:
    """Attempt of all ranks, in seconds since 1970.

    Args:
        number: number of the attempt.
        ranks: ledger of each rank.
        begin: start of the first process.
        end: time of the last line.
        down_s: time since the end of the previous attempt.
        first_step: number of completed steps at the start.
        last_step: number of completed steps at the end.
        lost_from: first step repeated by a later attempt; ``last_step`` if no step was repeated.
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
        """Curve of the lowest rank."""
        return self.ranks[min(self.ranks)].curve

    def extend_to(self, ends: Sequence[tuple[float, float]]) -> None:
        """Extend killed ranks to the end of the attempt: the last line of any rank, or a later metric record."""
        killed = [lines for lines in self.ranks.values() if lines.closed is None]
        for at, step in ends if killed else ():
            if at > self.end and step >= self.last_step:
                self.end, self.last_step = at, int(step)
        for lines in killed:
            lines.extend_to(self.end, self.last_step)

    def lost_since_on(self, lines: AttemptLedger) -> float:
        """Return the time from which a rank's work was lost; its end if nothing was lost."""
        if self.lost_from >= self.last_step:
            return lines.ended_at
        return max(lines.curve.time_of_step(self.lost_from), lines.opened_at)

    @property
    def lost_since(self) -> float:
        """Time from which the work of the lowest rank was lost; the end if nothing was lost."""
        return self.end if self.lost_from >= self.last_step else self.lost_since_on(self.ranks[min(self.ranks)])


def merge_attempts(
    ledgers: list[RankLedger], ends: Sequence[tuple[float, float]] = ()
) -> tuple[list[MergedAttempt], list[str]]:
    """Merge ledgers into the attempts of a run, in order, with a list of anomalies.

    Args:
        ledgers: ledgers of the ranks.
        ends: times and steps of the last metric records before each restart: a killed rank has completed steps after its last
            line.

    Mutates: the ledgers: killed ranks are extended to the end of their attempt, and attempts after a clock step are shifted.
    """
    by_number: dict[int, dict[int, AttemptLedger]] = {}
    for ledger in ledgers:
        for number, lines in ledger.attempts.items():
            if lines.curve.at:
                by_number.setdefault(number, {})[ledger.rank] = lines
    attempts = [MergedAttempt(number=number, ranks=dict(sorted(ranks.items()))) for number, ranks in sorted(by_number.items())]
    mixed = sorted({number for ledger in ledgers for number in ledger.interleaved})
    twice = sorted(each.number for each in attempts if any(lines.open_count > 1 for lines in each.ranks.values()))
    anomalies = []
    if mixed or twice:
        numbers = ", ".join(map(str, sorted({*mixed, *twice})))
        anomalies.append(f"several runs have written into this folder at once (attempt {numbers}): their numbers are mixed")
    back = max((lines.clock_back_s for each in attempts for lines in each.ranks.values()), default=0.0)
    if back > _SKEW_S:
        anomalies.append(
            f"the clock was put back by {back:.0f} s during an attempt; times after that are counted on from before"
        )
    in_order = not mixed and all(before.end <= each.begin for before, each in pairwise(attempts))
    for before, each in pairwise(attempts):
        if in_order:
            before.extend_to([end for end in ends if before.begin < end[0] < each.begin])
        gap = each.begin - before.end
        if gap < 0 and not mixed:
            if gap < -_SKEW_S:
                anomalies.append(
                    f"the clock was put back by {-gap:.0f} s before attempt {each.number}, which is moved to follow"
                )
            _shift(each, -gap)
        each.down_s = max(0.0, gap)
    lowest: float = float("inf")
    for each in reversed(attempts):
        each.lost_from = int(max(each.first_step, min(each.last_step, lowest)))
        lowest = min(lowest, each.first_step)
    return attempts, anomalies


def _shift(each: MergedAttempt, by: float) -> None:
    for lines in each.ranks.values():
        lines.shift(by)
    each.begin, each.end = each.begin + by, each.end + by


def attempt_reports(
    merged: list[MergedAttempt], abouts: dict[int, Row], *, started_at: float, now: float
) -> list[AttemptReport]:
    """Convert merged attempts to the report model."""
    return [
        AttemptReport(
            number=each.number,
            at=each.begin - started_at,
            ended_at=each.end - started_at,
            how=attempt_outcome(each, last=each is merged[-1], now=now),
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
        for each in merged
    ]


def attempt_outcome(each: MergedAttempt, *, last: bool, now: float) -> AttemptOutcome:
    """Return the outcome reported by the ranks; "running" if an attempt without end has a recent line."""
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
    """Return the number of ranks of an attempt: from the attempt's file, and at least the number of ledgers."""
    recorded: Any = about.get("world_size")
    seen = max(each.ranks) + 1
    return max(recorded, seen) if isinstance(recorded, int) and recorded < 10**7 else seen


def host_of(lines: AttemptLedger) -> str:
    """Return the host of a rank; empty if unknown."""
    return str(lines.opened.get("host", ""))[:200]


MAX_CHECKPOINTS, MAX_EVENTS = 1000, 1000
# events that every rank records
ALL_RANK_EVENTS = {"save", "committed", "resumed", "evaluated", "stop", "desync", "early_stop"}
_STANDARD_KEYS = {"kind", "attempt", "at", "name", "step"}
_MAX_TEXT, _MAX_FIELDS, _MAX_DEPTH = 500, 20, 3


def checkpoint_reports(merged: Sequence[MergedAttempt], *, started_at: float) -> tuple[list[CheckpointReport], int]:
    """Return the checkpoints in order of time, and the number of all checkpoints."""
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for each, _, event in _iter_events(merged):
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
    checkpoints = [
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
    longest = sorted(checkpoints, key=lambda each: -(each.held_s or 0.0))[:MAX_CHECKPOINTS]
    return sorted(longest, key=lambda each: each.at), len(checkpoints)


def run_events(merged: Sequence[MergedAttempt], *, started_at: float) -> tuple[list[RunEvent], dict[str, int]]:
    """Return events in order of time, limited to the first and last of each name, and the number of events by name."""
    reported: set[tuple[int, str, Any]] = set()
    by_name: dict[str, list[RunEvent]] = {}
    for each, rank, event in _iter_events(merged):
        name, step = event["name"][:_MAX_TEXT], _event_step(event)
        if name in ALL_RANK_EVENTS:
            key = (each.number, name, step)
            if key in reported:
                continue
            reported.add(key)
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
    selected: list[RunEvent] = []
    half = max(1, MAX_EVENTS // max(1, 2 * len(by_name)))
    for events in by_name.values():
        events.sort(key=lambda event: event.at)
        selected += events if len(events) <= 2 * half else events[:half] + events[-half:]
    counts = dict(Counter({name: len(events) for name, events in by_name.items()}).most_common(MAX_EVENTS))
    return sorted(selected, key=lambda event: event.at)[:MAX_EVENTS], counts


def _iter_events(merged: Sequence[MergedAttempt]) -> Iterator[tuple[MergedAttempt, int, Row]]:
    for each in merged:
        for rank, lines in each.ranks.items():
            for event in lines.events:
                yield each, rank, event


def _event_step(event: Row) -> int | None:
    step = event.get("step")
    return step if isinstance(step, int) and 0 <= step < 10**15 else None


def _to_amount(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e18 else None


def trim_data(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Limit the size of plain data for the report."""
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT else value[: _MAX_TEXT - 1] + "…"
    # The number exceeds the range of floats.
    if isinstance(value, int) and abs(value) > 1e300:
        return trim_data(str(value))
    if isinstance(value, dict | list) and not depth:
        return "…"
    if isinstance(value, dict):
        return {str(key)[:_MAX_TEXT]: trim_data(each, depth - 1) for key, each in list(value.items())[: 10 * _MAX_FIELDS]}
    if isinstance(value, list):
        return [trim_data(each, depth - 1) for each in value[: 10 * _MAX_FIELDS]]
    return value
