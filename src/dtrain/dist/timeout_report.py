"""Name the missing ranks in one error line when a collective times out or loses a peer.

torch reports that a collective failed, but not which ranks are missing. So a rank whose collective failed leaves a mark in the
rendezvous store, waits a few seconds for the marks of the other ranks (``arrival_marks``), and names the ranks without a mark.
As long as collectives succeed nothing is sent, and a call only increments a count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist

from dtrain.dist.arrival_marks import (
    Add,
    ArrivalReport,
    Set,
    SetOnce,
    Sleep,
    StoreAnswer,
    StoreRequest,
    format_ranks,
    report_arrival,
)
from dtrain.dist.context import current_context
from dtrain.errors import DistError

GRACE_S = 5.0
"""Time that a rank whose collective failed waits for the marks of the other ranks, in seconds."""

# Longest time that a rank waits for the report of another rank, and then for its own. Times ``GRACE_S``.
_MAX_REPORT_GRACES = 8
# A failed rank gives up writing its error note after this time.
_NOTE_TIMEOUT_S = 1.0
# Fraction of the timeout. A shorter wait means that the failure of another rank ended the collective.
_TIMEOUT_FRACTION = 0.9
_PEER_ERROR_MODULES = {
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives",
}
# Modules between the function that issues a collective and the backend that fails.
_TRANSPARENT_MODULES = {"torch._ops", "dtrain.dist.dispatch", "dtrain.dist.collective_replay"}

T = TypeVar("T")


@dataclass(slots=True, kw_only=True, eq=False)
class MissingRankReporter:
    """Store and settings to find missing ranks, and the number of calls on each group."""

    store: dist.Store
    # Prefix of the keys of this rendezvous.
    prefix: str
    rank: int
    world_size: int
    timeout_s: float
    # Rank that serves the store, None if another process serves the store.
    server_rank: int | None
    call_counts: dict[str, int] = field(default_factory=dict)


class report_missing_ranks:
    """Context manager around collectives that names the missing ranks if a collective fails.

    Every rank must enter the same contexts in the same order. The context may contain a whole training step, because FSDP2's
    own collectives can time out. Other exceptions propagate unchanged. A collective error is recognized by its class and by the
    torch module that raised the error, never by its text.

    Args:
        caller: prefix of error messages.
        group: name of the process group in the context. Calls are counted per group.

    Collective: none on success. After a failure the context waits up to ``GRACE_S`` seconds for the marks of other ranks.

    Raises:
        DistError: a collective timed out or lost a peer. The message names the missing ranks; the cause is torch's error.
    """

    # A class with a verb as name, because every exchange of ranks enters this context. A generator takes three times as long.
    __slots__ = ("_call", "_caller", "_group", "_reporter", "_start")

    def __init__(self, caller: str, *, group: str = "training") -> None:
        self._caller, self._group, self._reporter = caller, group, current_context().missing_rank_reporter

    def __enter__(self) -> None:
        if self._reporter is not None:
            calls = self._reporter.call_counts
            self._call = calls[self._group] = calls.get(self._group, 0) + 1
            self._start = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or self._reporter is None or not is_collective_error(error):
            return
        call = f"{self._group}/{self._call}"
        text = _explain_failure(self._reporter, self._caller, call, time.monotonic() - self._start)
        if text is not None:
            raise DistError(text) from error


def is_collective_error(error: BaseException) -> bool:
    """Return True if torch's communication raised ``error``: a class of torch.distributed, or a RuntimeError of its modules.

    gloo has no class for a lost connection, so the module of the innermost frame decides. Frames of torch's operator call
    (``torch._ops``) and of our interceptor are skipped. Other modules of DTensor and FSDP2 raise for local reasons.
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
    """Write the error of this rank to the store for its peers. Never raises, and gives up after a short timeout."""
    reporter = current_context().missing_rank_reporter
    if reporter is None:
        return
    text = " ".join(f"{type(error).__name__}: {error}".split())[:500]

    def write_note() -> None:
        dist.PrefixStore(reporter.prefix, clone_store(reporter.store)).set(f"left/{reporter.rank}", text)

    # The note is optional. Without it the other ranks still name this rank.
    _start_thread(write_note).join(_NOTE_TIMEOUT_S)


@dataclass(slots=True)
class _StoreReport:
    """Answers of the store, written by the thread that asks the store."""

    store_answered: bool = False
    arrivals: ArrivalReport | None = None


def _explain_failure(reporter: MissingRankReporter, caller: str, call: str, waited_s: float) -> str | None:
    report = _StoreReport()
    # A call to a stopped server never returns, despite its timeout. So a separate thread asks the store.
    thread = _start_thread(lambda: _report_arrival(reporter, caller, call, waited_s, report))
    thread.join(GRACE_S + 1)
    if report.store_answered:
        thread.join(_MAX_REPORT_GRACES * GRACE_S + 1)
    return format_missing_ranks(
        caller,
        world_size=reporter.world_size,
        timeout_s=reporter.timeout_s,
        waited_s=waited_s,
        arrivals=report.arrivals,
        server_rank=reporter.server_rank,
    )


def _report_arrival(reporter: MissingRankReporter, caller: str, call: str, waited_s: float, report: _StoreReport) -> None:
    """Mark this rank in the store, and write the arrivals of all ranks into ``report``."""
    store = dist.PrefixStore(reporter.prefix, clone_store(reporter.store))
    protocol = report_arrival(
        call,
        reporter.rank,
        reporter.world_size,
        caller=caller,
        waited_s=waited_s,
        timeout_s=reporter.timeout_s,
        grace_s=GRACE_S,
    )
    answer: StoreAnswer = None
    try:
        request = next(protocol)
        while True:
            # The report is complete before the last pause.
            if isinstance(request, Set):
                report.arrivals = ArrivalReport.decode(request.text)
            answer = ask_store(store, request)
            report.store_answered = True
            request = protocol.send(answer)
    except StopIteration as stop:
        report.arrivals = stop.value


def ask_store(store: dist.Store, request: StoreRequest) -> StoreAnswer:
    """Make one request of ``arrival_marks`` to the store, and return its answer."""
    if isinstance(request, Add):
        return store.add(request.key, request.value)
    if isinstance(request, SetOnce):
        return store.compare_set(request.key, "", request.text).decode(errors="replace")
    if isinstance(request, Set):
        store.set(request.key, request.text)
        return None
    if isinstance(request, Sleep):
        time.sleep(request.seconds)
        return time.monotonic()
    try:
        if request.timeout_s > 0:
            store.wait([request.key], timedelta(seconds=request.timeout_s))
        elif not store.check([request.key]):
            return None
    except dist.DistStoreError:
        return None
    return store.get(request.key).decode(errors="replace")


def format_missing_ranks(
    caller: str,
    *,
    world_size: int,
    timeout_s: float,
    waited_s: float,
    arrivals: ArrivalReport | None,
    server_rank: int | None = 0,
) -> str | None:
    """Format the message, or return None if all ranks arrived and failed at once, because then the call is wrong. Pure.

    Args:
        caller: prefix of the message.
        world_size: number of ranks.
        timeout_s: time that a collective waits, in seconds.
        waited_s: time until this rank's collective failed, in seconds.
        arrivals: ranks that arrived, None if the store did not answer.
        server_rank: rank that serves the store, None if another process serves the store.
    """
    # Another rank may have timed out first, which ended the collective of this rank.
    timed_out = waited_s >= _TIMEOUT_FRACTION * timeout_s or (arrivals is not None and arrivals.timed_out)
    longest = max(waited_s, timeout_s) if timed_out and waited_s < _TIMEOUT_FRACTION * timeout_s else waited_s
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
        notes = sorted(arrivals.notes.items())
        errors = "".join(f" Rank {rank} left with {note.rstrip('.')}." for rank, note in notes)
        return f"{caller}: ranks {format_ranks(arrivals.missing)} of {world_size} {outcome}.{errors} {advice}"
    if not timed_out:
        return None
    if arrivals.late:
        late = format_ranks(arrivals.late)
        return f"{caller}: ranks {late} of {world_size} came too late. The first rank gave up after {longest:.3g} s. {advice}"
    elsewhere = {rank: place for rank, place in sorted(arrivals.callers.items()) if place != caller}
    if elsewhere:
        rank, place = next(iter(elsewhere.items()))
        return (
            f"{caller}: rank {rank} was at {place!r} instead, and the ranks waited for each other for {longest:.3g} s. Let all "
            "ranks take the same steps, as loader.until does, and run collectives in one order."
        )
    return f"{caller}: all {world_size} ranks arrived, but no data passed between them for {longest:.3g} s. Check the network."


def call_with_timeout(call: Callable[[], T], *, timeout_s: float, message: str) -> T:
    """Return ``call()``, or raise after ``timeout_s`` seconds. The store's own timeouts do not work if its server is stopped.

    Raises:
        DistError: ``message``. ``call`` continues in its own thread.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised below, in the calling thread
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
            # The store and the process that served it are gone. The message reports what could not be read.
            return

    thread = threading.Thread(target=run, daemon=True, name="dtrain-store")
    thread.start()
    return thread


def clone_store(store: dist.Store) -> dist.Store:
    """Open another connection to the same store, because a call blocks its connection until the call returns.

    The prefixes of ``store`` are dropped. A store that is not served over TCP is returned unchanged.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return store
    return dist.TCPStore(store.host, store.port, None, False, timedelta(seconds=GRACE_S), wait_for_workers=False)
