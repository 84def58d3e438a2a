"""Which rank lacks which collective: the records of several ranks laid side by side. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One process group of one backend, which counts its collectives from 1, in step on all ranks."""

    id: str
    backend: str
    name: str  # what the documentation calls it
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective that a rank has issued; ``waits``: it is not done."""

    number: int
    op: str
    sizes: Sequence[Sequence[int]] = ()
    waits: bool = False

    def __str__(self) -> str:
        return f"{self.op} #{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What one rank has issued on one group: the number of the last collective, and the last few themselves."""

    last: int
    collectives: Mapping[int, Collective]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one rank wrote down: where its main thread had come, and what it has issued."""

    passed: int = 0
    doing: str = ""
    histories: Mapping[Group, History] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        """Whether a collective of this rank is not done."""
        return any(one.waits for history in self.histories.values() for one in history.collectives.values())


def parse_record(text: str) -> Record | None:
    """The record in ``text``, or None when there is none that can be read."""
    try:
        fields = json.loads(text)
        histories = dict(_history(group) for group in fields["groups"])
        return Record(passed=fields["passed"], doing=fields["doing"], histories=histories)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # a record only improves the message about a hang that was noticed anyway


def _history(fields: dict[str, Any]) -> tuple[Group, History]:
    group = Group(id=fields["id"], backend=fields["backend"], name=fields["name"], ranks=tuple(fields["ranks"]))
    issued = [Collective(**one) for one in fields["collectives"]]
    return group, History(last=fields["last"], collectives={one.number: one for one in issued})


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The collective at which one group has stopped.

    ``waiting`` ranks are in it, ``lacking`` ranks have not come, of ``unknown`` ranks there is no record, and ``others`` run
    something else in its place.
    """

    group: Group
    collective: Collective
    waiting: Sequence[int]
    lacking: Sequence[int] = ()
    unknown: Sequence[int] = ()
    others: Mapping[int, Collective] = field(default_factory=dict)


def find_stops(records: Mapping[int, Record]) -> list[Stop]:
    """Where the groups have stopped, those first that say most: another collective, a missing one, no record, all there."""
    groups = {group for record in records.values() for group in record.histories}
    stops = [stop for group in groups for stop in _stop(group, records)]
    return sorted(stops, key=_says_little)


def _says_little(stop: Stop) -> tuple[bool, bool, bool, str, str, str]:
    group = stop.group
    return (not stop.others, not stop.lacking, not stop.unknown, group.id, group.backend, group.name)


def _stop(group: Group, records: Mapping[int, Record]) -> Iterator[Stop]:
    empty = History(last=0, collectives={})
    told = {rank: records[rank].histories.get(group, empty) for rank in group.ranks if rank in records}
    numbers = [one.number for history in told.values() for one in history.collectives.values() if one.waits]
    if not numbers:
        return
    behind = min(history.last for history in told.values())
    # A rank may have issued several that wait. The first that somebody lacks is the one that keeps all others waiting.
    number = min((number for number in numbers if number > behind), default=min(numbers))
    there = {rank: history.collectives[number] for rank, history in told.items() if number in history.collectives}
    first = there[min(rank for rank, one in there.items() if one.waits)]
    yield Stop(
        group=group,
        collective=first,
        waiting=[rank for rank, one in there.items() if one.waits and _same(one, first)],
        lacking=[rank for rank, history in told.items() if history.last < number],
        unknown=[rank for rank in group.ranks if rank not in records],
        others={rank: one for rank, one in there.items() if not _same(one, first)},
    )


def _same(one: Collective, other: Collective) -> bool:
    """Whether two ranks do the same. Only an all-reduce must have equal sizes everywhere."""
    return one.op == other.op and (one.op != "all_reduce" or one.sizes == other.sizes)
