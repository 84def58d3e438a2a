"""Where a thread stands, from what faulthandler wrote. Pure.

Which rank lacks which collective: the records of several ranks laid side by side. Pure."""

from __future__ import annotations

import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dtrain

_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+.*:$")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>[0-9]+) in (?P<function>.*)$')
_CURRENT = "Current thread"
_TRUNCATED = "..."  # instead of further threads
_INSTALLED = re.compile("-packages/|/torchinductor_")  # by pip, or made by torch.compile
_LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(dtrain.__file__).parent), "<")


def parse_main_thread(stacks: str) -> list[tuple[str, int, str]]:
    """File, line and function of the main thread's frames, innermost first; empty when there are none.

    faulthandler writes the newest thread first, so the main thread comes last. When there were too many threads to write, it is
    the one that got the signal: the kernel prefers the main thread.
    """
    threads: list[tuple[bool, list[tuple[str, int, str]]]] = []
    cut = False
    for line in stacks.splitlines():
        if _THREAD.match(line):
            threads.append((line.startswith(_CURRENT), []))
        elif threads and (match := _FRAME.match(line)):
            threads[-1][1].append((match["file"], int(match["line"]), match["function"]))
        cut = cut or line == _TRUNCATED
    candidates = [frames for current, frames in threads if current or not cut]
    return candidates[-1] if candidates else []


def find_user_frame(stacks: str, *, libraries: Iterable[str] = _LIBRARIES) -> str | None:
    """``file:line in function`` of the innermost frame of the main thread that is the user's own; None when there is none."""
    found = _select_user_frame(stacks, tuple(libraries))
    return None if found is None else "{}:{} in {}".format(*found)


def short_location(stacks: str) -> str | None:
    """The same as ``file:line`` without its folders."""
    found = _select_user_frame(stacks, _LIBRARIES)
    return None if found is None else f"{os.path.basename(found[0])}:{found[1]}"


def _select_user_frame(stacks: str, libraries: tuple[str, ...]) -> tuple[str, int, str] | None:
    frames = parse_main_thread(stacks)
    own = [frame for frame in frames if not frame[0].startswith(libraries) and not _INSTALLED.search(frame[0])]
    return next(iter(own or frames), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveGroup:
    """One process group of one backend, which counts its collectives from 1, in step on all ranks."""

    id: str
    backend: str
    name: str  # what the documentation calls it
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedCollective:
    """One collective that a rank has issued; ``waits``: it is not done."""

    number: int
    op: str
    sizes: Sequence[Sequence[int]] = ()
    waits: bool = False

    def __str__(self) -> str:
        return f"{self.op} #{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHistory:
    """What one rank has issued on one group: the number of the last collective, and the last few themselves."""

    last: int
    collectives: Mapping[int, IssuedCollective]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank wrote down: where its main thread had come, and what it has issued."""

    passed: int = 0
    doing: str = ""
    histories: Mapping[CollectiveGroup, GroupHistory] = field(default_factory=dict)

    @property
    def is_waiting(self) -> bool:
        """Whether a collective of this rank is not done."""
        return any(one.waits for history in self.histories.values() for one in history.collectives.values())


def parse_rank_record(text: str) -> RankRecord | None:
    """The record in ``text``, or None when there is none that can be read."""
    try:
        fields = json.loads(text)
        histories = dict(_parse_history(group) for group in fields["groups"])
        return RankRecord(passed=fields["passed"], doing=fields["doing"], histories=histories)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # a record only improves the message about a hang that was noticed anyway


def _parse_history(fields: dict[str, Any]) -> tuple[CollectiveGroup, GroupHistory]:
    group = CollectiveGroup(id=fields["id"], backend=fields["backend"], name=fields["name"], ranks=tuple(fields["ranks"]))
    issued = [IssuedCollective(**one) for one in fields["collectives"]]
    return group, GroupHistory(last=fields["last"], collectives={one.number: one for one in issued})


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledCollective:
    """The collective at which one group has stopped.

    ``waiting`` ranks are in it, ``missing`` ranks have not come, of ``unknown`` ranks there is no record, and ``mismatched`` run
    something else in its place.
    """

    group: CollectiveGroup
    collective: IssuedCollective
    waiting: Sequence[int]
    missing: Sequence[int] = ()
    unknown: Sequence[int] = ()
    mismatched: Mapping[int, IssuedCollective] = field(default_factory=dict)


def find_stalled(records: Mapping[int, RankRecord]) -> list[StalledCollective]:
    """Where the groups have stopped, those first that say most: another collective, a missing one, no record, all there."""
    groups = {group for record in records.values() for group in record.histories}
    stops = [stop for group in groups for stop in _find_group_stall(group, records)]
    return sorted(stops, key=_stall_sort_key)


def _stall_sort_key(stop: StalledCollective) -> tuple[bool, bool, bool, str, str, str]:
    group = stop.group
    return (not stop.mismatched, not stop.missing, not stop.unknown, group.id, group.backend, group.name)


def _find_group_stall(group: CollectiveGroup, records: Mapping[int, RankRecord]) -> Iterator[StalledCollective]:
    empty = GroupHistory(last=0, collectives={})
    told = {rank: records[rank].histories.get(group, empty) for rank in group.ranks if rank in records}
    numbers = [one.number for history in told.values() for one in history.collectives.values() if one.waits]
    if not numbers:
        return
    behind = min(history.last for history in told.values())
    # A rank may have issued several that wait. The first that somebody lacks is the one that keeps all others waiting.
    number = min((number for number in numbers if number > behind), default=min(numbers))
    there = {rank: history.collectives[number] for rank, history in told.items() if number in history.collectives}
    first = there[min(rank for rank, one in there.items() if one.waits)]
    yield StalledCollective(
        group=group,
        collective=first,
        waiting=[rank for rank, one in there.items() if one.waits and _is_same_operation(one, first)],
        missing=[rank for rank, history in told.items() if history.last < number],
        unknown=[rank for rank in group.ranks if rank not in records],
        mismatched={rank: one for rank, one in there.items() if not _is_same_operation(one, first)},
    )


def _is_same_operation(one: IssuedCollective, other: IssuedCollective) -> bool:
    """Whether two ranks do the same. Only an all-reduce must have equal sizes everywhere."""
    return one.op == other.op and (one.op != "all_reduce" or one.sizes == other.sizes)
