"""Compute goodput, time slices, speeds, gauges and slow ranks of a run from merged attempts."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median

from dtrain.report.format import format_duration
from dtrain.report.model import (
    GaugeSeries,
    GoodputReport,
    RankAttemptReport,
    RankReport,
    SlowRank,
    SpanTotal,
    SpeedSample,
    TimeSlice,
)
from dtrain.report.reading.attempts import MergedAttempt, host_of
from dtrain.report.reading.cumulative_curve import (
    COLUMN,
    SAMPLES,
    TOKENS,
    CumulativeCurve,
    cause_seconds,
    mean_totals,
    seconds_by_cause,
    subtract,
)
from dtrain.report.reading.rank_ledger import AttemptLedger
from dtrain.spans import TIME_CATEGORIES, TimeCategory

MAX_SLICES, MAX_RANK_SLICES = 400, 60
_MAX_TOTAL_RANK_SLICES = 20_000

SliceEdges = dict[int, list[float]]
"""Edges of the slices by attempt, including the end of the last slice."""


def slice_edges(merged: Sequence[MergedAttempt], most: int) -> SliceEdges:
    """Divide attempts into at most ``most`` slices of about equal length, each with at least one ledger line.

    A slice starts where a later attempt starts to repeat steps.
    """
    total = sum(each.end - each.begin for each in merged)
    # Each attempt needs a slice of its own, a slice for lost time and a slice for the time before the attempt.
    free = most - 3 * len(merged)
    edges = {}
    for each in merged:
        length = each.end - each.begin
        share = length / total if total > 0 else 0.0
        count = 1 + max(0, min(int(free * share), len(each.curve.at) - 2))
        inner = {each.begin + length * at / count for at in range(1, count)} | {each.lost_since}
        edges[each.number] = [each.begin, *sorted(edge for edge in inner if each.begin < edge < each.end), each.end]
    return edges


def time_slices(merged: Sequence[MergedAttempt], edges: SliceEdges, *, started_at: float, most: int) -> list[TimeSlice]:
    """Return wall time by category, mean over ranks. Time in repeated steps counts as restart."""
    return _build_slices(merged, edges, lambda each: list(each.ranks.values()), started_at=started_at, most=most, lost=True)


def rank_time_slices(
    rank: int, merged: Sequence[MergedAttempt], edges: SliceEdges, *, started_at: float, most: int
) -> list[TimeSlice]:
    """Return the wall time of a rank by category."""
    attempts = [each for each in merged if rank in each.ranks]
    return _build_slices(attempts, edges, lambda each: [each.ranks[rank]], started_at=started_at, most=most)


def slices_per_rank(ranks: int) -> int:
    """Return the largest number of slices per rank."""
    return max(6, min(MAX_RANK_SLICES, _MAX_TOTAL_RANK_SLICES // max(ranks, 1)))


def _build_slices(
    merged: Sequence[MergedAttempt],
    edges: SliceEdges,
    of: Callable[[MergedAttempt], list[AttemptLedger]],
    *,
    started_at: float,
    most: int,
    lost: bool = False,
) -> list[TimeSlice]:
    slices = []
    for each in merged:
        if each.down_s > 0:
            begin = each.begin - each.down_s - started_at
            slices.append(TimeSlice(at=begin, seconds=each.down_s, attempt=each.number, by_cause={"restart": each.down_s}))
        own_edges = edges[each.number]
        parts = [lines.curve.totals_between(own_edges) for lines in of(each)]
        for (low, high), several in zip(pairwise(own_edges), zip(*parts, strict=True), strict=True):
            spent = seconds_by_cause(mean_totals(several))
            if lost and low >= each.lost_since:
                spent = {"restart": sum(spent.values())}
            slices.append(TimeSlice(at=low - started_at, seconds=high - low, attempt=each.number, by_cause=spent))
    while len(slices) > most:
        slices = [_merge_slices(slices[at : at + 2]) for at in range(0, len(slices), 2)]
    return slices


def _merge_slices(slices: Sequence[TimeSlice]) -> TimeSlice:
    first, last = slices[0], slices[-1]
    causes = {cause: 0.0 for each in slices for cause in each.by_cause}
    for each in slices:
        for cause, seconds in each.by_cause.items():
            causes[cause] += seconds
    return TimeSlice(at=first.at, seconds=sum(each.seconds for each in slices), attempt=last.attempt, by_cause=causes)


def speed_samples(merged: Sequence[MergedAttempt], edges: SliceEdges, *, started_at: float) -> list[SpeedSample]:
    """Return the speed in each slice. Steps, samples and tokens are global, so the ledger of one rank is sufficient."""
    speeds = []
    for each in merged:
        # After the last line nothing is known, so no speed is computed.
        last_line = each.ranks[min(each.ranks)].last_line_at
        own_edges = edges[each.number]
        # A short last slice would combine steps and seconds of different moments.
        if last_line is not None:
            own_edges = [own_edges[0], *[edge for edge in own_edges[1:] if edge < last_line][:-1], last_line]
        parts = [lines.curve.totals_between(own_edges) for lines in each.ranks.values()]
        for (low, high), several, done in zip(
            pairwise(own_edges), zip(*parts, strict=True), each.curve.totals_between(own_edges), strict=True
        ):
            steps = each.curve.step_at(high) - each.curve.step_at(low)
            computed = cause_seconds(mean_totals(several), "compute")
            speeds.append(_speed_sample(each, low - started_at, high - low, computed, steps, done[SAMPLES], done[TOKENS], high))
    return speeds[:: -(-len(speeds) // MAX_SLICES)] if speeds else []


def _speed_sample(
    each: MergedAttempt, at: float, seconds: float, computed: float, steps: float, samples: float, tokens: float, until: float
) -> SpeedSample:
    counted = {"samples": each.curve.point(-1)[SAMPLES] > 0, "tokens": each.curve.point(-1)[TOKENS] > 0}

    def per(done: float, time: float, known: bool = True) -> float | None:
        return done / time if time > 0 and known else None

    return SpeedSample(
        at=at,
        seconds=seconds,
        attempt=each.number,
        step=int(each.curve.step_at(until)),
        steps_per_s=per(steps, seconds),
        samples_per_s=per(samples, seconds, counted["samples"]),
        tokens_per_s=per(tokens, seconds, counted["tokens"]),
        steps_per_compute_s=per(steps, computed),
        samples_per_compute_s=per(samples, computed, counted["samples"]),
        tokens_per_compute_s=per(tokens, computed, counted["tokens"]),
    )


def gauge_series(merged: Sequence[MergedAttempt], edges: SliceEdges, *, started_at: float) -> dict[str, GaugeSeries]:
    """Return the gauges over time: in each slice, the maximum over ranks and the rank with the maximum."""
    names = sorted({name for each in merged for lines in each.ranks.values() for name in lines.gauges})
    return {name[:200]: gauge for name in names if (gauge := _gauge_series(name, merged, edges, started_at)).values}


def _gauge_series(name: str, merged: Sequence[MergedAttempt], edges: SliceEdges, started_at: float) -> GaugeSeries:
    times, values, ranks = [], [], []
    by_rank: dict[int, float] = {}
    for each in merged:
        maxima = {rank: _slice_maxima(name, lines, edges[each.number]) for rank, lines in each.ranks.items()}
        for rank, rank_maxima in maxima.items():
            by_rank[rank] = max(by_rank.get(rank, -math.inf), *rank_maxima.values(), -math.inf)
        for index, (low, high) in enumerate(pairwise(edges[each.number])):
            if in_slice := {rank: rank_maxima[index] for rank, rank_maxima in maxima.items() if index in rank_maxima}:
                rank = max(in_slice, key=in_slice.__getitem__)
                times.append((low + high) / 2 - started_at)
                values.append(in_slice[rank])
                ranks.append(rank)
    thin = -(-len(times) // MAX_SLICES) or 1
    return GaugeSeries(
        times=times[::thin],
        values=values[::thin],
        ranks=ranks[::thin],
        by_rank={rank: value for rank, value in sorted(by_rank.items()) if math.isfinite(value)},
    )


def _slice_maxima(name: str, lines: AttemptLedger, edges: Sequence[float]) -> Mapping[int, float]:
    """Return the maximum of a rank in each slice, by index of the slice."""
    values = lines.gauges.get(name)
    if values is None:
        return {}
    at = lines.gauge_at
    places = [bisect_left(at, edge) for edge in edges]
    places[-1] = len(values)
    maxima = {}
    for number, (begin, end) in enumerate(pairwise(places)):
        part = [value for value in values[begin:end] if math.isfinite(value)]
        if part:
            maxima[number] = max(part)
    return maxima


def curve_with_step(merged: Sequence[MergedAttempt], step: float) -> CumulativeCurve:
    """Return the curve of the last attempt that completed a step.

    Raises:
        LookupError: there are no attempts.
    """
    for each in reversed(merged):
        if each.first_step < step:
            return each.curve
    return merged[0].curve


_MAX_SLOW_RANKS = 8
_MAX_SPANS = 100
# smallest wait: seconds, and fraction of the time
_MIN_WAIT_S, _MIN_WAIT_SHARE = 1.0, 0.01


def goodput(merged: Sequence[MergedAttempt]) -> GoodputReport | None:
    """Compute the goodput of a run; None without attempts."""
    if not merged:
        return None
    seconds = dict.fromkeys(TIME_CATEGORIES, 0.0)
    down_s = again_s = lost_s = 0.0
    for index, each in enumerate(merged):
        kept, lost = [], []
        for lines in each.ranks.values():
            total = lines.curve.point(-1)
            before = lines.curve.totals_at(each.lost_since_on(lines))
            kept.append(before)
            lost.append(sum(subtract(total, before)[2:]))
        totals = mean_totals(kept)
        for cause in TIME_CATEGORIES:
            seconds[cause] += totals[COLUMN[cause]]
        if index:
            again_s += totals[COLUMN["setup"]]
            seconds["setup"] -= totals[COLUMN["setup"]]
        down_s += each.down_s
        lost_s += sum(lost) / len(lost)
    seconds["restart"] += down_s + again_s + lost_s
    # Concurrent attempts have no order, so the minimum and maximum over attempts are used.
    total_s = max(each.end for each in merged) - min(each.begin for each in merged)
    # Ranks start and end at different moments, and a killed rank does not record its last seconds.
    seconds["other"] += max(0.0, total_s - sum(seconds.values()))
    productive_s = seconds["compute"]
    return GoodputReport(
        total_s=total_s,
        productive_s=productive_s,
        share=min(1.0, productive_s / total_s) if total_s > 0 else 0.0,
        by_cause={cause: spent for cause, spent in seconds.items() if spent > 0},
        down_s=down_s,
        again_s=again_s,
        lost_s=lost_s,
    )


def rank_reports(merged: Sequence[MergedAttempt], edges: SliceEdges, *, started_at: float, most: int) -> list[RankReport]:
    """Return the time of each rank."""
    return [
        _rank_report(rank, merged, edges, started_at=started_at, most=most)
        for rank in sorted({rank for each in merged for rank in each.ranks})
    ]


def _rank_report(rank: int, merged: Sequence[MergedAttempt], edges: SliceEdges, *, started_at: float, most: int) -> RankReport:
    attempts = []
    spans: dict[str, SpanTotal] = {}
    seconds = dict.fromkeys(TIME_CATEGORIES, 0.0)
    for each in merged:
        if (lines := each.ranks.get(rank)) is None:
            continue
        spent = seconds_by_cause(lines.curve.point(-1))
        attempts.append(
            RankAttemptReport(
                attempt=each.number, host=host_of(lines), seconds=lines.ended_at - lines.opened_at, by_cause=spent
            )
        )
        for cause in TIME_CATEGORIES:
            seconds[cause] += spent.get(cause, 0.0)
        for name, (count, time, column) in list(lines.cells.items())[:_MAX_SPANS]:
            known = spans.get(name[:_MAX_SPANS])
            spans[name[:_MAX_SPANS]] = SpanTotal(
                count=int(count) + (known.count if known else 0),
                seconds=time + (known.seconds if known else 0.0),
                cause=TIME_CATEGORIES[column - COLUMN[TIME_CATEGORIES[0]]],
            )
    return RankReport(
        rank=rank,
        host=attempts[-1].host,
        by_cause={cause: spent for cause, spent in seconds.items() if spent > 0},
        by_span=spans,
        attempts=attempts,
        timeline=rank_time_slices(rank, merged, edges, started_at=started_at, most=most),
    )


def slowest_ranks(ranks: Sequence[RankReport]) -> list[SlowRank]:
    """Return the ranks that others waited for, worst first.

    A late rank waits least, because the other ranks have arrived already. So a straggler is the rank with the least ``stall``,
    and the category of its extra time is the reason.
    """
    times = {each.rank: sum(each.by_cause.values()) for each in ranks}
    if len(ranks) < 2 or min(times.values()) <= 0:
        return []
    shares = {
        each.rank: {cause: each.by_cause.get(cause, 0.0) / times[each.rank] for cause in TIME_CATEGORIES} for each in ranks
    }
    middle = {cause: median(share[cause] for share in shares.values()) for cause in TIME_CATEGORIES}
    # For two ranks, the median would be half of the wait.
    if len(ranks) == 2:
        middle["stall"] = max(share["stall"] for share in shares.values())
    slow_ranks = []
    for each in ranks:
        waited = (middle["stall"] - shares[each.rank]["stall"]) * times[each.rank]
        if waited > max(_MIN_WAIT_S, _MIN_WAIT_SHARE * times[each.rank]):
            slow_ranks.append(_describe_slow_rank(each, waited, times[each.rank], shares, middle))
    return sorted(slow_ranks, key=lambda slow: -slow.waited_for_s)[:_MAX_SLOW_RANKS]


def _describe_slow_rank(
    each: RankReport,
    waited_s: float,
    time: float,
    shares: dict[int, dict[TimeCategory, float]],
    middle: dict[TimeCategory, float],
) -> SlowRank:
    others = {cause: median([share[cause] for rank, share in shares.items() if rank != each.rank]) for cause in middle}
    more = {cause: (shares[each.rank][cause] - others[cause]) * time for cause in middle if cause != "stall"}
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
        compute_s=each.by_cause.get("compute", 0.0),
        most=most if known else None,
        most_s=max(0.0, more[most]),
        text=text,
    )
