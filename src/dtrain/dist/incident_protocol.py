"""Find the ranks that failed, through a few keys of the rendezvous store. Contains no store, no socket and no clock.

As soon as a rank learns of a failure, it gives one sign: that it waits in a collective, that it computes, that it has failed
itself, or that it lost the connection to a rank that has said nothing. Then it closes its connections to other ranks, which
wakes their watches (``incident``), so that all ranks learn of the failure within a few messages. Signs are three bits in a
counter that 21 ranks share. One rank waits for the signs of the others, reads all counters and writes the report. The other
ranks wait for the report. So a rank makes a few requests, whatever the number of ranks. ``format_missing_ranks`` makes the
report a message.

A rank gives its sign before it closes a connection. So a rank that lost a connection knows the reason: the other rank has
given a sign, and is not the cause; or it has not, and is dead, or only their connection is broken.

Each function is a generator of store requests. ``incident`` runs it on the store, and a simulation on a virtual store.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeAlias, TypeVar

T = TypeVar("T")

_BITS = 3
# A counter of the store is a signed number of 64 bits.
_RANKS_PER_COUNTER = 63 // _BITS
# Signs of a rank that waits in a collective, by the time that it waited: below half of the timeout, below the timeout, and
# about the timeout.
EARLY, WAITED, TIMED_OUT = 1, 2, 3
# The rank lives, and is in no collective.
BUSY = 4
# The rank has failed by itself. Its error is in a key of its own.
FAILED = 5
# The rank lost a connection, and the cause has given no sign. The other rank, or the error, is in a key of its own.
LOST = 6
# Fractions of the timeout. A wait that is shorter than the last was ended by the failure of another rank.
_WAITED_FRACTION, _TIMED_OUT_FRACTION = 0.5, 0.9
_POLL_S = 0.1
# Pause between requests for each rank, so that the requests of all ranks do not keep the store busy.
_POLL_S_PER_RANK = 2e-4
# Longest time to wait for signs, as long as more signs arrive. Times ``grace_s``.
_MAX_GRACES = 3
# Different errors that a report contains. Ranks with the same error share it.
_MAX_ERRORS = 16
# Characters of an error that a rank tells the other ranks.
_MAX_ERROR_LENGTH = 500
# Connections between living ranks that a report contains.
_MAX_PAIRS = 16
# Different errors and nodes in a message. All ranks are named.
_MAX_NOTES, _MAX_NODES = 8, 8


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


class Spread(NamedTuple):
    """Close the connections of this rank, so that the watches of other ranks wake. Asks the store nothing."""


StoreRequest: TypeAlias = Add | SetOnce | Set | Read | Sleep | Spread
StoreAnswer: TypeAlias = int | str | float | None
StoreProtocol: TypeAlias = Generator[StoreRequest, StoreAnswer, T]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """First sign of a rank in an incident.

    Args:
        mark: ``EARLY``, ``WAITED``, ``TIMED_OUT``, ``BUSY``, ``FAILED`` or ``LOST``.
        caller: name of the place where the rank waits; "" if unknown.
        error: error of a rank that has failed, or of a collective that lost an unknown rank.
        peer: rank whose connection is lost. A peer that has given a sign is not the cause, and then ``mark`` counts;
            otherwise the sign is ``LOST``.
    """

    mark: int
    caller: str = ""
    error: str = ""
    peer: int | None = None


def mark_wait(waited_s: float, timeout_s: float) -> int:
    """Return the mark of a rank that has waited ``waited_s`` seconds in a collective."""
    fraction = waited_s / timeout_s
    return EARLY if fraction < _WAITED_FRACTION else WAITED if fraction < _TIMED_OUT_FRACTION else TIMED_OUT


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalReport:
    """Ranks that caused an incident.

    Args:
        missing: ranks that failed or gave no sign; after a timeout without such ranks, ranks that were in no collective.
        silent: those of ``missing`` that gave no sign.
        late: ranks that arrived after others had timed out.
        timed_out: if True, some rank has waited for the whole timeout.
        callers: up to two ranks that waited at different places.
        notes: errors of ranks that have failed. If ranks have the same error, only the first of them is listed.
        pairs: pairs of living ranks whose connection was lost.
        broken: errors of ranks whose collective failed by itself, although no rank is missing.
    """

    missing: Sequence[int] = ()
    silent: Sequence[int] = ()
    late: Sequence[int] = ()
    timed_out: bool = False
    callers: Mapping[int, str] = field(default_factory=dict)
    notes: Mapping[int, str] = field(default_factory=dict)
    pairs: Sequence[Sequence[int]] = ()
    broken: Mapping[int, str] = field(default_factory=dict)

    def encode(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> ArrivalReport:
        """Return the report of ``encode``."""
        values = json.loads(text)
        for name in ("callers", "notes", "broken"):
            values[name] = {int(rank): value for rank, value in values[name].items()}
        return cls(**values)


def give_sign(board: str, rank: int, sign: Sign) -> StoreProtocol[int]:
    """Give the sign of ``rank`` once, and return its mark. The rank must not close a connection before.

    Args:
        board: prefix of the keys of the incident, equal on all ranks.
        rank: index of this rank.
        sign: the sign.
    """
    mark = sign.mark
    if sign.peer is not None and not mark_of(int((yield Add(_counter_key(board, sign.peer), 0)) or 0), sign.peer):
        mark = LOST
        yield Set(f"{board}/lost/{rank}", str(sign.peer))
    elif mark in (FAILED, LOST):
        yield Set(f"{board}/lost/{rank}" if mark == LOST else f"{board}/left/{rank}", f" {sign.error[:_MAX_ERROR_LENGTH]}")
    elif sign.caller:
        mine = f"{rank} {sign.caller}"
        first = str((yield SetOnce(f"{board}/caller", mine)))
        if first.partition(" ")[2] != sign.caller:
            yield SetOnce(f"{board}/other caller", mine)
    if mark == FAILED:
        # This rank reads no report.
        yield Add(f"{board}/read", 1)
    yield add_mark(board, rank, mark)
    yield Add(f"{board}/count", 1)
    return mark


def change_to_failed(board: str, rank: int, mark: int, error: str) -> StoreProtocol[None]:
    """Change the sign of ``rank`` from ``mark`` to ``FAILED``: the rank has an error of its own."""
    yield Set(f"{board}/left/{rank}", f" {error[:_MAX_ERROR_LENGTH]}")
    yield add_mark(board, rank, FAILED - mark)


def find_report(
    board: str, rank: int, world_size: int, *, grace_s: float, settle_s: float = 0.0
) -> StoreProtocol[ArrivalReport]:
    """Return the report of all ranks. This rank has given its sign.

    Args:
        board: prefix of the keys of the incident, equal on all ranks.
        rank: index of this rank.
        world_size: number of ranks.
        grace_s: time to wait for the next sign, in seconds.
        settle_s: time to wait for the signs of all ranks before this rank closes its connections, in seconds. If all ranks make
            one mistake, they stay connected.
    """
    if not settle_s or (yield from _count_signs(board, world_size, settle_s, settle_s)) < world_size:
        yield Spread()
    if (yield Add(f"{board}/readers", 1)) != 1:
        text = yield Read(f"{board}/report", (_MAX_GRACES + 1) * grace_s)
        if text is not None and rank not in (report := ArrivalReport.decode(str(text))).silent:
            yield Add(f"{board}/read", 1)
            return report
    # This rank is the first, or it gave its sign after the report, or the first rank is gone.
    yield from _count_signs(board, world_size, grace_s, _MAX_GRACES * grace_s)
    marks = yield from read_marks(board, world_size)
    errors, peers, broken, callers = {}, {}, {}, {}
    for index, mark in enumerate(marks):
        if mark == FAILED:
            errors[index] = str((yield Read(f"{board}/left/{index}", 0)) or "")[1:]
        elif mark == LOST:
            text = str((yield Read(f"{board}/lost/{index}", 0)) or " ")
            if text.startswith(" "):
                broken[index] = text[1:]
            else:
                peers[index] = int(text)
    for key in ("caller", "other caller"):
        if (text := str((yield Read(f"{board}/{key}", 0)) or "")) != "":
            number, _, caller = text.partition(" ")
            callers[int(number)] = caller
    report = judge(marks, errors=errors, peers=peers, broken=broken, callers=callers)
    yield Set(f"{board}/report", report.encode())
    yield Add(f"{board}/read", 1)
    return report


def wait_for_readers(board: str, number: int, world_size: int, limit_s: float) -> StoreProtocol[None]:
    """Wait until ``number`` ranks have read the report. This rank serves the store, which ends with it."""
    now = float((yield Sleep(0)) or 0)
    deadline = now + limit_s
    while int((yield Add(f"{board}/read", 0)) or 0) < number and now < deadline:
        now = float((yield Sleep(_poll_s(world_size))) or 0)


def _poll_s(world_size: int) -> float:
    return max(_POLL_S, _POLL_S_PER_RANK * world_size)


def _count_signs(board: str, world_size: int, pause_s: float, limit_s: float) -> StoreProtocol[int]:
    """Wait until all signs are there, or until no sign has arrived for ``pause_s``, and return their number."""
    start = now = float((yield Sleep(0)) or 0)
    seen, deadline = 0, start + pause_s
    while True:
        count = int((yield Add(f"{board}/count", 0)) or 0)
        if count > seen:
            seen, deadline = count, min(now + pause_s, start + limit_s)
        if count >= world_size or now >= deadline:
            return count
        now = float((yield Sleep(min(_poll_s(world_size), deadline - now))) or 0)


def judge(
    marks: Sequence[int],
    *,
    errors: Mapping[int, str],
    peers: Mapping[int, int],
    broken: Mapping[int, str],
    callers: Mapping[int, str],
) -> ArrivalReport:
    """Return the ranks that caused an incident. Pure.

    Args:
        marks: sign of each rank, 0 without a sign.
        errors: errors of ranks that have failed.
        peers: for ranks that lost a connection, the rank at the other end.
        broken: for ranks that lost a connection to an unknown rank, their error.
        callers: up to two ranks that waited at different places.
    """
    silent = [rank for rank, mark in enumerate(marks) if not mark]
    # The first rank of each different error.
    first_ranks: dict[str, int] = {}
    for rank, error in sorted(errors.items()):
        first_ranks.setdefault(error, rank)
    pairs = sorted({(min(pair), max(pair)) for pair in peers.items()})
    timed_out = TIMED_OUT in marks
    missing = sorted({*silent, *errors})
    if missing:
        # They closed the connections.
        pairs = []
    if timed_out and not missing and not pairs:
        missing = [rank for rank, mark in enumerate(marks) if mark == BUSY]
    return ArrivalReport(
        missing=missing,
        silent=silent,
        late=[rank for rank, mark in enumerate(marks) if mark == EARLY or rank in broken] if timed_out else [],
        timed_out=timed_out,
        callers=callers,
        notes={rank: error for error, rank in list(first_ranks.items())[:_MAX_ERRORS]},
        pairs=pairs[:_MAX_PAIRS],
        broken={} if missing or pairs else dict(list(broken.items())[:_MAX_ERRORS]),
    )


def _counter_key(prefix: str, rank: int) -> str:
    return f"{prefix}/ranks/{rank // _RANKS_PER_COUNTER}"


def add_mark(prefix: str, rank: int, mark: int = EARLY) -> Add:
    """Return the request that adds ``mark`` to the mark of ``rank``. Only the rank itself adds to it."""
    return Add(_counter_key(prefix, rank), mark * (1 << _BITS * (rank % _RANKS_PER_COUNTER)))


def mark_of(counter: int, rank: int) -> int:
    """Return the mark of ``rank`` in the counter of ``add_mark``; 0 without a mark."""
    return counter >> _BITS * (rank % _RANKS_PER_COUNTER) & ((1 << _BITS) - 1)


def read_marks(prefix: str, world_size: int) -> StoreProtocol[list[int]]:
    """Return the marks of all ranks. One request for every 21 ranks."""
    marks: list[int] = []
    for first in range(0, world_size, _RANKS_PER_COUNTER):
        counter = int((yield Add(_counter_key(prefix, first), 0)) or 0)
        marks += [mark_of(counter, rank) for rank in range(_RANKS_PER_COUNTER)]
    return marks[:world_size]


def format_missing_ranks(
    caller: str,
    *,
    world_size: int,
    timeout_s: float,
    waited_s: float,
    arrivals: ArrivalReport | None,
    server_rank: int | None = 0,
    nodes: Mapping[int, range] | None = None,
) -> str | None:
    """Format the message, or return None if no rank is the cause, because then the call is wrong. Pure.

    Args:
        caller: prefix of the message.
        world_size: number of ranks.
        timeout_s: time that a collective waits, in seconds.
        waited_s: time until this rank's collective failed, in seconds.
        arrivals: ranks that caused the failure, None if the store did not answer.
        server_rank: rank that serves the store, None if another process serves the store.
        nodes: ranks of each node, if there are several nodes.
    """
    # Another rank may have timed out first, which ended the collective of this rank.
    waited_to_the_end = waited_s >= _TIMED_OUT_FRACTION * timeout_s
    timed_out = waited_to_the_end or (arrivals is not None and arrivals.timed_out)
    longest = max(waited_s, timeout_s) if timed_out and not waited_to_the_end else waited_s
    outcome = (
        f"did not arrive within {longest:.3g} s" if timed_out else f"did not arrive, connection lost after {longest:.3g} s"
    )
    advice = "Look at their output" + (", or raise timeout_s of init_dist if they are only slow." if timed_out else ".")
    if arrivals is None and server_rank is None:
        return f"{caller}: some ranks {outcome}. The rendezvous store, which knows these ranks, does not answer. {advice}"
    if arrivals is None:
        unknown = "this rank serves the store, so other ranks may be missing, too"
        return f"{caller}: ranks [{server_rank}] of {world_size} {outcome} ({unknown}). {advice}"
    if arrivals.missing:
        return f"{caller}: {_name_missing(arrivals, world_size, nodes or {})} {outcome}.{_list_errors(arrivals)} {advice}"
    if arrivals.pairs:
        pairs = ", ".join(f"{first} and {second}" for first, second in arrivals.pairs)
        which = "the connection between ranks" if len(arrivals.pairs) == 1 else "connections between living ranks"
        return (
            f"{caller}: {which} {pairs} of {world_size} was lost after {longest:.3g} s, and all ranks live. "
            "Check the network between them."
        )
    if timed_out and arrivals.late:
        late = format_ranks(arrivals.late)
        return f"{caller}: ranks {late} of {world_size} came too late. The first rank gave up after {longest:.3g} s. {advice}"
    elsewhere = {rank: place for rank, place in sorted(arrivals.callers.items()) if place != caller}
    if timed_out and elsewhere:
        rank, place = next(iter(elsewhere.items()))
        return (
            f"{caller}: rank {rank} was at {place!r} instead, and the ranks waited for each other for {longest:.3g} s. Let all "
            "ranks take the same steps, as loader.until does, and run collectives in one order."
        )
    if timed_out:
        return (
            f"{caller}: all {world_size} ranks arrived, but no data passed between them for {longest:.3g} s. Check the network."
        )
    if not arrivals.broken:
        return None
    first, error = min(arrivals.broken.items())
    failed = f"a collective failed on ranks {format_ranks(arrivals.broken)} of {world_size}, and all ranks live"
    return f"{caller}: {failed}. Rank {first}: {error.rstrip('.')}."


def _name_missing(arrivals: ArrivalReport, world_size: int, nodes: Mapping[int, range]) -> str:
    """Name the missing ranks. A node none of whose ranks gave a sign is gone."""
    silent = set(arrivals.silent)
    gone = {node: ranks for node, ranks in nodes.items() if silent.issuperset(ranks)}
    rest = [rank for rank in arrivals.missing if not any(rank in ranks for ranks in gone.values())]
    names = [f"node {node} is gone (ranks {format_ranks(ranks)[1:-1]})" for node, ranks in list(gone.items())[:_MAX_NODES]]
    if len(gone) > _MAX_NODES:
        names.append(f"{len(gone) - _MAX_NODES} more nodes are gone")
    if not gone:
        return f"ranks {format_ranks(rest)} of {world_size}"
    others = f", and ranks {format_ranks(rest)}" if rest else ": its ranks" if len(gone) == 1 else ": their ranks"
    return f"{', '.join(names)}{others} of {world_size}"


def _list_errors(arrivals: ArrivalReport) -> str:
    """Return the different errors of the ranks that failed by themselves."""
    notes = [(rank, note.rstrip(".")) for rank, note in sorted(arrivals.notes.items())]
    text = "".join(f" Rank {rank} left with {note}." for rank, note in notes[:_MAX_NOTES])
    return f"{text} {len(notes) - _MAX_NOTES} more ranks left with other errors." if len(notes) > _MAX_NOTES else text


def format_ranks(ranks: Iterable[int], *, limit: int = 10) -> str:
    """Return ranks for a message, in at most ``limit`` parts: ``[3, 17, 40-47 and 12 more]``. Pure."""
    ordered = sorted(ranks)
    if not ordered:
        return "[]"
    starts = [ordered[0], *(rank for before, rank in pairwise(ordered) if rank != before + 1)]
    ends = [*(before for before, rank in pairwise(ordered) if rank != before + 1), ordered[-1]]
    spans: list[tuple[str, int]] = []
    for start, end in zip(starts, ends, strict=True):
        # Two or three neighbours are as short as a range.
        if end - start < 3:
            spans += [(str(rank), 1) for rank in range(start, end + 1)]
        else:
            spans.append((f"{start}-{end}", end - start + 1))
    shown = spans[:limit] if len(spans) > limit + 1 else spans
    hidden = len(ordered) - sum(number for _, number in shown)
    text = ", ".join(span for span, _ in shown)
    return f"[{text} and {hidden} more]" if hidden else f"[{text}]"
