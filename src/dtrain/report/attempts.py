"""Merge the ledgers of ranks into attempts, and compute outcomes, lost time, goodput, timeline, slow ranks and events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any

import numpy as np

from dtrain.arguments import format_duration
from dtrain.report.ledger import AT, CAUSE_COLUMN, CAUSES, SAMPLES, STEP, TOKENS, WIDTH, AttemptLedger, RankLedger, causes_of
from dtrain.report.model import (
    AttemptOutcome,
    AttemptReport,
    Column,
    GaugeSeries,
    GoodputReport,
    RankReport,
    SlowRank,
    Timeline,
)
from dtrain.run.run_files import Row
from dtrain.spans import TIME_CATEGORIES

# difference between clocks of two hosts, and delays of a file system
_SKEW_S = 5.0
# A run writes at the first step after ten seconds, but a long evaluation is one step.
_SILENT_S = 120.0
MAX_CHECKPOINTS, MAX_EVENTS = 1000, 1000
# events that every rank records
ALL_RANK_EVENTS = {"save", "committed", "resumed", "evaluated", "stop", "desync", "early_stop", "started", "recovered"}
# event that every rank records, several at one step
_MODEL = "model"
_STANDARD_KEYS = {"kind", "attempt", "at", "name", "step"}
# characters, fields of an event, depth of data
_MAX_TEXT, _MAX_FIELDS, _MAX_DEPTH = 500, 20, 3
MAX_SLICES = 400
_MAX_SLOW_RANKS = 8
_MAX_SPANS = 100
# smallest wait: seconds, and fraction of the time
_MIN_WAIT_S, _MIN_WAIT_SHARE = 1.0, 0.01
_RESTART = CAUSE_COLUMN["restart"]
_COMPUTE = CAUSE_COLUMN["compute"]


@dataclass(slots=True)
class MergedAttempt:
    """Attempt of all ranks, in seconds since 1970.

    Args:
        number: number of the attempt.
        ranks: ledger of each rank, in order of ranks.
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
        self.begin = min(lines.began_at for lines in self.ranks.values())
        self.end = max(lines.ended_at for lines in self.ranks.values())
        self.first_step = min(lines.first_step for lines in self.ranks.values())
        self.last_step = self.lost_from = max(lines.last_step for lines in self.ranks.values())

    @property
    def first(self) -> AttemptLedger:
        """Ledger of the lowest rank. Steps, samples and tokens are global, so one ledger is sufficient."""
        return next(iter(self.ranks.values()))

    def extend_to(self, ends: Sequence[tuple[float, float]]) -> None:
        """Extend killed ranks to the end of the attempt: the last line of any rank, or a later metric record."""
        killed = [lines for lines in self.ranks.values() if lines.closed is None]
        for at, step in ends if killed else ():
            if at > self.end and step >= self.last_step:
                self.end, self.last_step = at, int(step)
        for lines in killed:
            lines.extend_to(self.end, self.last_step)

    def shift(self, by: float) -> None:
        """Shift all times."""
        for lines in self.ranks.values():
            lines.shift(by)
        self.begin, self.end = self.begin + by, self.end + by

    def lost_since(self, lines: AttemptLedger) -> float:
        """Return the time from which a rank's work was lost; its end if nothing was lost."""
        if self.lost_from >= self.last_step:
            return lines.ended_at
        return max(float(lines.at_steps([self.lost_from])[0]), lines.opened_at)

    def kept_totals(self) -> Column:
        """Return the totals of the work that was not lost; mean over ranks."""
        return np.asarray(np.mean([lines.totals_at([self.lost_since(lines)])[0] for lines in self.ranks.values()], axis=0))

    def totals(self) -> Column:
        """Return the totals at the end; mean over ranks."""
        return np.asarray(np.mean([lines.totals for lines in self.ranks.values()], axis=0))


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
    for ledger in sorted(ledgers, key=lambda ledger: ledger.rank):
        for number, lines in ledger.attempts.items():
            if lines.has_lines:
                by_number.setdefault(number, {})[ledger.rank] = lines
    attempts = [MergedAttempt(number, ranks) for number, ranks in sorted(by_number.items())]
    mixed = {number for ledger in ledgers for number in ledger.interleaved}
    twice = {each.number for each in attempts if any(lines.open_count > 1 for lines in each.ranks.values())}
    anomalies = []
    if mixed or twice:
        numbers = ", ".join(map(str, sorted(mixed | twice)))
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
            each.shift(-gap)
        each.down_s = max(0.0, gap)
    lowest: float = float("inf")
    for each in reversed(attempts):
        each.lost_from = int(max(each.first_step, min(each.last_step, lowest)))
        lowest = min(lowest, each.first_step)
    return attempts, anomalies


def attempt_reports(
    merged: list[MergedAttempt], abouts: dict[int, Row], *, started_at: float, now: float
) -> list[AttemptReport]:
    """Convert merged attempts to the report model."""
    reports = []
    for each in merged:
        ranks, kept = each.ranks.values(), each.kept_totals()
        lost_s = float((each.totals() - kept)[CAUSES:].sum())
        paths = [event.get("path") for lines in ranks for event in lines.events if event["name"] == "resumed"]
        failures = [
            (lines.ended_at, rank, " ".join(str(lines.closed.get("error") or "no text").split())[:_MAX_TEXT])
            for rank, lines in each.ranks.items()
            if lines.closed and lines.closed.get("reason") == "failed"
        ]
        report = AttemptReport(
            number=each.number,
            at=each.begin - started_at,
            ended_at=each.end - started_at,
            outcome=_outcome(each, now if each is merged[-1] else None),
            error="rank {1}: {2}".format(*min(failures)) if failures else None,
            first_step=each.first_step,
            last_step=each.last_step,
            resumed_from=next((path[:_MAX_TEXT] for path in paths if isinstance(path, str)), None),
            world_size=world_size(each, abouts.get(each.number, {})),
            hosts=sorted({lines.host for lines in ranks} - {""}),
            setup_s=mean(lines.opened_at - lines.began_at for lines in ranks),
            lost_steps=each.last_step - each.lost_from,
            lost_s=mean(lines.ended_at - each.lost_since(lines) for lines in ranks),
            down_s=each.down_s,
            by_cause=causes_of(kept) | ({"restart": lost_s} if lost_s > 0 else {}),
        )
        reports.append(report)
    return reports


def _outcome(each: MergedAttempt, now: float | None) -> AttemptOutcome:
    """Return the outcome reported by the ranks; "running" if the last attempt has no end and a recent line."""
    reasons = {lines.closed.get("reason") if lines.closed else None for lines in each.ranks.values()}
    if "failed" in reasons:
        return "failed"
    if None in reasons:
        longest = float(np.diff(each.first.points[:, AT]).max(initial=0.0))
        return "running" if now is not None and now - each.end < max(_SILENT_S, 3 * longest) else "killed"
    return "stopped" if "stopped" in reasons else "done"


def world_size(each: MergedAttempt, about: Row) -> int:
    """Return the number of ranks of an attempt: from the attempt's file, and at least the number of ledgers."""
    recorded: Any = about.get("world_size")
    seen = max(each.ranks) + 1
    return max(recorded, seen) if isinstance(recorded, int) and recorded < 10**7 else seen


def step_moments(merged: Sequence[MergedAttempt], steps: Column) -> tuple[Column, Column]:
    """Return the time since 1970 and the tokens of each step, of the last attempt that completed it; NaN if unknown."""
    times, tokens = np.full(len(steps), np.nan), np.full(len(steps), np.nan)
    for each in merged:
        own = steps > each.first_step if each is not merged[0] else np.full(len(steps), True)
        times[own] = each.first.at_steps(steps[own])
        tokens[own] = each.first.at_steps(steps[own], TOKENS)
    return times, np.where(tokens > 0, tokens, np.nan)


def checkpoint_reports(merged: Sequence[MergedAttempt], *, started_at: float) -> tuple[list[Row], int]:
    """Return the checkpoints in order of time, and the number of all checkpoints."""
    rows: dict[tuple[int, int], Row] = {}
    for each, _, event in _iter_events(merged):
        step = _event_step(event)
        if event["name"] not in ("save", "committed") or step is None:
            continue
        unknown = dict.fromkeys(("blocked_s", "duration_s", "bytes"))
        at = event["at"] - started_at
        row = rows.setdefault((each.number, step), {"step": step, "attempt": each.number, "at": at, **unknown})
        if event["name"] == "save":
            row["at"] = max(row["at"], at)
            row["blocked_s"] = max(row["blocked_s"] or 0.0, _to_amount(event.get("blocked_s")) or 0.0)
        else:
            row["duration_s"], row["bytes"] = _to_amount(event.get("seconds")), _to_amount(event.get("bytes"))
    longest = sorted(rows.values(), key=lambda row: -(row["blocked_s"] or 0.0))[:MAX_CHECKPOINTS]
    return sorted(longest, key=lambda row: float(row["at"])), len(rows)


def death_reports(merged: Sequence[MergedAttempt], *, started_at: float) -> list[Row]:
    """Return the deaths after which the run has completed a step, in order of time."""
    rows = []
    for each in merged:
        events = sorted((event for _, _, event in _iter_events([each])), key=lambda event: float(event["at"]))
        first = min((rank for _, rank, event in _iter_events([each]) if event["name"] == "recovered"), default=None)
        if first is not None:
            own = (event for event in each.ranks[first].events if event["name"] == "recovered")
            rows += [death_row(event, events) | {"attempt": each.number, "at": event["at"] - started_at} for event in own]
    return rows[:MAX_EVENTS]


def death_row(recovered: Row, events: Sequence[Row]) -> Row:
    """Return the facts of a death, from the event of the next loss and the last load before it, if there was one."""
    loads = [event for event in events if event["name"] == "resumed" and event["at"] <= recovered["at"]]
    resumed = max(loads, key=lambda event: float(event["at"]), default={})
    parts = recovered.get("parts")
    rank = recovered.get("rank_died")
    return {
        "rank": rank if isinstance(rank, int) and rank >= 0 else None,
        "cause": trim_data(str(recovered.get("cause", "unknown"))),
        "tier": trim_data(str(resumed.get("tier", "disk"))) if resumed else None,
        "step": _event_step(resumed),
        "seconds": _to_amount(recovered.get("seconds")),
        "lost_steps": _to_amount(recovered.get("lost_steps")),
        "survivors": _to_amount(recovered.get("survivors")),
        "parts": {str(name): _to_amount(value) for name, value in parts.items()} if isinstance(parts, dict) else {},
    }


def describe_death(row: Row) -> str:
    """Describe a death in a line: ``rank 1 killed by SIGKILL; back from memory at step 20 after 0.71 s, 0 steps lost``.

    If other ranks have stayed, the line ends with ``, survivors kept 2``.
    """
    who = "" if row["rank"] is None else f"rank {row['rank']} "
    source = "started anew" if row["tier"] is None else f"back from {row['tier']} at step {row['step']}"
    seconds = "" if row["seconds"] is None else f" after {row['seconds']:.2f} s"
    lost = "" if row["lost_steps"] is None else f", {row['lost_steps']:.0f} step{'s' * (row['lost_steps'] != 1)} lost"
    kept = f", survivors kept {row['survivors']:.0f}" if row["survivors"] else ""
    return f"{who}{row['cause']}; {source}{seconds}{lost}{kept}"


def run_events(merged: Sequence[MergedAttempt], *, started_at: float) -> tuple[list[Row], dict[str, int]]:
    """Return events in order of time, limited to the first and last of each name, and the number of events by name."""
    reported: set[tuple[int, str, Any]] = set()
    by_name: dict[str, list[Row]] = {}
    for each, rank, event in _iter_events(merged):
        name, step = event["name"][:_MAX_TEXT], _event_step(event)
        if name == _MODEL and rank != min(each.ranks):
            continue
        if name in ALL_RANK_EVENTS:
            if (each.number, name, step) in reported:
                continue
            reported.add((each.number, name, step))
        more = [(key, value) for key, value in event.items() if key not in _STANDARD_KEYS][:_MAX_FIELDS]
        fields = {key[:_MAX_TEXT]: trim_data(value) for key, value in more}
        row = {"at": event["at"] - started_at, "name": name, "attempt": each.number, "rank": rank, "step": step}
        by_name.setdefault(name, []).append({**row, "fields": fields})
    selected: list[Row] = []
    half = max(1, MAX_EVENTS // max(1, 2 * len(by_name)))
    for events in by_name.values():
        events.sort(key=lambda event: float(event["at"]))
        selected += events if len(events) <= 2 * half else events[:half] + events[-half:]
    counts = dict(Counter({name: len(events) for name, events in by_name.items()}).most_common(MAX_EVENTS))
    return sorted(selected, key=lambda event: float(event["at"]))[:MAX_EVENTS], counts


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
    # The number exceeds the range of floats.
    if isinstance(value, int) and abs(value) > 1e300:
        value = str(value)
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT else value[: _MAX_TEXT - 1] + "…"
    if isinstance(value, dict | list) and not depth:
        return "…"
    if isinstance(value, dict):
        return {str(key)[:_MAX_TEXT]: trim_data(each, depth - 1) for key, each in list(value.items())[: 10 * _MAX_FIELDS]}
    if isinstance(value, list):
        return [trim_data(each, depth - 1) for each in value[: 10 * _MAX_FIELDS]]
    return value


def slice_edges(merged: Sequence[MergedAttempt]) -> list[Column]:
    """Divide each attempt into slices of about equal length, ``MAX_SLICES`` in all, each with at least one ledger line.

    A slice starts where a later attempt starts to repeat steps, and at the last line of a killed process.
    """
    total = sum(each.end - each.begin for each in merged) or 1.0
    # Each attempt needs a slice of its own, for lost time, for the time after the last line, and for the time before.
    free = MAX_SLICES - 4 * len(merged)
    edges = []
    for each in merged:
        count = max(0, min(int(free * (each.end - each.begin) / total), len(each.first.points) - 2))
        inner = [*np.linspace(each.begin, each.end, count + 2)[1:-1], _lost_since(each), each.first.last_line_at or each.end]
        inner = sorted({edge for edge in inner if each.begin < edge < each.end})
        edges.append(np.array([each.begin, *inner, each.end]))
    return edges


def _lost_since(each: MergedAttempt) -> float:
    return each.end if each.lost_from >= each.last_step else each.lost_since(each.first)


# further columns of a slice, after those of a point: length, compute, attempt, completed steps at the end
_LENGTH, _COMPUTE_S, _ATTEMPT, _END_STEP = range(WIDTH, WIDTH + 4)


def timeline(merged: Sequence[MergedAttempt], edges: Sequence[Column], *, started_at: float) -> Timeline | None:
    """Return wall time by category and progress in slices; None without attempts."""
    if not merged:
        return None
    slices = np.vstack([_attempt_slices(each, own) for each, own in zip(merged, edges, strict=True)])
    while len(slices) > MAX_SLICES:
        pairs = np.add.reduceat(slices, range(0, len(slices), 2))
        pairs[:, AT] = slices[::2, AT]
        last = np.append(slices[1::2], slices[-1:], axis=0)[: len(pairs)]
        pairs[:, [_ATTEMPT, _END_STEP]] = last[:, [_ATTEMPT, _END_STEP]]
        slices = pairs
    return Timeline(
        at=slices[:, AT] - started_at,
        seconds=slices[:, _LENGTH],
        attempt=slices[:, _ATTEMPT],
        by_cause={cause: slices[:, column] for cause, column in CAUSE_COLUMN.items() if slices[:, column].any()},
        step=slices[:, _END_STEP],
        compute_s=slices[:, _COMPUTE_S],
        steps=slices[:, STEP],
        samples=slices[:, SAMPLES],
        tokens=slices[:, TOKENS],
    )


def _attempt_slices(each: MergedAttempt, edges: Column) -> Column:
    """Return a row for each slice, and for the time before the attempt. Time in repeated steps counts as restart."""
    slices = np.zeros((len(edges) - 1, WIDTH + 4))
    slices[:, CAUSES:WIDTH] = np.mean([np.diff(lines.totals_at(edges), axis=0) for lines in each.ranks.values()], axis=0)[
        :, CAUSES:
    ]
    totals = each.first.totals_at(edges)
    slices[:, STEP:CAUSES] = np.diff(totals, axis=0)[:, STEP:CAUSES]
    if each.first.last_line_at is not None:
        slices[edges[:-1] >= each.first.last_line_at, STEP:CAUSES] = np.nan
    slices[:, AT], slices[:, _LENGTH], slices[:, _COMPUTE_S] = edges[:-1], np.diff(edges), slices[:, _COMPUTE]
    slices[:, _ATTEMPT], slices[:, _END_STEP] = each.number, totals[1:, STEP]
    lost = edges[:-1] >= _lost_since(each)
    restart_s = slices[:, CAUSES:WIDTH].sum(axis=1)
    slices[lost, CAUSES:WIDTH] = 0.0
    slices[lost, _RESTART] = restart_s[lost]
    if each.down_s <= 0:
        return slices
    down = np.zeros((1, WIDTH + 4))
    down[0, [AT, _LENGTH, _RESTART]] = each.begin - each.down_s, each.down_s, each.down_s
    down[0, [_ATTEMPT, _END_STEP]] = each.number, each.first_step
    return np.vstack([down, slices])


def gauge_series(merged: Sequence[MergedAttempt], edges: Sequence[Column], *, started_at: float) -> dict[str, GaugeSeries]:
    """Return the gauges over time: in each slice, the maximum over ranks and the rank with the maximum."""
    series = {}
    for name in sorted({name for each in merged for lines in each.ranks.values() for name in lines.gauges}):
        columns: list[Column] = []
        for each, own in zip(merged, edges, strict=True):
            maxima = np.full((len(each.ranks), len(own) - 1), -np.inf)
            for index, lines in enumerate(each.ranks.values()):
                times, values = np.array(lines.gauges.get(name, ())).reshape(-1, 2).T
                np.fmax.at(maxima[index], np.clip(np.searchsorted(own, times, side="right") - 1, 0, len(own) - 2), values)
            ranks = np.array(list(each.ranks))[maxima.argmax(axis=0)]
            columns.append(np.column_stack([(own[:-1] + own[1:]) / 2, maxima.max(axis=0), ranks]))
        rows = np.vstack(columns)
        rows = rows[np.isfinite(rows[:, 1])]
        rows = rows[:: -(-len(rows) // MAX_SLICES) or 1]
        if len(rows):
            ranks_of_rows = rows[:, 2].astype(int).tolist()
            series[name[:200]] = GaugeSeries(times=rows[:, 0] - started_at, values=rows[:, 1], ranks=ranks_of_rows)
    return series


def goodput(merged: Sequence[MergedAttempt]) -> GoodputReport | None:
    """Compute the goodput of a run; None without attempts."""
    if not merged:
        return None
    kept = np.array([each.kept_totals() for each in merged])
    lost_s = float(sum((each.totals() - own)[CAUSES:].sum() for each, own in zip(merged, kept, strict=True)))
    repeated_setup_s = float(kept[1:, CAUSE_COLUMN["setup"]].sum())
    down_s = sum(each.down_s for each in merged)
    seconds = kept.sum(axis=0)
    seconds[CAUSE_COLUMN["setup"]] -= repeated_setup_s
    seconds[_RESTART] += down_s + repeated_setup_s + lost_s
    # Concurrent attempts have no order, so the minimum and maximum over attempts are used.
    total_s = max(each.end for each in merged) - min(each.begin for each in merged)
    # Ranks start and end at different moments, and a killed rank does not record its last seconds.
    seconds[CAUSE_COLUMN["other"]] += max(0.0, total_s - seconds[CAUSES:].sum())
    productive_s = float(seconds[_COMPUTE])
    return GoodputReport(
        total_s=total_s,
        productive_s=productive_s,
        share=min(1.0, productive_s / total_s) if total_s > 0 else 0.0,
        by_cause=causes_of(seconds),
        down_s=down_s,
        repeated_setup_s=repeated_setup_s,
        lost_s=lost_s,
    )


def rank_reports(merged: Sequence[MergedAttempt]) -> list[RankReport]:
    """Return the time of each rank."""
    reports = []
    for rank in sorted({rank for each in merged for rank in each.ranks}):
        ledgers = [each.ranks[rank] for each in merged if rank in each.ranks]
        spans: dict[str, tuple[int, float, str]] = {}
        for lines in ledgers:
            for name, (count, seconds, column) in list(lines.spans.items())[:_MAX_SPANS]:
                known = spans.get(name, (0, 0.0, ""))
                spans[name] = (int(count) + known[0], seconds + known[1], TIME_CATEGORIES[column - CAUSES])
        by_cause = causes_of(np.sum([lines.totals for lines in ledgers], axis=0))
        reports.append(RankReport(rank=rank, host=ledgers[-1].host, by_cause=by_cause, by_span=spans))
    return reports


def slowest_ranks(ranks: Sequence[RankReport]) -> list[SlowRank]:
    """Return the ranks that others waited for, worst first.

    A late rank waits least, because the other ranks have arrived already. So a straggler is the rank with the least ``stall``,
    and the category of its extra time is the reason.
    """
    times = [sum(each.by_cause.values()) for each in ranks]
    if len(ranks) < 2 or min(times) <= 0:
        return []
    shares: list[dict[str, float]] = [
        {cause: each.by_cause.get(cause, 0.0) / time for cause in TIME_CATEGORIES}
        for each, time in zip(ranks, times, strict=True)
    ]
    stalls = [share["stall"] for share in shares]
    # For two ranks, the median would be half of the wait.
    usual = max(stalls) if len(ranks) == 2 else median(stalls)
    slow_ranks = []
    for index, (each, time) in enumerate(zip(ranks, times, strict=True)):
        waited_s = (usual - stalls[index]) * time
        if waited_s > max(_MIN_WAIT_S, _MIN_WAIT_SHARE * time):
            others = shares[:index] + shares[index + 1 :]
            slow_ranks.append(_describe_slow_rank(each, waited_s, time, shares[index], others))
    return sorted(slow_ranks, key=lambda slow: -slow.waited_for_s)[:_MAX_SLOW_RANKS]


def _describe_slow_rank(
    each: RankReport, waited_s: float, time: float, share: Mapping[str, float], others: Sequence[Mapping[str, float]]
) -> SlowRank:
    usual = {cause: median([other[cause] for other in others]) for cause in share if cause != "stall"}
    more = {cause: (share[cause] - seconds) * time for cause, seconds in usual.items()}
    most = max(more, key=more.__getitem__)
    known = more[most] > 0
    name = f"rank {each.rank}{f' on {each.host}' if each.host else ''}"
    text = f"{name} waited for others {format_duration(waited_s)} less than they did: they waited for it"
    if known:
        text += f"; it spent {format_duration(more[most])} more than they on {most}"
    return SlowRank(
        rank=each.rank,
        host=each.host,
        stall_s=each.by_cause.get("stall", 0.0),
        waited_for_s=waited_s,
        most=most if known else None,
        most_s=max(0.0, more[most]),
        text=text,
    )
