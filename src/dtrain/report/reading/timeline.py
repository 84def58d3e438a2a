"""Wall time in slices: what it went to, how fast it went, and what the gauges showed."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from dtrain.report.model import Gauge, Slice, Speed
from dtrain.report.reading.attempts import Together
from dtrain.report.reading.curve import SAMPLES, TOKENS, Curve, by_cause, mean, seconds_of
from dtrain.report.reading.ledger import RankAttemptLines

SLICES, RANK_SLICES = 400, 60
_ALL_RANK_SLICES = 20_000

Edges = dict[int, list[float]]
"""By attempt: where its slices begin, and the end of the last."""


def edges_of(found: Sequence[Together], most: int) -> Edges:
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
        inner = {each.begin + length * at / count for at in range(1, count)} | {each.lost_at}
        edges[each.number] = [each.begin, *sorted(edge for edge in inner if each.begin < edge < each.end), each.end]
    return edges


def timeline(found: Sequence[Together], edges: Edges, *, started_at: float, most: int) -> list[Slice]:
    """What wall time went to, mean over ranks; in steps that were done again, to restarts."""
    return _slices(found, edges, lambda each: list(each.ranks.values()), started_at=started_at, most=most, lost=True)


def rank_timeline(rank: int, found: Sequence[Together], edges: Edges, *, started_at: float, most: int) -> list[Slice]:
    """What the wall time of one rank went to."""
    here = [each for each in found if rank in each.ranks]
    return _slices(here, edges, lambda each: [each.ranks[rank]], started_at=started_at, most=most)


def rank_slices(ranks: int) -> int:
    """How many slices each of so many ranks may have."""
    return max(6, min(RANK_SLICES, _ALL_RANK_SLICES // max(ranks, 1)))


def _slices(
    found: Sequence[Together],
    edges: Edges,
    of: Callable[[Together], list[RankAttemptLines]],
    *,
    started_at: float,
    most: int,
    lost: bool = False,
) -> list[Slice]:
    slices = []
    for each in found:
        if each.down_s > 0:
            begin = each.begin - each.down_s - started_at
            slices.append(Slice(at=begin, seconds=each.down_s, attempt=each.number, by_cause={"restart": each.down_s}))
        mine = edges[each.number]
        parts = [lines.curve.parts(mine) for lines in of(each)]
        for (low, high), several in zip(pairwise(mine), zip(*parts, strict=True), strict=True):
            spent = by_cause(mean(several))
            if lost and low >= each.lost_at:
                spent = {"restart": sum(spent.values())}
            slices.append(Slice(at=low - started_at, seconds=high - low, attempt=each.number, by_cause=spent))
    while len(slices) > most:
        slices = [_merged(slices[at : at + 2]) for at in range(0, len(slices), 2)]
    return slices


def _merged(slices: Sequence[Slice]) -> Slice:
    first, last = slices[0], slices[-1]
    causes = {cause: 0.0 for each in slices for cause in each.by_cause}
    for each in slices:
        for cause, seconds in each.by_cause.items():
            causes[cause] += seconds
    return Slice(at=first.at, seconds=sum(each.seconds for each in slices), attempt=last.attempt, by_cause=causes)


def speeds(found: Sequence[Together], edges: Edges, *, started_at: float) -> list[Speed]:
    """How fast it went in each slice. Steps, samples and tokens are those of all ranks, so one rank's ledger tells them."""
    speeds = []
    for each in found:
        told = each.ranks[min(each.ranks)].told_until  # what came after is not known, and would be no speed
        mine = edges[each.number]
        if told is not None:  # a last stretch that is short would have the steps of one moment and the seconds of another
            mine = [mine[0], *[edge for edge in mine[1:] if edge < told][:-1], told]
        parts = [lines.curve.parts(mine) for lines in each.ranks.values()]
        for (low, high), several, done in zip(pairwise(mine), zip(*parts, strict=True), each.curve.parts(mine), strict=True):
            steps = each.curve.step_by(high) - each.curve.step_by(low)
            computed = seconds_of(mean(several), "compute")
            speeds.append(_speed(each, low - started_at, high - low, computed, steps, done[SAMPLES], done[TOKENS], high))
    return speeds[:: -(-len(speeds) // SLICES)] if speeds else []


def _speed(
    each: Together, at: float, seconds: float, computed: float, steps: float, samples: float, tokens: float, until: float
) -> Speed:
    counted = {"samples": each.curve.point(-1)[SAMPLES] > 0, "tokens": each.curve.point(-1)[TOKENS] > 0}

    def per(done: float, time: float, known: bool = True) -> float | None:
        return done / time if time > 0 and known else None

    return Speed(
        at=at,
        seconds=seconds,
        attempt=each.number,
        step=int(each.curve.step_by(until)),
        steps_per_s=per(steps, seconds),
        samples_per_s=per(samples, seconds, counted["samples"]),
        tokens_per_s=per(tokens, seconds, counted["tokens"]),
        steps_per_compute_s=per(steps, computed),
        samples_per_compute_s=per(samples, computed, counted["samples"]),
        tokens_per_compute_s=per(tokens, computed, counted["tokens"]),
    )


def gauges(found: Sequence[Together], edges: Edges, *, started_at: float) -> dict[str, Gauge]:
    """The gauges over time: in each slice, the greatest value and the rank that had it."""
    names = sorted({name for each in found for lines in each.ranks.values() for name in lines.gauges})
    return {name[:200]: gauge for name in names if (gauge := _gauge(name, found, edges, started_at)).values}


def _gauge(name: str, found: Sequence[Together], edges: Edges, started_at: float) -> Gauge:
    times, values, ranks = [], [], []
    by_rank: dict[int, float] = {}
    for each in found:
        tops = {rank: _tops(name, lines, edges[each.number]) for rank, lines in each.ranks.items()}
        for rank, mine in tops.items():
            by_rank[rank] = max(by_rank.get(rank, -math.inf), *mine.values(), -math.inf)
        for at, (low, high) in enumerate(pairwise(edges[each.number])):
            if here := {rank: mine[at] for rank, mine in tops.items() if at in mine}:
                rank = max(here, key=here.__getitem__)
                times.append((low + high) / 2 - started_at)
                values.append(here[rank])
                ranks.append(rank)
    thin = -(-len(times) // SLICES) or 1
    return Gauge(
        times=times[::thin],
        values=values[::thin],
        ranks=ranks[::thin],
        by_rank={rank: value for rank, value in sorted(by_rank.items()) if math.isfinite(value)},
    )


def _tops(name: str, lines: RankAttemptLines, edges: Sequence[float]) -> Mapping[int, float]:
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


def curve_of(found: Sequence[Together], step: float) -> Curve:
    """The attempt that did a step last.

    Raises:
        LookupError: there are no attempts.
    """
    for each in reversed(found):
        if each.first_step < step:
            return each.curve
    return found[0].curve
