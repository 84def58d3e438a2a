"""Compute goodput, timeline, gauges and slow ranks of a run from merged attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from dtrain.arguments import format_duration
from dtrain.report.attempts import MergedAttempt
from dtrain.report.ledger import AT, CAUSE_COLUMN, CAUSES, SAMPLES, STEP, TOKENS, WIDTH, causes_of
from dtrain.report.model import Column, GaugeSeries, GoodputReport, RankReport, SlowRank, Timeline
from dtrain.spans import TIME_CATEGORIES

MAX_SLICES = 400
_MAX_SLOW_RANKS = 8
_MAX_SPANS = 100
# smallest wait: seconds, and fraction of the time
_MIN_WAIT_S, _MIN_WAIT_SHARE = 1.0, 0.01
_RESTART = CAUSE_COLUMN["restart"]
_COMPUTE = CAUSE_COLUMN["compute"]


def slice_edges(merged: Sequence[MergedAttempt], most: int = MAX_SLICES) -> list[Column]:
    """Divide each attempt into slices of about equal length, ``most`` in all, each with at least one ledger line.

    A slice starts where a later attempt starts to repeat steps, and at the last line of a killed process.
    """
    total = sum(each.end - each.begin for each in merged) or 1.0
    # Each attempt needs a slice of its own, for lost time, for the time after the last line, and for the time before.
    free = most - 4 * len(merged)
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
    names = sorted({name for each in merged for lines in each.ranks.values() for name in lines.gauges})
    series = {}
    for name in names:
        rows = np.vstack([_gauge_rows(name, each, own) for each, own in zip(merged, edges, strict=True)])
        rows = rows[np.isfinite(rows[:, 1])]
        rows = rows[:: -(-len(rows) // MAX_SLICES) or 1]
        if len(rows):
            ranks = rows[:, 2].astype(int).tolist()
            series[name[:200]] = GaugeSeries(times=rows[:, 0] - started_at, values=rows[:, 1], ranks=ranks)
    return series


def _gauge_rows(name: str, each: MergedAttempt, edges: Column) -> Column:
    """Return middle, maximum and rank of each slice of an attempt; -inf without a value."""
    maxima = np.full((len(each.ranks), len(edges) - 1), -np.inf)
    for index, lines in enumerate(each.ranks.values()):
        times, values = np.array(lines.gauges.get(name, ())).reshape(-1, 2).T
        slices = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, len(edges) - 2)
        np.fmax.at(maxima[index], slices, values)
    ranks = np.array(list(each.ranks))[maxima.argmax(axis=0)]
    return np.column_stack([(edges[:-1] + edges[1:]) / 2, maxima.max(axis=0), ranks])


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
