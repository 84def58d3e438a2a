"""Name the ranks that failed in one error line when a collective times out or loses a peer: ``report_missing_ranks``.

torch reports that a collective failed, but not who failed. So a rank that learns of a failure gives a sign in the rendezvous
store, closes its connections to other ranks, and waits a few seconds for the report of all signs. ``incident_protocol`` holds
the rules, without a store. ``Incidents`` runs them on a thread of their own for each incident, because a call to a stopped
server of the store never returns, despite its timeout.

A rank learns of a failure in one of three ways. Its own exchange or collective fails. It raises an exception of its own. Or
another rank closes a connection of the control plane, which wakes the watch of this rank, also while the main thread waits in a
collective of torch or computes. The watch is a thread that sleeps in ``poll`` until a connection closes. As long as nothing
fails, it never wakes, nothing is sent, and a collective only notes where the rank is.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from dtrain.arguments import format_error_line
from dtrain.dist.context import current_context
from dtrain.dist.incident_protocol import (
    BUSY,
    FAILED,
    LOST,
    TIMED_OUT,
    Add,
    ArrivalReport,
    Read,
    Set,
    SetOnce,
    Sign,
    Sleep,
    Spread,
    StoreAnswer,
    StoreProtocol,
    StoreRequest,
    change_to_failed,
    find_report,
    format_missing_ranks,
    give_sign,
    mark_wait,
    wait_for_readers,
)
from dtrain.dist.reconfigure import await_replacement
from dtrain.errors import DistError

if TYPE_CHECKING:
    from dtrain.dist.control_plane import Channel, ChannelName, ControlPlane
    from dtrain.dist.init import DistInfo


GRACE_S = 5.0
"""Time that a rank whose collective failed waits for the sign of another rank, in seconds."""


# A failed rank gives up telling its error after this time.
_LEAVE_TIMEOUT_S = 1.0
_PROBE_TIMEOUT_S = 2.0
# A rank closes its connections after this time even if the store does not take its sign.
SIGN_TIMEOUT_S = 2.0
# Time for the other ranks to make the same mistake. Then no connection closes, and the program may go on.
SETTLE_S = 1.0
# Longest time that a rank waits for the report of another rank, and then for its own. Times ``grace_s``.
_MAX_REPORT_GRACES = 8
# Time that the rank that serves the store gives the other ranks to read the report.
_READERS_S = 5.0
_JOIN_TIMEOUT_S = 0.5
_POLL_S = 0.1
# Modules whose innermost frame waits for other ranks.
_COLLECTIVE_MODULES = {
    "torch.distributed.distributed_c10d",
    "torch.distributed._functional_collectives",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives",
}
# Modules between the function that issues a collective and the backend that waits or fails.
_TRANSPARENT_MODULES = {"torch._ops", "dtrain.dist.collective_replay"}
_WAITING_MODULES = _COLLECTIVE_MODULES | {"dtrain.shard.replicate"}

T = TypeVar("T")


class report_missing_ranks:
    """Context manager around collectives that names the missing ranks if a collective fails.

    Every rank must enter the same contexts in the same order. The context may contain a whole training step, because FSDP2's
    own collectives can time out. Other exceptions propagate unchanged. A collective error is recognized by its class and by the
    torch module that raised the error, never by its text.

    Args:
        caller: prefix of error messages.
        group: name of the process group in the context.

    Collective: none on success. After a failure the context waits up to ``GRACE_S`` seconds for the sign of each other rank.

    Raises:
        DistError: a collective timed out or lost a peer. The message names the ranks that failed; the cause is torch's error.
    """

    # A class with a verb as name, because every exchange of ranks enters this context. A generator takes three times as long.
    __slots__ = ("_group", "_incidents", "_outer", "caller", "start")

    def __init__(self, caller: str, *, group: str = "training") -> None:
        self.caller, self._group, self._incidents = caller, group, current_context().incidents

    def __enter__(self) -> None:
        if self._incidents is not None:
            waits = self._incidents.waits
            self._outer = waits.get(self._group)
            self.start = time.monotonic()
            waits[self._group] = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        incidents = self._incidents
        if incidents is None:
            return
        try:
            if error is None:
                return
            if not is_collective_error(error):
                incidents.note_channel_failure(self._group, error)
                return
            waited_s = time.monotonic() - self.start
            if waited_s < incidents.info.timeout_s and await_replacement(error, is_collective=True) is not None:
                raise DistError(f"{self.caller}: a rank died, and the launcher replaces it. Use Checkpointer.retry.") from error
            report, is_disconnected = incidents.report_failure(self._group, waited_s, error)
        finally:
            incidents.waits[self._group] = self._outer
        if report is not None and incidents.info.rank in report.broken and not report.timed_out:
            # The collective failed on this rank, not by another rank.
            return
        text = format_missing_ranks(
            self.caller,
            world_size=incidents.info.world_size,
            timeout_s=incidents.info.timeout_s,
            waited_s=waited_s,
            arrivals=report,
            server_rank=incidents.server_rank,
            nodes=incidents.node_ranks(),
        )
        if text is None and is_disconnected and isinstance(error, dist.DistNetworkError):
            text = f"{self.caller}: the ranks are not connected any more, and no rank has said why. Look at their output."
        if text is not None:
            raise DistError(text) from error


def is_collective_error(error: BaseException) -> bool:
    """Return True if torch's communication raised ``error``: a class of torch.distributed, or a RuntimeError of its modules.

    gloo has no class for a lost connection, so the module of the innermost frame decides. Frames of torch's operator call
    (``torch._ops``) and of our interceptor are skipped. Other modules of DTensor and FSDP2 raise for local reasons.
    """
    if isinstance(error, dist.DistError):
        return True
    module, trace = "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        module = module if name in _TRANSPARENT_MODULES else name
        trace = trace.tb_next
    return type(error) is RuntimeError and module in _COLLECTIVE_MODULES


@dataclass(slots=True, eq=False)
class _Incident:
    """State of one incident on this rank. The thread of the incident writes the fields before it sets the events."""

    board: str
    sign: Sign
    sign_given: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    mark: int = 0
    store_answered: bool = False
    spread: bool = False
    report: ArrivalReport | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Incidents:
    """Failures that this rank knows of, at most one open for each channel, and the place where this rank waits.

    An incident of the control channel ends the job. One of the background channel ends the background exchanges. If all ranks
    make one mistake in a collective, the incident is over, and the next failure is another incident.

    Args:
        store: rendezvous store.
        prefix: prefix of the keys of this rendezvous.
        info: this rank, the number of ranks, and the time that a collective waits.
        grace_s: time to wait for the next sign of a rank, in seconds.
        server_rank: rank that serves the store, None if another process serves the store.
    """

    store: dist.Store
    prefix: str
    info: DistInfo
    grace_s: float
    server_rank: int | None
    # Blocks of collectives that this rank is in, by group.
    waits: dict[str, report_missing_ranks | None] = field(default_factory=dict)
    plane: ControlPlane | None = None
    leaving: bool = False
    _open: dict[ChannelName, _Incident] = field(default_factory=dict)
    _over: dict[ChannelName, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _watch: _PeerWatch | None = None
    _threads: list[threading.Thread] = field(default_factory=list)
    _abandoned: bool = False

    def watch(self, plane: ControlPlane) -> None:
        """Watch the connections of ``plane``. Starts a thread, which ends in ``stop``."""
        self.plane = plane
        if hasattr(select, "POLLRDHUP"):
            self._watch = _PeerWatch(self, plane)

    def stop(self) -> None:
        """Stop watching. Call it before the connections are closed on purpose."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()

    def abandon(self) -> None:
        """Stop watching, and end the incidents, because dead ranks are replaced. Call ``join`` before the process may exit."""
        self._abandoned = True
        self.stop()

    def join(self) -> None:
        """Wait for the threads of abandoned incidents. A process that exits while one is in the store would abort."""
        for thread in self._threads:
            thread.join(_JOIN_TIMEOUT_S)

    def node_ranks(self) -> dict[int, range]:
        """Return the ranks of each node, if there are several nodes with several ranks each."""
        if self.plane is None or self.plane.layout.node_size == 1 or self.plane.layout.num_nodes == 1:
            return {}
        size = self.plane.layout.node_size
        return {node: range(node * size, (node + 1) * size) for node in range(self.plane.layout.num_nodes)}

    def report_failure(self, group: str, waited_s: float, error: BaseException) -> tuple[ArrivalReport | None, bool]:
        """Give the sign of a failed collective of ``group``, and wait for the report of all ranks.

        Returns:
            The report, None if the store did not answer; and if True, the ranks are not connected any more.
        """
        name: ChannelName = "background" if group == "background" else "control"
        channel = self._channel(group)
        if channel is not None and channel.failed:
            incident = self._begin(name, self._sign_of_channel(channel, waited_s))
        else:
            timed_out = mark_wait(waited_s, self.info.timeout_s) == TIMED_OUT
            sign = Sign(
                mark=TIMED_OUT if timed_out else LOST,
                caller=self._caller(name),
                error=format_error_line(error),
            )
            incident = self._begin(name, sign, settle_s=SETTLE_S)
        if not incident.sign_given.wait(SIGN_TIMEOUT_S):
            self._spread(name, incident)
        # The first wait ends early for a store that does not answer at all.
        incident.done.wait(self.grace_s + 1)
        if incident.store_answered:
            incident.done.wait(_MAX_REPORT_GRACES * self.grace_s + _READERS_S)
        if incident.done.is_set() and not incident.spread:
            with self._lock:
                self._over[name] = self._over.get(name, 0) + 1
                self._open.pop(name, None)
        if incident.report is None and incident.sign.mark == FAILED:
            # This rank is the cause, and reads no report.
            return ArrivalReport(missing=[self.info.rank], notes={self.info.rank: incident.sign.error}), incident.spread
        return incident.report, incident.spread

    def note_channel_failure(self, group: str, error: BaseException) -> None:
        """Tell the other ranks that ``error`` has ended an exchange of ``group`` on this rank. Waits for nothing."""
        channel = self._channel(group)
        if channel is None or not channel.failed:
            return
        lost = isinstance(error, dist.DistError)
        sign = (
            self._sign_of_channel(channel, self._waited_s(group)) if lost else Sign(mark=FAILED, error=format_error_line(error))
        )
        self._begin(channel.name, sign)

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks that this rank leaves with ``error``. Gives up soon if the store does not answer."""
        # Without the sign the other ranks still name this rank.
        limit_s = _LEAVE_TIMEOUT_S
        text = format_error_line(error)
        incident = self._begin("control", Sign(mark=FAILED, error=text))
        incident.sign_given.wait(limit_s)
        caused_by_peer = isinstance(error, dist.DistError | DistError | KeyboardInterrupt | SystemExit)
        if incident.store_answered and incident.mark not in (0, FAILED) and not caused_by_peer:
            self._ask(change_to_failed(incident.board, self.info.rank, incident.mark, text), limit_s)
        if incident.store_answered and self.server_rank == self.info.rank and incident.report is None:
            limit_s = self.grace_s + _READERS_S
            self._ask(wait_for_readers(incident.board, self.info.world_size, self.info.world_size, limit_s), limit_s)

    def lose_peer(self, name: ChannelName, peer: int) -> None:
        """Handle a closed connection to ``peer``, in the watch's thread."""
        assert self.plane is not None
        channel = self.plane[name]
        if self.leaving or (name == "background" and "control" in self._open):
            # The other rank has left after the last exchange, or after a failure that is known. If not, the exchange finds out.
            return
        if channel.closed_here:
            sign = Sign(mark=FAILED, error=f"a control channel that it has closed itself ({name})")
        else:
            mark = self._mark_of_wait(name)
            sign = Sign(mark=mark, peer=peer, caller="" if mark == BUSY else self._caller(name))
        incident = self._begin(name, sign)
        if not incident.sign_given.wait(SIGN_TIMEOUT_S):
            self._spread(name, incident)

    def _begin(self, name: ChannelName, sign: Sign, *, settle_s: float = 0.0) -> _Incident:
        """Return the open incident of a channel. If there is none, begin one with the ``sign`` of this rank."""
        with self._lock:
            incident = self._open.get(name)
            if incident is not None:
                return incident
            incident = self._open[name] = _Incident(f"{name}/{self._over.get(name, 0)}", sign)
            self._threads.append(start_thread(lambda: self._run(name, incident, settle_s)))
        return incident

    def _run(self, name: ChannelName, incident: _Incident, settle_s: float) -> None:
        """Give the sign, tell the other ranks, and find the report, in the thread of the incident."""
        try:
            store = self._connect()
            board, sign = incident.board, incident.sign
            incident.mark = self._drive(give_sign(board, self.info.rank, sign), store, name, incident)
            incident.sign_given.set()
            if sign.mark == FAILED:
                self._spread(name, incident)
                return
            protocol = find_report(board, self.info.rank, self.info.world_size, grace_s=self.grace_s, settle_s=settle_s)
            incident.report = self._drive(protocol, store, name, incident)
            if self.server_rank == self.info.rank:
                number = self.info.world_size - len(incident.report.silent)
                self._drive(wait_for_readers(board, number, self.info.world_size, _READERS_S), store, name, incident)
        finally:
            if incident.report is None:
                self._spread(name, incident)
            incident.sign_given.set()
            incident.done.set()

    def _drive(self, protocol: StoreProtocol[T], store: dist.Store, name: ChannelName, incident: _Incident) -> T:
        def ask(request: StoreRequest) -> StoreAnswer:
            if isinstance(request, Spread):
                self._spread(name, incident)
                return None
            # The ranks of a single node can poll, and end the wait early.
            if isinstance(request, Read) and current_context().membership is not None:
                answer = self._poll(store, request)
            else:
                answer = ask_store(store, request)
            if self._abandoned:
                raise dist.DistStoreError("the dead ranks are replaced")
            incident.store_answered = incident.store_answered or not isinstance(request, Sleep)
            return answer

        return run_protocol(protocol, ask)

    def _poll(self, store: dist.Store, request: Read) -> StoreAnswer:
        deadline = time.monotonic() + request.timeout_s
        while (
            (answer := ask_store(store, Read(request.key, 0))) is None and time.monotonic() < deadline and not self._abandoned
        ):
            time.sleep(_POLL_S)
        return answer

    def _connect(self) -> dist.Store:
        return dist.PrefixStore(self.prefix, clone_store(self.store, self.grace_s))

    def _ask(self, protocol: StoreProtocol[None], limit_s: float) -> None:
        """Run a protocol without ``Spread`` on a thread, for at most ``limit_s`` seconds."""
        start_thread(lambda: self._drive(protocol, self._connect(), "control", _Incident("", Sign(mark=BUSY)))).join(limit_s)

    def _spread(self, name: ChannelName, incident: _Incident) -> None:
        incident.spread = True
        if self.plane is None:
            return
        channel, watch = self.plane[name], self._watch
        channel.shut_down()
        if channel.closed_here and watch is not None:
            # The kernel keeps a socket connected until the thread stops to watch it.
            watch.wake()

    def _channel(self, group: str) -> Channel | None:
        if self.plane is None or group not in ("control", "background"):
            return None
        return self.plane[group]  # type: ignore[index]

    def _sign_of_channel(self, channel: Channel, waited_s: float) -> Sign:
        """Return the sign of an exchange that has failed."""
        if channel.closed_here:
            return Sign(mark=FAILED, error=f"a control channel that it has closed itself ({channel.name})")
        mark = mark_wait(waited_s, self.info.timeout_s)
        return Sign(mark=mark, caller=self._caller(channel.name), peer=channel.lost_peer)

    def _mark_of_wait(self, name: ChannelName) -> int:
        """Return the mark of this rank while another thread of it waits, computes, or is elsewhere."""
        assert self.plane is not None
        is_waiting = self.plane[name].waits or (name == "control" and _waits_in_collective())
        return mark_wait(self._waited_s(name), self.info.timeout_s) if is_waiting else BUSY

    def _waited_s(self, group: str) -> float:
        """Return how long this rank has been in a block of collectives of ``group``; for the control channel, of any group."""
        now = time.monotonic()
        return max((now - wait.start for wait in self._waits(group)), default=0.0)

    def _caller(self, name: str) -> str:
        # The innermost block began last.
        waits = sorted(self._waits(name), key=lambda wait: wait.start)
        return waits[-1].caller if waits else ""

    def _waits(self, group: str) -> list[report_missing_ranks]:
        background = group == "background"
        # Copied, because the main thread may enter a block at the same time.
        waits = self.waits.copy().items()
        return [wait for name, wait in waits if wait is not None and (name == "background") == background]


class _PeerWatch:
    """Thread that sleeps until a connection of the control plane closes.

    Args:
        incidents: receiver of the news.
        plane: the connections.
    """

    def __init__(self, incidents: Incidents, plane: ControlPlane) -> None:
        self._incidents, self._pid = incidents, os.getpid()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()
        self._peers: dict[int, tuple[ChannelName, int]] = {}
        for name, channel in plane.channels.items():
            for number, peer in channel.file_numbers().items():
                self._peers[number] = name, peer
                # Data that arrive do not wake the thread.
                self._poll.register(number, select.POLLRDHUP)
        self._poll.register(self._wake, select.POLLIN)
        self._thread = threading.Thread(target=self._run, daemon=True, name="dtrain-peer-watch")
        self._thread.start()

    def wake(self) -> None:
        """Tell the thread to end."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End the thread. A fork of the rank has no thread, and only closes the file."""
        if self._pid == os.getpid():
            self.wake()
            self._thread.join(_JOIN_TIMEOUT_S)
        elif self._wake >= 0:
            os.close(self._wake)

    def _run(self) -> None:
        try:
            while True:
                for number, events in self._poll.poll():
                    if number == self._wake:
                        return
                    self._poll.unregister(number)
                    if not events & select.POLLNVAL:
                        self._incidents.lose_peer(*self._peers[number])
        finally:
            wake, self._wake = self._wake, -1
            os.close(wake)


def _waits_in_collective() -> bool:
    """Return True if a thread of this process waits in a collective of torch. Only an incident asks for it."""
    for frame in sys._current_frames().values():
        innermost = frame
        while innermost.f_back is not None and innermost.f_globals.get("__name__", "") in _TRANSPARENT_MODULES:
            innermost = innermost.f_back
        if innermost.f_globals.get("__name__", "") in _WAITING_MODULES:
            return True
    return False


def run_protocol(protocol: StoreProtocol[T], ask: Callable[[StoreRequest], StoreAnswer]) -> T:
    """Return the result of ``protocol``, whose requests ``ask`` answers."""
    try:
        request = next(protocol)
        while True:
            request = protocol.send(ask(request))
    except StopIteration as stop:
        result: T = stop.value
        return result


def ask_store(store: dist.Store, request: StoreRequest) -> StoreAnswer:
    """Make one request of ``incident_protocol`` to the store, and return its answer."""
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
    assert not isinstance(request, Spread)
    try:
        if request.timeout_s > 0:
            store.wait([request.key], timedelta(seconds=request.timeout_s))
        elif not store.check([request.key]):
            return None
    except dist.DistStoreError:
        return None
    return store.get(request.key).decode(errors="replace")


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

    thread = start_thread(run)
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise DistError(message)
    return results[0]


def start_thread(call: Callable[[], None]) -> threading.Thread:
    """Run ``call`` in a thread that does not keep the process alive. A lost store ends the thread."""

    def run() -> None:
        # The store and the process that served it are gone. The message reports what could not be read.
        with suppress(dist.DistError):
            call()

    thread = threading.Thread(target=run, daemon=True, name="dtrain-store")
    thread.start()
    return thread


def clone_store(store: dist.Store, timeout_s: float = 5.0) -> dist.Store:
    """Open another connection to the same store, because a call blocks its connection until the call returns.

    The prefixes of ``store`` are dropped. A store that is not served over TCP is returned unchanged.

    Raises:
        DistStoreError: the process that served the store has ended.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return store
    try:
        # torch would try again until the timeout.
        socket.create_connection((store.host, store.port), _PROBE_TIMEOUT_S).close()
    except ConnectionRefusedError as error:
        raise dist.DistStoreError(str(error)) from error
    except OSError:
        pass
    return dist.TCPStore(store.host, store.port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
