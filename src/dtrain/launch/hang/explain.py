"""Why a job hangs, in at most twelve lines, from all that is known about its ranks. Pure.

The whole about a hang in one file: the message, the groups' last collectives rank by rank, and all stacks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from dtrain.launch.failure import describe_exit
from dtrain.launch.hang.progress_timer import RankProgress
from dtrain.launch.hang.rank_records import (
    CollectiveGroup,
    GroupHistory,
    RankRecord,
    StalledCollective,
    find_stalled,
    find_user_frame,
    short_location,
)

_MAX_LINES_PER_KIND = 3  # lines of one kind
_MAX_RANKS_NAMED = 8
_MAX_LOCATION_CHARS = 200  # characters of a place in the program: a path may be long, and the end of it says most
_STOPPED, _IN_KERNEL = ("T", "t"), "D"  # letters of /proc/PID/stat


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence:
    """What is known about one rank of this node."""

    rank: int
    pid: int | None = None
    progress: RankProgress | None = None  # what it reported; None: it has not come to init_dist's block
    silent_s: float | None = None  # since then, when it was asked
    exit_code: int | None = None  # its exit code, a signal as a negative number
    exit_code_after_query: int | None = (
        None  # the same, of one that ended only when it was asked: that is not what was the matter with it
    )
    state: str = ""  # the letter of its process in /proc
    record: RankRecord | None = None  # what it wrote down
    stacks: str = ""  # what faulthandler wrote

    @property
    def is_gone(self) -> bool:
        """Whether nothing is expected of it any more."""
        return self.exit_code is not None or (self.progress is not None and self.progress.phase == "closed")

    @property
    def is_past_block(self) -> bool:
        """Return True if its process runs on after ``init_dist``'s block."""
        return self.is_gone and self.exit_code is None

    @property
    def is_leaving(self) -> bool:
        """Whether it waits for the others at the end of init_dist's block."""
        return self.progress is not None and self.progress.phase == "leaving"

    @property
    def is_stopped(self) -> bool:
        return self.state in _STOPPED

    @property
    def passed(self) -> int:
        """How many points of progress it has passed: its own count is newer than what it reported."""
        reported = self.progress.passed if self.progress is not None else 0
        return max(reported, self.record.passed) if self.record is not None else reported

    @property
    def doing(self) -> str:
        reported = self.progress.doing if self.progress is not None else ""
        return self.record.doing or reported if self.record is not None else reported


def explain_stall(evidence: Collection[RankEvidence], *, world_size: int, timeout_s: float | None, report: Path) -> list[str]:
    """The message: one line that names the rank that stopped and why, then indented ones with what is known.

    Args:
        evidence: one for each rank of this node.
        world_size: ranks of the whole job.
        timeout_s: how long there was no progress. None: somebody has asked, so it is what was heard of those ranks last.
        report: the file with the whole.
    """
    by_rank = {one.rank: one for one in sorted(evidence, key=lambda one: one.rank)}
    stops = find_stalled({rank: one.record for rank, one in by_rank.items() if one.record is not None and not one.is_gone})
    culprits, reason = _find_culprits(by_rank, stops)
    who = f"{format_ranks(culprits)} of {world_size}"
    quiet = f" for {timeout_s:g} s" if timeout_s is not None else _format_silence(by_rank, culprits)
    what = "asked" if timeout_s is None else "hang"
    lines = [f"dtrain: launch: {what}: {who} {reason.format(time=quiet)}; see {report}"]
    after = not any(not one.is_gone for one in by_rank.values())  # the block: no rank is inside
    lines += _indent_first(
        _group_locations([one for rank in culprits if not (one := by_rank[rank]).is_gone or (after and one.is_past_block)])
    )
    lines += _indent_first(_describe_stall(stop, by_rank, hang=timeout_s is not None) for stop in stops)
    lines += _indent_first(_group_locations([one for rank, one in by_rank.items() if rank not in culprits and not one.is_gone]))
    return ["".join(c if c.isprintable() else "?" for c in line) for line in lines]


def _find_culprits(by_rank: Mapping[int, RankEvidence], stops: Sequence[StalledCollective]) -> tuple[list[int], str]:
    """The ranks that stopped and what is the matter with them. What is seen from outside is most certain and comes first."""
    here = [one for one in by_rank.values() if not one.is_gone]
    for ranks, reason in (
        (_ranks_past_block(by_rank.values(), here), "did not end after init_dist's block, no progress{time}"),
        (_exited_ranks(by_rank.values(), here), "ended while the others went on, no progress{time}"),
        ([one.rank for one in here if one.is_stopped], "made no progress{time} (stopped, as by SIGSTOP)"),
        (_early_ranks(here), "returned early, to the end of init_dist's block, no progress{time}"),
        ([one.rank for one in here if one.progress is None], "never came to init_dist's block, no progress{time}"),
        (
            [one.rank for one in here if one.state == _IN_KERNEL],
            "made no progress{time} (in the kernel: disk or driver)",
        ),
        (_silent_ranks(here), "made no progress{time} (no answer: something holds the interpreter)"),
        (_mismatched_ranks(stops), "ran another collective than the others, no progress{time}"),
        (_missing_ranks(stops, wait=False), "made no progress{time}, and others wait in a collective"),
        (_missing_ranks(stops, wait=True), "wait for each other in different collectives, no progress{time}"),
        (_slowest_ranks(here), "made no progress{time}, after fewer steps than the others"),
    ):
        if ranks:
            return ranks, reason
    return [one.rank for one in here], "made no progress{time}"


def _format_silence(by_rank: Mapping[int, RankEvidence], culprits: Collection[int]) -> str:
    """Since when nothing was heard of these ranks; of all, when it is not known of these."""
    known = {rank: one.silent_s for rank, one in by_rank.items() if one.silent_s is not None and not one.is_gone}
    least = min((known[rank] for rank in (known.keys() & set(culprits)) or known), default=None)
    return "" if least is None else f" for {least:.1f} s"


def _ranks_past_block(everyone: Collection[RankEvidence], here: Sequence[RankEvidence]) -> list[int]:
    """Return those that have left ``init_dist``'s block and run on, if no rank is inside."""
    return [] if here else [one.rank for one in everyone if one.is_past_block]


def _exited_ranks(everyone: Collection[RankEvidence], here: Sequence[RankEvidence]) -> list[int]:
    """Those that are gone, when others are still at work: at the end of the job all leave, one before the other."""
    return [one.rank for one in everyone if one.is_gone] if any(not one.is_leaving for one in here) else []


def _early_ranks(here: Sequence[RankEvidence]) -> list[int]:
    """Those at the end of the block, when the others wait inside it for other ranks, and not for something of their own."""
    inside = [one for one in here if not one.is_leaving]
    told = any(one.record is not None for one in here)  # if nobody was asked, waiting is what one would expect
    waiting = all(one.record.is_waiting if one.record is not None else not told for one in inside)
    return [one.rank for one in here if one.is_leaving] if inside and waiting else []


def _silent_ranks(here: Sequence[RankEvidence]) -> list[int]:
    """Those that wrote nothing down, when others did."""
    silent = [one.rank for one in here if one.record is None]
    return silent if len(silent) < len(here) else []


def _mismatched_ranks(stops: Sequence[StalledCollective]) -> list[int]:
    """The smaller part of those that disagree about a collective."""
    for stop in stops:
        if stop.mismatched:
            return sorted(stop.waiting if len(stop.waiting) < len(stop.mismatched) else stop.mismatched)
    return []


def _missing_ranks(stops: Sequence[StalledCollective], *, wait: bool) -> list[int]:
    """Those that others wait for, and that themselves ``wait`` for others or do not."""
    waiting = {rank for stop in stops if stop.missing for rank in stop.waiting}
    return sorted({rank for stop in stops for rank in stop.missing if (rank in waiting) == wait})


def _slowest_ranks(here: Sequence[RankEvidence]) -> list[int]:
    least = min((one.passed for one in here), default=0)
    behind = [one.rank for one in here if one.passed == least]
    return behind if len(behind) < len(here) else []


def _describe_stall(stop: StalledCollective, by_rank: Mapping[int, RankEvidence], *, hang: bool) -> str:
    what, group = stop.collective, f"of group {stop.group.name}"
    waiting = f"{format_ranks(stop.waiting)} {_conjugate(stop.waiting, 'wait')}"
    if stop.mismatched:
        rank, other = min(stop.mismatched.items())
        ours, theirs = f"{what.op} {list(what.sizes)}", f"{format_ranks([rank])} {other.op} {list(other.sizes)}"
        run = _conjugate(stop.waiting, "run")
        return f"as collective #{what.number} {group} {format_ranks(stop.waiting)} {run} {ours}, but {theirs}"
    if stop.missing:
        have = "has" if len(stop.missing) == 1 else "have"
        where = _common_location(stop.missing, by_rank)
        return f"{format_ranks(stop.missing)} {have} not entered {what} {group}, where {waiting}{where}"
    gone = [rank for rank in stop.unknown if rank in by_rank and by_rank[rank].is_gone]
    mute = [rank for rank in stop.unknown if rank in by_rank and not by_rank[rank].is_gone]
    if gone or mute:
        ended = f"; {format_ranks(gone)} ended" if gone else ""
        silent = f"; {format_ranks(mute)} wrote nothing down" if mute else ""
        return f"{waiting} in {what} {group}{ended}{silent}"
    if stop.unknown:
        return f"{waiting} in {what} {group} for ranks of other nodes; see what their launchers say"
    doubt = ": is the network between them sound?" if hang else ""  # who has only asked has caught it in passing
    return f"{waiting} in {what} {group}, and all its ranks have come{doubt}"


def _common_location(ranks: Collection[int], by_rank: Mapping[int, RankEvidence]) -> str:
    """In which line of the program they are, when it is the same for all: another line of the message has the path."""
    places = {short_location(by_rank[rank].stacks) for rank in ranks}
    place = places.pop() if len(places) == 1 else None
    return "" if place is None else f"; {'it is' if len(ranks) == 1 else 'they are'} in {place}"


def _describe_location(one: RankEvidence) -> str:
    """Where a rank stands: in the program, and as its last point of progress."""
    frame = find_user_frame(one.stacks)
    where = (
        ("..." + frame[-_MAX_LOCATION_CHARS:] if len(frame) > _MAX_LOCATION_CHARS else frame)
        if frame is not None
        else "its stack is not known"
    )
    later = "" if one.record is not None else " or later"  # not every point is reported
    doing = f" ({one.doing}, point of progress {one.passed}{later})" if one.doing else ""
    died = (
        f"; it ended when it was asked ({describe_exit(one.exit_code_after_query)})"
        if one.exit_code_after_query is not None
        else ""
    )
    return f"{where}{doing}{died}"


def _group_locations(ranks: Iterable[RankEvidence]) -> list[str]:
    """Where ranks stand, those together that stand in the same place, and the odd ones first: they are looked for."""
    places: dict[str, list[int]] = {}
    for one in ranks:
        places.setdefault(_describe_location(one), []).append(one.rank)
    return [f"{format_ranks(there)}: {place}" for place, there in sorted(places.items(), key=lambda item: len(item[1]))]


def _indent_first(lines: Iterable[str]) -> list[str]:
    """Some of the lines, indented."""
    shown = [f"  {line}" for line in lines]
    return (
        shown
        if len(shown) <= _MAX_LINES_PER_KIND
        else [*shown[: _MAX_LINES_PER_KIND - 1], f"  ... and {len(shown) - _MAX_LINES_PER_KIND + 1} more like these"]
    )


def format_ranks(ranks: Collection[int]) -> str:
    """``rank 1``, ``ranks 0, 2``, or ``ranks 0, 1, 2 and 61 more``."""
    first = sorted(ranks)[:_MAX_RANKS_NAMED]
    more = f" and {len(ranks) - len(first)} more" if len(ranks) > len(first) else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, first))}{more}"


def _conjugate(ranks: Collection[int], verb: str) -> str:
    return verb if len(ranks) != 1 else f"{verb}s"


def write_hang_report(path: Path, lines: Collection[str], evidence: Collection[RankEvidence], *, queried_at: float) -> None:
    """Write the report to ``path``, atomically; a folder that is gone or a full disk costs the report only.

    Args:
        path: the file.
        lines: the message, which comes first, up to an empty line.
        evidence: what it rests on.
        queried_at: when the ranks were asked, in seconds since 1970.
    """
    text = "\n".join(
        (*lines, "", f"as of {format_time(queried_at)}", "", *_format_groups(evidence), *_format_ranks_section(evidence), "")
    )
    partial = path.with_suffix(".partial")
    with contextlib.suppress(OSError):
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(partial, path)


def format_time(at: float) -> str:
    """A time in seconds since 1970, as a reader wants it: this machine's clock."""
    return datetime.fromtimestamp(at).astimezone().isoformat(sep=" ", timespec="seconds")


def extract_message(report: str) -> str:
    """The message with which a report begins."""
    return report.partition("\n\n")[0]


def _format_groups(evidence: Collection[RankEvidence]) -> Iterator[str]:
    """Each group, and where each of its ranks is in it."""
    records = {one.rank: one.record for one in evidence if one.record is not None}
    groups: dict[CollectiveGroup, dict[int, GroupHistory]] = {}
    for rank, record in sorted(records.items()):
        for group, history in record.histories.items():
            groups.setdefault(group, {})[rank] = history
    for group, told in sorted(groups.items(), key=lambda item: (item[0].id, item[0].backend)):
        yield f"group {group.name} ({group.backend}): {format_ranks(group.ranks)}"
        for rank in group.ranks:
            yield f"  rank {rank}: {_format_history(told[rank]) if rank in told else _format_missing_history(rank, records)}"
        yield ""


def _format_history(history: GroupHistory) -> str:
    """The last collective that is done, and those that wait."""
    waiting = [str(one) for _, one in sorted(history.collectives.items()) if one.waits]
    done = [str(one) for _, one in sorted(history.collectives.items()) if not one.waits]
    return f"last done {done[-1] if done else 'not known'}" + (f"; waits in {', '.join(waiting)}" if waiting else "")


def _format_missing_history(rank: int, records: Mapping[int, object]) -> str:
    return "no collective yet" if rank in records else "wrote nothing down"


def _format_ranks_section(evidence: Collection[RankEvidence]) -> Iterator[str]:
    for one in sorted(evidence, key=lambda one: one.rank):
        yield f"rank {one.rank}: {', '.join(_describe_state(one))}"
        for group, history in one.record.histories.items() if one.record is not None else ():
            yield f"  last collectives of group {group.name} ({group.backend})"
            for _, collective in sorted(history.collectives.items()):
                yield f"    {collective} {list(collective.sizes)}{' waits' if collective.waits else ''}"
        yield "  stacks" if one.stacks.strip() else "  its stacks are not known"
        yield from (f"    {line}" for line in one.stacks.splitlines())
        yield ""


def _describe_state(one: RankEvidence) -> Iterator[str]:
    if one.exit_code is not None:
        yield describe_exit(one.exit_code)
    elif one.progress is None:
        yield "has not come to init_dist's block" if one.record is None else "its launcher wrote nothing about it"
    else:
        yield {
            "open": "in init_dist's block",
            "leaving": "at the end of init_dist's block",
            "closed": "has left init_dist's block",
        }[one.progress.phase]
    if one.doing:
        yield f"{one.doing}, point of progress {one.passed}"
    if one.silent_s is not None:
        yield f"last heard of {one.silent_s:.1f} s before"
    if one.pid is not None:
        yield f"process {one.pid}"
    if one.state:
        yield f"its state {one.state}"
    if one.exit_code_after_query is not None:
        yield f"ended when it was asked ({describe_exit(one.exit_code_after_query)})"
