"""Where the wall time of a run went, by cause and by rank, and which ranks the others waited for.

Wall time in slices: what it went to, how fast it went, and what the gauges showed."""

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
"""By attempt: where its slices begin, and the end of the last."""


def slice_edges(found: Sequence[MergedAttempt], most: int) -> SliceEdges:
    """Slices of about equal length, at most ``most`` with those between attempts, with a line of the ledger in each.

    One begins where that begins which a later attempt did again.
    """
    total = sum(each.end - each.begin for each in found)
    free = most - 3 * len(found)  # each has one, one for what was lost, and one for the time before it
    edges = {}
    for each in found:
        length = each.end - each.begin
        share = length / total if total > 0 else 0.0
        count = 1 + max(0, min(int(free * share), len(each.curve.at) - 2))
        inner = {each.begin + length * at / count for at in range(1, count)} | {each.lost_since}
        edges[each.number] = [each.begin, *sorted(edge for edge in inner if each.begin < edge < each.end), each.end]
    return edges


def time_slices(found: Sequence[MergedAttempt], edges: SliceEdges, *, started_at: float, most: int) -> list[TimeSlice]:
    """What wall time went to, mean over ranks; in steps that were done again, to restarts."""
    return _build_slices(found, edges, lambda each: list(each.ranks.values()), started_at=started_at, most=most, lost=True)


def rank_time_slices(
    rank: int, found: Sequence[MergedAttempt], edges: SliceEdges, *, started_at: float, most: int
) -> list[TimeSlice]:
    """What the wall time of one rank went to."""
    here = [each for each in found if rank in each.ranks]
    return _build_slices(here, edges, lambda each: [each.ranks[rank]], started_at=started_at, most=most)


def slices_per_rank(ranks: int) -> int:
    """How many slices each of so many ranks may have."""
    return max(6, min(MAX_RANK_SLICES, _MAX_TOTAL_RANK_SLICES // max(ranks, 1)))


def _build_slices(
    found: Sequence[MergedAttempt],
    edges: SliceEdges,
    of: Callable[[MergedAttempt], list[AttemptLedger]],
    *,
    started_at: float,
    most: int,
    lost: bool = False,
) -> list[TimeSlice]:
    slices = []
    for each in found:
        if each.down_s > 0:
            begin = each.begin - each.down_s - started_at
            slices.append(TimeSlice(at=begin, seconds=each.down_s, attempt=each.number, by_cause={"restart": each.down_s}))
        mine = edges[each.number]
        parts = [lines.curve.totals_between(mine) for lines in of(each)]
        for (low, high), several in zip(pairwise(mine), zip(*parts, strict=True), strict=True):
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


def speed_samples(found: Sequence[MergedAttempt], edges: SliceEdges, *, started_at: float) -> list[SpeedSample]:
    """How fast it went in each slice. Steps, samples and tokens are those of all ranks, so one rank's ledger tells them."""
    speeds = []
    for each in found:
        told = each.ranks[min(each.ranks)].last_line_at  # what came after is not known, and would be no speed
        mine = edges[each.number]
        if told is not None:  # a last stretch that is short would have the steps of one moment and the seconds of another
            mine = [mine[0], *[edge for edge in mine[1:] if edge < told][:-1], told]
        parts = [lines.curve.totals_between(mine) for lines in each.ranks.values()]
        for (low, high), several, done in zip(
            pairwise(mine), zip(*parts, strict=True), each.curve.totals_between(mine), strict=True
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


def gauge_series(found: Sequence[MergedAttempt], edges: SliceEdges, *, started_at: float) -> dict[str, GaugeSeries]:
    """The gauges over time: in each slice, the greatest value and the rank that had it."""
    names = sorted({name for each in found for lines in each.ranks.values() for name in lines.gauges})
    return {name[:200]: gauge for name in names if (gauge := _gauge_series(name, found, edges, started_at)).values}


def _gauge_series(name: str, found: Sequence[MergedAttempt], edges: SliceEdges, started_at: float) -> GaugeSeries:
    times, values, ranks = [], [], []
    by_rank: dict[int, float] = {}
    for each in found:
        tops = {rank: _slice_maxima(name, lines, edges[each.number]) for rank, lines in each.ranks.items()}
        for rank, mine in tops.items():
            by_rank[rank] = max(by_rank.get(rank, -math.inf), *mine.values(), -math.inf)
        for at, (low, high) in enumerate(pairwise(edges[each.number])):
            if here := {rank: mine[at] for rank, mine in tops.items() if at in mine}:
                rank = max(here, key=here.__getitem__)
                times.append((low + high) / 2 - started_at)
                values.append(here[rank])
                ranks.append(rank)
    thin = -(-len(times) // MAX_SLICES) or 1
    return GaugeSeries(
        times=times[::thin],
        values=values[::thin],
        ranks=ranks[::thin],
        by_rank={rank: value for rank, value in sorted(by_rank.items()) if math.isfinite(value)},
    )


def _slice_maxima(name: str, lines: AttemptLedger, edges: Sequence[float]) -> Mapping[int, float]:
    """The greatest value of a rank in each slice, by the slice's number."""
    values = lines.gauges.get(name)
    if values is None:
        return {}
    at = lines.gauge_at
    places = [bisect_left(at, edge) for edge in edges]
    places[-1] = len(values)
    tops = {}
    for number, (begin, end) in enumerate(pairwise(places)):
        part = [value for value in values[begin:end] if math.isfinite(value)]
        if part:
            tops[number] = max(part)
    return tops


def curve_with_step(found: Sequence[MergedAttempt], step: float) -> CumulativeCurve:
    """The attempt that did a step last.

    Raises:
        LookupError: there are no attempts.
    """
    for each in reversed(found):
        if each.first_step < step:
            return each.curve
    return found[0].curve


_MAX_SLOW_RANKS = 8
_MAX_SPANS = 100
_MIN_WAIT_S, _MIN_WAIT_SHARE = 1.0, 0.01  # of waiting: seconds, and share of the time


def goodput(found: Sequence[MergedAttempt]) -> GoodputReport | None:
    """How much of the wall time was training that counts; None without attempts."""
    if not found:
        return None
    seconds = dict.fromkeys(TIME_CATEGORIES, 0.0)
    down_s = again_s = lost_s = 0.0
    for at, each in enumerate(found):
        kept, lost = [], []
        for lines in each.ranks.values():
            all_of_it = lines.curve.point(-1)
            before = lines.curve.totals_at(each.lost_since_on(lines))
            kept.append(before)
            lost.append(sum(subtract(all_of_it, before)[2:]))
        totals = mean_totals(kept)
        for cause in TIME_CATEGORIES:
            seconds[cause] += totals[COLUMN[cause]]
        if at:
            again_s += totals[COLUMN["setup"]]
            seconds["setup"] -= totals[COLUMN["setup"]]
        down_s += each.down_s
        lost_s += sum(lost) / len(lost)
    seconds["restart"] += down_s + again_s + lost_s
    total_s = max(each.end for each in found) - min(each.begin for each in found)  # several at once are in no order
    # Ranks do not begin and end at one moment, and one that was killed tells nothing of its last seconds.
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


def rank_reports(found: Sequence[MergedAttempt], edges: SliceEdges, *, started_at: float, most: int) -> list[RankReport]:
    """What each rank did."""
    return [
        _rank_report(rank, found, edges, started_at=started_at, most=most)
        for rank in sorted({rank for each in found for rank in each.ranks})
    ]


def _rank_report(rank: int, found: Sequence[MergedAttempt], edges: SliceEdges, *, started_at: float, most: int) -> RankReport:
    attempts = []
    spans: dict[str, SpanTotal] = {}
    seconds = dict.fromkeys(TIME_CATEGORIES, 0.0)
    for each in found:
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
        timeline=rank_time_slices(rank, found, edges, started_at=started_at, most=most),
    )


def slowest_ranks(ranks: Sequence[RankReport]) -> list[SlowRank]:
    """The ranks that others waited for, worst first.

    Who is late waits least: where ranks meet, all others are there already. So a straggler is the rank with the least
    ``stall``, not the one with the most; and what it does in that time instead is what makes it late.
    """
    times = {each.rank: sum(each.by_cause.values()) for each in ranks}
    if len(ranks) < 2 or min(times.values()) <= 0:
        return []
    shares = {
        each.rank: {cause: each.by_cause.get(cause, 0.0) / times[each.rank] for cause in TIME_CATEGORIES} for each in ranks
    }
    middle = {cause: median(share[cause] for share in shares.values()) for cause in TIME_CATEGORIES}
    if len(ranks) == 2:  # of two, the median would be half of what one waits for the other
        middle["stall"] = max(share["stall"] for share in shares.values())
    found = []
    for each in ranks:
        waited = (middle["stall"] - shares[each.rank]["stall"]) * times[each.rank]
        if waited > max(_MIN_WAIT_S, _MIN_WAIT_SHARE * times[each.rank]):
            found.append(_describe_slow_rank(each, waited, times[each.rank], shares, middle))
    return sorted(found, key=lambda slow: -slow.waited_for_s)[:_MAX_SLOW_RANKS]


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
    text = f"rank {each.rank}{f' on {each.host}' if each.host else ''} waited for others {format_duration(waited_s)} less than they did: "
    text += "they waited for it"
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
