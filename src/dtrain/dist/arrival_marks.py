"""Find the ranks that did not arrive, through a few counters of the rendezvous store. Contains no store and no clock.

Each rank whose collective failed sets its bits in a counter that 24 ranks share. The first of them waits for the marks of the
others, reads all counters and writes the report. The other ranks wait for the report. So a rank makes a few requests, whatever
the number of ranks.

Each function is a generator of store requests. ``timeout_report`` runs it on the store, and a simulation on a virtual store.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")

# Each rank has two bits of a counter. A counter of the store is a signed number of 64 bits.
_RANKS_PER_COUNTER = 24
# Marks of a rank by the time that it waited: below half of the timeout, below the timeout, and about the timeout.
EARLY, WAITED, TIMED_OUT = 1, 2, 3
# Fractions of the timeout. A wait that is shorter than the last was ended by the failure of another rank.
_WAITED_FRACTION, _TIMED_OUT_FRACTION = 0.5, 0.9
_POLL_S = 0.1
# Pause between requests for each rank, so that the requests of all ranks do not keep the store busy.
_POLL_S_PER_RANK = 2e-4
# Longest time to wait for marks, as long as more marks arrive. Times ``grace_s``.
_MAX_GRACES = 3
# Missing ranks whose notes are read.
_MAX_NOTES = 4


class Add(NamedTuple):
    """Add ``value`` to a counter; the answer is the new number."""

    key: str
    value: int


class SetOnce(NamedTuple):
    """Set ``key`` if no rank has set it; the answer is the text that is set."""

    key: str
    text: str


class Set(NamedTuple):
    """Set ``key``."""

    key: str
    text: str


class Read(NamedTuple):
    """Wait up to ``timeout_s`` for ``key``; the answer is its text, or None."""

    key: str
    timeout_s: float


class Sleep(NamedTuple):
    """Wait ``seconds``; the answer is the time in seconds."""

    seconds: float


StoreRequest: TypeAlias = Add | SetOnce | Set | Read | Sleep
StoreAnswer: TypeAlias = int | str | float | None
StoreProtocol: TypeAlias = Generator[StoreRequest, StoreAnswer, T]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalReport:
    """Ranks that did not arrive at a call, and the ranks that did.

    Args:
        missing: ranks without a mark.
        late: ranks that arrived after others had timed out.
        timed_out: if True, some rank has waited for the whole timeout.
        callers: up to two ranks that arrived with different callers.
        notes: errors of missing ranks that have left.
    """

    missing: Sequence[int] = ()
    late: Sequence[int] = ()
    timed_out: bool = False
    callers: Mapping[int, str] = field(default_factory=dict)
    notes: Mapping[int, str] = field(default_factory=dict)

    def encode(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> ArrivalReport:
        """Return the report of ``encode``."""
        values = json.loads(text)
        for name in ("callers", "notes"):
            values[name] = {int(rank): value for rank, value in values[name].items()}
        return cls(**values)


def report_arrival(
    call: str, rank: int, world_size: int, *, caller: str, waited_s: float, timeout_s: float, grace_s: float
) -> StoreProtocol[ArrivalReport]:
    """Mark that ``rank`` has arrived at ``call``, and return the report of all ranks.

    Args:
        call: name of the call, equal on all ranks.
        rank: index of this rank.
        world_size: number of ranks.
        caller: name of the place where this rank made the call.
        waited_s: time that this rank has waited, in seconds.
        timeout_s: time after which a rank gives up, in seconds.
        grace_s: time to wait for the next mark, in seconds.
    """
    fraction = waited_s / timeout_s
    mark = EARLY if fraction < _WAITED_FRACTION else WAITED if fraction < _TIMED_OUT_FRACTION else TIMED_OUT
    yield add_mark(f"mark/{call}", rank, mark)
    mine = f"{rank} {caller}"
    first = str((yield SetOnce(f"mark/{call}/caller", mine)))
    if first.partition(" ")[2] != caller:
        yield SetOnce(f"mark/{call}/other caller", mine)
    if (yield Add(f"mark/{call}/count", 1)) != 1:
        text = yield Read(f"mark/{call}/report", (_MAX_GRACES + 1) * grace_s)
        if text is not None and rank not in (report := ArrivalReport.decode(str(text))).missing:
            return report
    # This rank is the first, or it arrived after the report, or the first rank is gone.
    report = yield from _collect(call, world_size, grace_s)
    yield Set(f"mark/{call}/report", report.encode())
    # This rank may serve the store, and the other ranks have not read the report yet.
    yield Sleep(2 * _poll_s(world_size))
    return report


def _poll_s(world_size: int) -> float:
    return max(_POLL_S, _POLL_S_PER_RANK * world_size)


def _collect(call: str, world_size: int, grace_s: float) -> StoreProtocol[ArrivalReport]:
    """Wait until all marks are there, or until no mark has arrived for ``grace_s``, and read them."""
    start = now = float((yield Sleep(0)) or 0)
    seen, deadline = 0, start + grace_s
    while True:
        count = int((yield Add(f"mark/{call}/count", 0)) or 0)
        if count > seen:
            seen, deadline = count, min(now + grace_s, start + _MAX_GRACES * grace_s)
        if count >= world_size or now >= deadline:
            break
        now = float((yield Sleep(min(_poll_s(world_size), deadline - now))) or 0)
    marks = yield from read_marks(f"mark/{call}", world_size)
    missing = [rank for rank, mark in enumerate(marks) if not mark]
    timed_out = TIMED_OUT in marks
    notes, callers = {}, {}
    for rank in missing[:_MAX_NOTES]:
        if (note := (yield Read(f"left/{rank}", 0))) is not None:
            notes[rank] = str(note)
    for key in ("caller", "other caller"):
        if (text := (yield Read(f"mark/{call}/{key}", 0))) is not None:
            number, _, caller = str(text).partition(" ")
            callers[int(number)] = caller
    late = [rank for rank, mark in enumerate(marks) if mark == EARLY] if timed_out else []
    return ArrivalReport(missing=missing, late=late, timed_out=timed_out, callers=callers, notes=notes)


def add_mark(prefix: str, rank: int, mark: int = EARLY) -> Add:
    """Return the request that marks ``rank``. Each rank adds one mark."""
    return Add(f"{prefix}/ranks/{rank // _RANKS_PER_COUNTER}", mark << 2 * (rank % _RANKS_PER_COUNTER))


def mark_of(counter: int, rank: int) -> int:
    """Return the mark of ``rank`` in the counter of ``add_mark``; 0 without a mark."""
    return counter >> 2 * (rank % _RANKS_PER_COUNTER) & 3


def read_marks(prefix: str, world_size: int) -> StoreProtocol[list[int]]:
    """Return the marks of all ranks. One request for every 24 ranks."""
    marks: list[int] = []
    for index in range(-(-world_size // _RANKS_PER_COUNTER)):
        counter = int((yield Add(f"{prefix}/ranks/{index}", 0)) or 0)
        marks += [mark_of(counter, rank) for rank in range(_RANKS_PER_COUNTER)]
    return marks[:world_size]


def format_ranks(ranks: Iterable[int], *, limit: int = 10) -> str:
    """Return ranks for a message, in at most ``limit`` parts: ``[3, 17, 40-47 and 12 more]``. Pure."""
    ordered = sorted(ranks)
    if not ordered:
        return "[]"
    starts = [ordered[0], *(rank for before, rank in pairwise(ordered) if rank != before + 1)]
    ends = [*(before for before, rank in pairwise(ordered) if rank != before + 1), ordered[-1]]
    parts: list[tuple[str, int]] = []
    for start, end in zip(starts, ends, strict=True):
        # Two or three neighbours are as short as a range.
        if end - start < 3:
            parts += [(str(rank), 1) for rank in range(start, end + 1)]
        else:
            parts.append((f"{start}-{end}", end - start + 1))
    shown = parts[:limit] if len(parts) > limit + 1 else parts
    hidden = len(ordered) - sum(number for _, number in shown)
    text = ", ".join(part for part, _ in shown)
    return f"[{text} and {hidden} more]" if hidden else f"[{text}]"
