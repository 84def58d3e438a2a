"""Where the wall time of a run went, by cause and by rank, and which ranks the others waited for."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from dtrain.report.model import GoodputReport, RankAttempt, RankReport, Slow, SpanTotal
from dtrain.report.reading.attempts import Together, host_of
from dtrain.report.reading.curve import COLUMN, by_cause, mean, minus
from dtrain.report.reading.timeline import Edges, rank_timeline
from dtrain.report.words import duration
from dtrain.spans import CAUSES, Cause

_SLOWEST = 8
_NAMES = 100
_WORTH_S, _WORTH = 1.0, 0.01  # of waiting: seconds, and share of the time


def goodput(found: Sequence[Together]) -> GoodputReport | None:
    """How much of the wall time was training that counts; None without attempts."""
    if not found:
        return None
    seconds = dict.fromkeys(CAUSES, 0.0)
    down_s = again_s = lost_s = 0.0
    for at, each in enumerate(found):
        kept, lost = [], []
        for lines in each.ranks.values():
            all_of_it = lines.curve.point(-1)
            before = lines.curve.by(each.lost_since(lines))
            kept.append(before)
            lost.append(sum(minus(all_of_it, before)[2:]))
        totals = mean(kept)
        for cause in CAUSES:
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


def rank_reports(found: Sequence[Together], edges: Edges, *, started_at: float, most: int) -> list[RankReport]:
    """What each rank did."""
    return [
        _rank_report(rank, found, edges, started_at=started_at, most=most)
        for rank in sorted({rank for each in found for rank in each.ranks})
    ]


def _rank_report(rank: int, found: Sequence[Together], edges: Edges, *, started_at: float, most: int) -> RankReport:
    attempts = []
    spans: dict[str, SpanTotal] = {}
    seconds = dict.fromkeys(CAUSES, 0.0)
    for each in found:
        if (lines := each.ranks.get(rank)) is None:
            continue
        spent = by_cause(lines.curve.point(-1))
        attempts.append(
            RankAttempt(attempt=each.number, host=host_of(lines), seconds=lines.ended_at - lines.opened_at, by_cause=spent)
        )
        for cause in CAUSES:
            seconds[cause] += spent.get(cause, 0.0)
        for name, (count, time, column) in list(lines.cells.items())[:_NAMES]:
            known = spans.get(name[:_NAMES])
            spans[name[:_NAMES]] = SpanTotal(
                count=int(count) + (known.count if known else 0),
                seconds=time + (known.seconds if known else 0.0),
                cause=CAUSES[column - COLUMN[CAUSES[0]]],
            )
    return RankReport(
        rank=rank,
        host=attempts[-1].host,
        by_cause={cause: spent for cause, spent in seconds.items() if spent > 0},
        by_span=spans,
        attempts=attempts,
        timeline=rank_timeline(rank, found, edges, started_at=started_at, most=most),
    )


def slowest(ranks: Sequence[RankReport]) -> list[Slow]:
    """The ranks that others waited for, worst first.

    Who is late waits least: where ranks meet, all others are there already. So a straggler is the rank with the least
    ``stall``, not the one with the most; and what it does in that time instead is what makes it late.
    """
    times = {each.rank: sum(each.by_cause.values()) for each in ranks}
    if len(ranks) < 2 or min(times.values()) <= 0:
        return []
    shares = {each.rank: {cause: each.by_cause.get(cause, 0.0) / times[each.rank] for cause in CAUSES} for each in ranks}
    middle = {cause: median(share[cause] for share in shares.values()) for cause in CAUSES}
    if len(ranks) == 2:  # of two, the median would be half of what one waits for the other
        middle["stall"] = max(share["stall"] for share in shares.values())
    found = []
    for each in ranks:
        waited = (middle["stall"] - shares[each.rank]["stall"]) * times[each.rank]
        if waited > max(_WORTH_S, _WORTH * times[each.rank]):
            found.append(_slow(each, waited, times[each.rank], shares, middle))
    return sorted(found, key=lambda slow: -slow.waited_for_s)[:_SLOWEST]


def _slow(
    each: RankReport, waited_s: float, time: float, shares: dict[int, dict[Cause, float]], middle: dict[Cause, float]
) -> Slow:
    others = {cause: median([share[cause] for rank, share in shares.items() if rank != each.rank]) for cause in middle}
    more = {cause: (shares[each.rank][cause] - others[cause]) * time for cause in middle if cause != "stall"}
    most = max(more, key=more.__getitem__)
    known = more[most] > 0
    text = (
        f"rank {each.rank}{f' on {each.host}' if each.host else ''} waited for others {duration(waited_s)} less than they did: "
    )
    text += "they waited for it"
    if known:
        text += f"; it spent {duration(more[most])} more than they on {most}"
    return Slow(
        rank=each.rank,
        host=each.host,
        stall_s=each.by_cause.get("stall", 0.0),
        waited_for_s=waited_s,
        compute_s=each.by_cause.get("compute", 0.0),
        most=most if known else None,
        most_s=max(0.0, more[most]),
        text=text,
    )
