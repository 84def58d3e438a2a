"""A node's side: reaches the hub, and passes on between it and the supervisor."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from dtrain.launch.launch_plan import NodeRendezvous
from dtrain.launch.nodes.addresses import find_interface, resolve_address
from dtrain.launch.nodes.messages import (
    Hello,
    JobFinished,
    JoinAccepted,
    JoinRefused,
    Message,
    MessageSocket,
    NodeFailed,
    Notice,
    Ping,
    RanksExited,
    RanksFailed,
    Welcome,
)
from dtrain.launch.nodes.rendezvous_server import INTERFACE_HINT, LOST_NODE_EXIT_CODE, PING_INTERVAL_S

_CONNECT_TIMEOUT_S = (
    3.0  # for one attempt to connect: an address that swallows packets must not use up the time of the next one
)
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0


class RetryingConnector:
    """Connects to the hub, again and again: it may come later than this node."""

    def __init__(
        self, meeting: NodeRendezvous, selector: selectors.BaseSelector, on_open: Callable[[socket.socket], None]
    ) -> None:
        self._meeting, self._selector, self._on_connected = meeting, selector, on_open
        self._sock: socket.socket | None = None
        self._attempts, self._pause_s, self._next_attempt_at = 0, _FIRST_PAUSE_S, 0.0
        self.last_error = "not tried yet"

    def poll(self, now: float) -> None:
        """Begin the next attempt when it is due, or give up the one that gets no answer."""
        if self._sock is None and now >= self._next_attempt_at:
            self._start_attempt(now)
        elif self._sock is not None and now >= self._next_attempt_at:
            self.record_failure(f"no answer in {_CONNECT_TIMEOUT_S:.0f} s")

    def record_failure(self, why: str) -> None:
        """The attempt came to nothing; the next one follows after a pause."""
        self.close()
        self.last_error = why
        self._next_attempt_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)

    def close(self) -> None:
        if self._sock is not None:
            self._selector.unregister(self._sock)
            self._sock.close()
            self._sock = None

    def _start_attempt(self, now: float) -> None:
        try:
            targets = resolve_address(self._meeting.addr, self._meeting.port, fallback=self._meeting.fallback_addr)
            family, target = targets[self._attempts % len(targets)]
            self._attempts += 1
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            problem = sock.connect_ex(target)
        except OSError as error:
            self.record_failure(error.strerror or str(error))
            return
        self._sock, self._next_attempt_at = sock, now + _CONNECT_TIMEOUT_S
        self._selector.register(sock, selectors.EVENT_WRITE, self._finish_attempt)
        if problem not in (0, errno.EINPROGRESS):
            self.record_failure(os.strerror(problem).lower())

    def _finish_attempt(self) -> None:
        sock = self._sock
        if sock is None:
            return
        problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem == 0 and sock.getsockname() == sock.getpeername():
            problem = errno.ECONNREFUSED  # nobody listens there: the kernel has connected the socket to itself
        if problem:
            self.record_failure(os.strerror(problem).lower())
            return
        self._selector.unregister(sock)
        self._sock = None
        self._on_connected(sock)


class RendezvousClient:
    """One node of the job. ``poll`` has to be called a few times a second.

    Args:
        connection: to the hub where that is in this process; None to connect to it.
        notify: takes messages for the supervisor.
    """

    def __init__(
        self,
        meeting: NodeRendezvous,
        hello: Hello,
        selector: selectors.BaseSelector,
        *,
        connection: socket.socket | None,
        notify: Callable[[Message], None],
    ) -> None:
        self._config, self._hello, self._selector, self._notify = meeting, hello, selector, notify
        self._deadline = time.monotonic() + meeting.timeout_s
        self._connector = RetryingConnector(meeting, selector, self._attach)
        self._socket: MessageSocket | None = None
        self._server_name = "node 0"  # with its host, once it is known
        self._welcome = self._joined = self._decided = False
        self.was_refused = False  # a hub has refused this node: so there is one
        if connection is not None:
            self._attach(connection)

    def poll(self, now: float) -> None:
        """Do what is due: connecting, pings, and giving up on a hub that is silent, or does not come."""
        if self._decided and self._socket is None:
            return
        silence_s = self._config.silence_s if self._welcome else _CONNECT_TIMEOUT_S  # a hub answers at once
        if not self._welcome and not self._decided and now > self._deadline:
            self._fail_join(self._describe_unreachable())
        elif self._socket is None:
            self._connector.poll(now)
        elif now - self._socket.last_received_at > silence_s:
            self._connection_lost(f"was silent for {silence_s:.0f} s")
        elif now - self._socket.last_sent_at >= PING_INTERVAL_S:
            self._socket.send(Ping())

    def reset_timeouts(self, now: float) -> None:
        """Start counting anew: this process itself stood still, so the hub's silence means nothing."""
        if self._socket is not None:
            self._socket.last_received_at = now

    def send(self, message: RanksFailed | RanksExited) -> None:
        """Pass on what the supervisor says."""
        if self._socket is not None:
            self._socket.send(message)

    def flush(self) -> bool:
        """Whether everything that was said is on its way."""
        return self._socket is None or self._socket.flush()

    def close(self) -> None:
        self._connector.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _attach(self, sock: socket.socket) -> None:
        self._socket = MessageSocket(sock)
        self._socket.watch(self._selector, self._read_server)
        self._socket.send(self._hello)

    def _read_server(self) -> None:
        lines = self._socket
        if lines is None:
            return
        lines.flush()
        for message in lines.receive():
            self._handle_message(message)
        if lines.closed_reason and lines is self._socket:
            self._connection_lost(f"is lost: {lines.closed_reason}")

    def _handle_message(self, message: Message) -> None:
        match message:
            case Welcome():
                self._server_name, self._welcome = f"node 0 ({message.host})", True
            case JoinAccepted() if not self._joined:
                self._joined = True
                self._notify(self._with_local_address(message))
            case JoinRefused() if not self._joined:
                self._decided = self.was_refused = True
                self._notify(message)
            case NodeFailed() | JobFinished() if not self._decided:
                self._decided = True
                self._notify(message)
            case JobFinished() | Notice():
                self._notify(message)
            case _:
                pass  # a ping

    def _with_local_address(self, joined: JoinAccepted) -> JoinAccepted:
        """With what this node alone knows: how it reaches the first one."""
        assert self._socket is not None
        sock = self._socket.sock
        if sock.family == socket.AF_UNIX:
            return joined
        interface = find_interface(str(sock.getsockname()[0]))
        addr = str(sock.getpeername()[0])  # the one that works from here, whatever names resolve to elsewhere
        return replace(joined, interface=interface, layout=replace(joined.layout, master_addr=addr))

    def _connection_lost(self, how: str) -> None:
        assert self._socket is not None
        self._socket.close()
        self._socket = None
        if self._decided:
            return
        if self._joined:
            self._decided = True
            self._notify(NodeFailed(line=f"{self._server_name} {how}", code=LOST_NODE_EXIT_CODE, node_rank=0))
        elif not self._welcome:
            self._connector.record_failure(f"what answers is no launcher of dtrain's: it {how}")
        else:
            self._welcome = False  # its launcher was ended, and may be started again
            self._connector.record_failure(f"{self._server_name} was there, and {how}")

    def _describe_unreachable(self) -> str:
        meeting = self._config
        name = f"node {meeting.node_rank} ({self._hello.host})"
        what = f"{name} did not reach node 0 at {meeting.addr}:{meeting.port} in {meeting.timeout_s:.0f} s"
        what += f", last: {self._connector.last_error}"
        via = f" by interface {found}" if (found := self._outgoing_interface()) else ""
        do = f"check that node 0 runs, and --master-addr and --master-port, which this node tried{via}"
        return f"launch: {what}; {do}; {INTERFACE_HINT}"

    def _outgoing_interface(self) -> str:
        """The interface by which the kernel would reach the hub."""
        try:
            family, target = resolve_address(self._config.addr, self._config.port, fallback=self._config.fallback_addr)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting such a socket sends nothing
                probe.connect(target)
                return find_interface(str(probe.getsockname()[0]))
        except OSError:
            return ""

    def _fail_join(self, line: str) -> None:
        self._decided = True
        self._connector.close()
        self._notify(JoinRefused(line=line))
