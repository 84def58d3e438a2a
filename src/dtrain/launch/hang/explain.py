"""Why a job hangs, in at most twelve lines, from all that is known about its ranks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrain.launch.hang.collectives import Record, Stop, find_stops
from dtrain.launch.hang.frames import own_frame, short_place
from dtrain.launch.hang.watch import Seen
from dtrain.launch.verdict import describe_end

_AT_MOST = 3  # lines of one kind
_RANKS_NAMED = 8
_MESSAGE = 200  # characters of a place in the program: a path may be long, and the end of it says most
_STOPPED, _IN_KERNEL = ("T", "t"), "D"  # letters of /proc/PID/stat


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known about one rank of this node."""

    rank: int
    pid: int | None = None
    seen: Seen | None = None  # what it reported; None: it has not come to init_dist's block
    quiet_s: float | None = None  # since then, when it was asked
    ended: int | None = None  # its exit code, a signal as a negative number
    died: int | None = None  # the same, of one that ended only when it was asked: that is not what was the matter with it
    state: str = ""  # the letter of its process in /proc
    record: Record | None = None  # what it wrote down
    stacks: str = ""  # what faulthandler wrote

    @property
    def gone(self) -> bool:
        """Whether nothing is expected of it any more."""
        return self.ended is not None or (self.seen is not None and self.seen.phase == "closed")

    @property
    def outside(self) -> bool:
        """Return True if its process runs on after ``init_dist``'s block."""
        return self.gone and self.ended is None

    @property
    def leaving(self) -> bool:
        """Whether it waits for the others at the end of init_dist's block."""
        return self.seen is not None and self.seen.phase == "leaving"

    @property
    def stopped(self) -> bool:
        return self.state in _STOPPED

    @property
    def passed(self) -> int:
        """How many points of progress it has passed: its own count is newer than what it reported."""
        reported = self.seen.passed if self.seen is not None else 0
        return max(reported, self.record.passed) if self.record is not None else reported

    @property
    def doing(self) -> str:
        reported = self.seen.doing if self.seen is not None else ""
        return self.record.doing or reported if self.record is not None else reported


def explain(evidence: Collection[Evidence], *, world_size: int, timeout_s: float | None, report: Path) -> list[str]:
    """The message: one line that names the rank that stopped and why, then indented ones with what is known.

    Args:
        evidence: one for each rank of this node.
        world_size: ranks of the whole job.
        timeout_s: how long there was no progress. None: somebody has asked, so it is what was heard of those ranks last.
        report: the file with the whole.
    """
    by_rank = {one.rank: one for one in sorted(evidence, key=lambda one: one.rank)}
    stops = find_stops({rank: one.record for rank, one in by_rank.items() if one.record is not None and not one.gone})
    culprits, reason = _cause(by_rank, stops)
    who = f"{name_ranks(culprits)} of {world_size}"
    quiet = f" for {timeout_s:g} s" if timeout_s is not None else _quiet(by_rank, culprits)
    what = "asked" if timeout_s is None else "hang"
    lines = [f"dtrain: launch: {what}: {who} {reason.format(time=quiet)}; see {report}"]
    after = not any(not one.gone for one in by_rank.values())  # the block: no rank is inside
    lines += _first(_places([one for rank in culprits if not (one := by_rank[rank]).gone or (after and one.outside)]))
    lines += _first(_describe(stop, by_rank, hang=timeout_s is not None) for stop in stops)
    lines += _first(_places([one for rank, one in by_rank.items() if rank not in culprits and not one.gone]))
    return ["".join(c if c.isprintable() else "?" for c in line) for line in lines]


def _cause(by_rank: Mapping[int, Evidence], stops: Sequence[Stop]) -> tuple[list[int], str]:
    """The ranks that stopped and what is the matter with them. What is seen from outside is most certain and comes first."""
    here = [one for one in by_rank.values() if not one.gone]
    for ranks, reason in (
        (_outside(by_rank.values(), here), "did not end after init_dist's block, no progress{time}"),
        (_gone(by_rank.values(), here), "ended while the others went on, no progress{time}"),
        ([one.rank for one in here if one.stopped], "made no progress{time} (stopped, as by SIGSTOP)"),
        (_early(here), "returned early, to the end of init_dist's block, no progress{time}"),
        ([one.rank for one in here if one.seen is None], "never came to init_dist's block, no progress{time}"),
        (
            [one.rank for one in here if one.state == _IN_KERNEL],
            "made no progress{time} (in the kernel: disk or driver)",
        ),
        (_silent(here), "made no progress{time} (no answer: something holds the interpreter)"),
        (_strangers(stops), "ran another collective than the others, no progress{time}"),
        (_lacking(stops, wait=False), "made no progress{time}, and others wait in a collective"),
        (_lacking(stops, wait=True), "wait for each other in different collectives, no progress{time}"),
        (_behind(here), "made no progress{time}, after fewer steps than the others"),
    ):
        if ranks:
            return ranks, reason
    return [one.rank for one in here], "made no progress{time}"


def _quiet(by_rank: Mapping[int, Evidence], culprits: Collection[int]) -> str:
    """Since when nothing was heard of these ranks; of all, when it is not known of these."""
    known = {rank: one.quiet_s for rank, one in by_rank.items() if one.quiet_s is not None and not one.gone}
    least = min((known[rank] for rank in (known.keys() & set(culprits)) or known), default=None)
    return "" if least is None else f" for {least:.1f} s"


def _outside(everyone: Collection[Evidence], here: Sequence[Evidence]) -> list[int]:
    """Return those that have left ``init_dist``'s block and run on, if no rank is inside."""
    return [] if here else [one.rank for one in everyone if one.outside]


def _gone(everyone: Collection[Evidence], here: Sequence[Evidence]) -> list[int]:
    """Those that are gone, when others are still at work: at the end of the job all leave, one before the other."""
    return [one.rank for one in everyone if one.gone] if any(not one.leaving for one in here) else []


def _early(here: Sequence[Evidence]) -> list[int]:
    """Those at the end of the block, when the others wait inside it for other ranks, and not for something of their own."""
    inside = [one for one in here if not one.leaving]
    told = any(one.record is not None for one in here)  # if nobody was asked, waiting is what one would expect
    waiting = all(one.record.waits if one.record is not None else not told for one in inside)
    return [one.rank for one in here if one.leaving] if inside and waiting else []


def _silent(here: Sequence[Evidence]) -> list[int]:
    """Those that wrote nothing down, when others did."""
    silent = [one.rank for one in here if one.record is None]
    return silent if len(silent) < len(here) else []


def _strangers(stops: Sequence[Stop]) -> list[int]:
    """The smaller part of those that disagree about a collective."""
    for stop in stops:
        if stop.others:
            return sorted(stop.waiting if len(stop.waiting) < len(stop.others) else stop.others)
    return []


def _lacking(stops: Sequence[Stop], *, wait: bool) -> list[int]:
    """Those that others wait for, and that themselves ``wait`` for others or do not."""
    waiting = {rank for stop in stops if stop.lacking for rank in stop.waiting}
    return sorted({rank for stop in stops for rank in stop.lacking if (rank in waiting) == wait})


def _behind(here: Sequence[Evidence]) -> list[int]:
    least = min((one.passed for one in here), default=0)
    behind = [one.rank for one in here if one.passed == least]
    return behind if len(behind) < len(here) else []


def _describe(stop: Stop, by_rank: Mapping[int, Evidence], *, hang: bool) -> str:
    what, group = stop.collective, f"of group {stop.group.name}"
    waiting = f"{name_ranks(stop.waiting)} {_verb(stop.waiting, 'wait')}"
    if stop.others:
        rank, other = min(stop.others.items())
        ours, theirs = f"{what.op} {list(what.sizes)}", f"{name_ranks([rank])} {other.op} {list(other.sizes)}"
        run = _verb(stop.waiting, "run")
        return f"as collective #{what.number} {group} {name_ranks(stop.waiting)} {run} {ours}, but {theirs}"
    if stop.lacking:
        have = "has" if len(stop.lacking) == 1 else "have"
        where = _where(stop.lacking, by_rank)
        return f"{name_ranks(stop.lacking)} {have} not entered {what} {group}, where {waiting}{where}"
    gone = [rank for rank in stop.unknown if rank in by_rank and by_rank[rank].gone]
    mute = [rank for rank in stop.unknown if rank in by_rank and not by_rank[rank].gone]
    if gone or mute:
        ended = f"; {name_ranks(gone)} ended" if gone else ""
        silent = f"; {name_ranks(mute)} wrote nothing down" if mute else ""
        return f"{waiting} in {what} {group}{ended}{silent}"
    if stop.unknown:
        return f"{waiting} in {what} {group} for ranks of other nodes; see what their launchers say"
    doubt = ": is the network between them sound?" if hang else ""  # who has only asked has caught it in passing
    return f"{waiting} in {what} {group}, and all its ranks have come{doubt}"


def _where(ranks: Collection[int], by_rank: Mapping[int, Evidence]) -> str:
    """In which line of the program they are, when it is the same for all: another line of the message has the path."""
    places = {short_place(by_rank[rank].stacks) for rank in ranks}
    place = places.pop() if len(places) == 1 else None
    return "" if place is None else f"; {'it is' if len(ranks) == 1 else 'they are'} in {place}"


def _place(one: Evidence) -> str:
    """Where a rank stands: in the program, and as its last point of progress."""
    frame = own_frame(one.stacks)
    where = ("..." + frame[-_MESSAGE:] if len(frame) > _MESSAGE else frame) if frame is not None else "its stack is not known"
    later = "" if one.record is not None else " or later"  # not every point is reported
    doing = f" ({one.doing}, point of progress {one.passed}{later})" if one.doing else ""
    died = f"; it ended when it was asked ({describe_end(one.died)})" if one.died is not None else ""
    return f"{where}{doing}{died}"


def _places(ranks: Iterable[Evidence]) -> list[str]:
    """Where ranks stand, those together that stand in the same place, and the odd ones first: they are looked for."""
    places: dict[str, list[int]] = {}
    for one in ranks:
        places.setdefault(_place(one), []).append(one.rank)
    return [f"{name_ranks(there)}: {place}" for place, there in sorted(places.items(), key=lambda item: len(item[1]))]


def _first(lines: Iterable[str]) -> list[str]:
    """Some of the lines, indented."""
    shown = [f"  {line}" for line in lines]
    return (
        shown if len(shown) <= _AT_MOST else [*shown[: _AT_MOST - 1], f"  ... and {len(shown) - _AT_MOST + 1} more like these"]
    )


def name_ranks(ranks: Collection[int]) -> str:
    """``rank 1``, ``ranks 0, 2``, or ``ranks 0, 1, 2 and 61 more``."""
    first = sorted(ranks)[:_RANKS_NAMED]
    more = f" and {len(ranks) - len(first)} more" if len(ranks) > len(first) else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, first))}{more}"


def _verb(ranks: Collection[int], verb: str) -> str:
    return verb if len(ranks) != 1 else f"{verb}s"
