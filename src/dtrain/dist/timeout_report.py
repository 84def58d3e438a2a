"""Who did not come: one line that names the missing ranks when a collective times out or loses a peer.

torch says that a collective failed, not because of whom. So a rank whose collective failed leaves a mark in the store through
which the ranks met, looks for the marks of the others for a few seconds, and names those that left none. As long as
collectives succeed nothing is sent: a call costs one count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist

from dtrain.errors import DistError

GRACE_S = 5.0
"""How long a rank whose collective failed waits for the marks of the others, in seconds."""

_POLL_S = 0.1
_NOTE_TIMEOUT_S = 1.0  # a failed rank leaves its note within this time, or without it
_TIMEOUT_FRACTION = 0.9  # of the time-out: a rank that waited for so long was not sent away by somebody else's failure
_PEER_ERROR_MODULES = {
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives",
}
# Between the function that asks for a collective and the backend that fails.
_TRANSPARENT_MODULES = {"torch._ops", "dtrain.dist.dispatch", "dtrain.dist.collective_replay"}

T = TypeVar("T")


@dataclass(slots=True, kw_only=True, eq=False)
class MissingRankReporter:
    """What a rank needs to find out who is missing, and how many calls it has made on each group."""

    store: dist.Store
    prefix: str  # of the keys of this opening of the groups
    rank: int
    world_size: int
    timeout_s: float
    server_rank: int | None  # the rank that serves the store, None when it is another process
    call_counts: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _ReporterState:
    reporter: MissingRankReporter | None = None


_STATE = _ReporterState()


def install_reporter(reporter: MissingRankReporter | None) -> None:
    """Start naming missing ranks, or stop with None. For ``init_dist`` and its closing.

    Mutates: this process's lookout.
    """
    _STATE.reporter = reporter


class report_missing_ranks:
    """A block of collectives whose failure names the ranks that did not come. Every rank must enter it, in the same order.

    Put it around a whole training step: FSDP2's own collectives time out inside of it. What the block raises on its own account
    (an error of the model, of the data, of ours) passes untouched; a failed collective is told by the class of its error and by
    the module of torch that raised it, never by its text.

    Args:
        caller: begins the message.
        group: name of the process group that the block uses; calls are counted for each.

    Collective: none while all is well. After a failure it waits up to ``GRACE_S`` seconds for word from the other ranks.

    Raises:
        DistError: a collective timed out or lost a peer, which is named; torch's error is its cause.
    """

    # A class, because it is around every vote: a generator costs three times as much. Named as the verb it is used as.
    __slots__ = ("_begun", "_call", "_group", "_lookout", "_where")

    def __init__(self, caller: str, *, group: str = "training") -> None:
        self._where, self._group, self._lookout = caller, group, _STATE.reporter

    def __enter__(self) -> None:
        if self._lookout is not None:
            calls = self._lookout.call_counts
            self._call = calls[self._group] = calls.get(self._group, 0) + 1
            self._begun = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or self._lookout is None or not is_collective_error(error):
            return
        call = f"{self._group}/{self._call}"
        text = _explain_failure(self._lookout, self._where, call, time.monotonic() - self._begun)
        if text is not None:
            raise DistError(text) from error


def is_collective_error(error: BaseException) -> bool:
    """Whether torch's communication raised ``error``: one of its own classes, or a bare RuntimeError from its modules.

    gloo has no class for a lost connection, so the frame that raised decides. torch's operator call (``torch._ops``) and ours
    in front of it are looked through. DTensor's and FSDP2's other modules raise for reasons of this rank alone, and do not
    count.
    """
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and _raising_module(error.__traceback__) in _PEER_ERROR_MODULES


def _raising_module(trace: TracebackType | None) -> str:
    module = ""
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        module = module if name in _TRANSPARENT_MODULES else name
        trace = trace.tb_next
    return module


def leave_error_note(error: BaseException | None) -> None:
    """Tell the others, should they look for this rank, with which error it left. Never raises, never waits for long."""
    lookout = _STATE.reporter
    if lookout is None:
        return
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500]

    def leave() -> None:
        dist.PrefixStore(lookout.prefix, clone_store(lookout.store)).set(f"left/{lookout.rank}", text)

    # Without a note the others still name this rank; the error that it is about to raise must not be replaced.
    _start_thread(leave).join(_NOTE_TIMEOUT_S)


@dataclass(slots=True)
class _StoreReport:
    """What the store knows, filled by the thread that asks it: seconds waited by rank, and where, and the notes."""

    store_answered: bool = False
    waits_s: dict[int, float] = field(default_factory=dict)
    callers: dict[int, str] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)


def _explain_failure(reporter: MissingRankReporter, caller: str, call: str, waited_s: float) -> str | None:
    found = _StoreReport(waits_s={reporter.rank: waited_s})
    # On a server that was stopped a call never returns, whatever its time-out: ask from a thread that may be left behind.
    _start_thread(lambda: _collect_marks(reporter, caller, call, waited_s, found)).join(GRACE_S + 1)
    return format_missing_ranks(
        caller,
        world_size=reporter.world_size,
        timeout_s=reporter.timeout_s,
        waits_s=dict(found.waits_s),
        notes=dict(found.notes),
        callers=dict(found.callers),
        store_answered=found.store_answered,
        server_rank=reporter.server_rank,
    )


def _collect_marks(reporter: MissingRankReporter, caller: str, call: str, waited_s: float, found: _StoreReport) -> None:
    """Leave this rank's mark, and collect those of the others until all are there or the grace is over."""
    store = dist.PrefixStore(reporter.prefix, clone_store(reporter.store))
    store.set(f"mark/{call}/{reporter.rank}", f"{waited_s:.3f} {caller}")
    count, seen, deadline = store.add(f"mark/{call}/count", 1), 1, time.monotonic() + GRACE_S
    found.store_answered = True
    while time.monotonic() < deadline and len(found.waits_s) < reporter.world_size:
        if count > seen:
            seen = count
            for rank in range(reporter.world_size):
                if rank not in found.waits_s and store.check([key := f"mark/{call}/{rank}"]):
                    waited, _, place = store.get(key).decode(errors="replace").partition(" ")
                    found.waits_s[rank], found.callers[rank] = float(waited), place
        time.sleep(_POLL_S)
        count = store.add(f"mark/{call}/count", 0)
    for rank in range(reporter.world_size):
        if rank not in found.waits_s and store.check([key := f"left/{rank}"]):
            found.notes[rank] = store.get(key).decode(errors="replace")
    time.sleep(2 * _POLL_S)  # the last one to arrive may serve the store, and the others have not read its mark yet


def format_missing_ranks(
    caller: str,
    *,
    world_size: int,
    timeout_s: float,
    waits_s: Mapping[int, float],
    notes: Mapping[int, str],
    callers: Mapping[int, str] | None = None,
    store_answered: bool = True,
    server_rank: int | None = 0,
) -> str | None:
    """The message, or None when all ranks came and failed at once: then the call itself was wrong. Pure.

    Args:
        caller: begins the message.
        world_size: number of ranks.
        timeout_s: how long a collective waits.
        waits_s: seconds that each rank known to have come had waited when its collective failed.
        notes: the error with which a rank left.
        callers: where other ranks stood in the same call, as ``caller``.
        store_answered: whether the store did.
        server_rank: the rank that serves the store, None when it is another process.
    """
    longest = max(waits_s.values())
    timed_out = longest >= _TIMEOUT_FRACTION * timeout_s
    missing = [rank for rank in range(world_size) if rank not in waits_s]
    late = [rank for rank, waited in sorted(waits_s.items()) if waited < longest / 2]
    outcome = (
        f"did not arrive within {longest:.3g} s" if timed_out else f"did not arrive, connection lost after {longest:.3g} s"
    )
    advice = "look at their output" + (", or raise timeout_s of init_dist if they are only slow" if timed_out else "")
    if not store_answered and server_rank is None:
        return f"{caller}: some ranks {outcome}, and the rendezvous store that knows which does not answer; {advice}"
    if not store_answered:
        unknown = "it serves the store that knows whether others are missing, too"
        return f"{caller}: ranks [{server_rank}] of {world_size} {outcome} ({unknown}); {advice}"
    if missing:
        left = "".join(f"; rank {rank} had left with {note}" for rank, note in sorted(notes.items()))
        return f"{caller}: ranks {missing} of {world_size} {outcome}{left}; {advice}"
    if not timed_out:
        return None
    if late:
        return f"{caller}: ranks {late} of {world_size} came too late, the first had given up after {longest:.3g} s; {advice}"
    astray = {rank: place for rank, place in sorted((callers or {}).items()) if place != caller}
    if astray:
        rank, place = next(iter(astray.items()))
        return (
            f"{caller}: rank {rank} was at {place!r} instead, and they waited for each other for {longest:.3g} s; let all ranks "
            "take the same steps, as loader.until does, and run collectives in one order"
        )
    return (
        f"{caller}: all {world_size} ranks came, but nothing passed between them for {longest:.3g} s; is their network sound?"
    )


def call_with_timeout(call: Callable[[], T], *, timeout_s: float, message: str) -> T:
    """``call()``, given up after ``timeout_s`` seconds: the store's own time-outs do not hold when its server was stopped.

    Raises:
        DistError: ``message``; ``call`` goes on in a thread of its own.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that asked
            errors.append(error)

    thread = _start_thread(run)
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise DistError(message)
    return results[0]


def _start_thread(call: Callable[[], None]) -> threading.Thread:
    def run() -> None:
        try:
            call()
        except dist.DistError:
            # The store is gone, and with it the process that served it: the message says so from what was not found.
            return

    thread = threading.Thread(target=run, daemon=True, name="dtrain-store")
    thread.start()
    return thread


def clone_store(store: dist.Store) -> dist.Store:
    """Another connection to the same store: a call holds its connection until it returns, which may be never.

    Without the prefixes of ``store``; one that is not served over TCP is returned as it is.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return store
    return dist.TCPStore(store.host, store.port, None, False, timedelta(seconds=GRACE_S), wait_for_workers=False)
