"""Connect a node to the rendezvous server, and relay messages between the server and the node's supervisor."""

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

# An address that drops packets must not use up the time of the next address.
_CONNECT_TIMEOUT_S = 3.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0


class RetryingConnector:
    """Connector that retries until the rendezvous server listens, because node 0 may start later than this node."""

    def __init__(
        self, config: NodeRendezvous, selector: selectors.BaseSelector, on_connected: Callable[[socket.socket], None]
    ) -> None:
        self._config, self._selector, self._on_connected = config, selector, on_connected
        self._sock: socket.socket | None = None
        self._attempts, self._pause_s, self._next_attempt_at = 0, _FIRST_PAUSE_S, 0.0
        self.last_error = "not tried yet"

    def poll(self, now: float) -> None:
        """Start the next attempt when it is due, or give up an attempt without an answer."""
        if self._sock is None and now >= self._next_attempt_at:
            self._start_attempt(now)
        elif self._sock is not None and now >= self._next_attempt_at:
            self.record_failure(f"no answer in {_CONNECT_TIMEOUT_S:.0f} s")

    def record_failure(self, reason: str) -> None:
        """Record a failed attempt; the next attempt starts after a pause."""
        self.close()
        self.last_error = reason
        self._next_attempt_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)

    def close(self) -> None:
        if self._sock is not None:
            self._selector.unregister(self._sock)
            self._sock.close()
            self._sock = None

    def _start_attempt(self, now: float) -> None:
        try:
            targets = resolve_address(self._config.addr, self._config.port, fallback=self._config.fallback_addr)
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
            # Without a listener, the kernel may connect the socket to itself.
            problem = errno.ECONNREFUSED
        if problem:
            self.record_failure(os.strerror(problem).lower())
            return
        self._selector.unregister(sock)
        self._sock = None
        self._on_connected(sock)


class RendezvousClient:
    """Client of the rendezvous for one node. Call ``poll`` a few times per second.

    Args:
        connection: connection to a server in this process; None connects to the server's address.
        notify: function that receives the messages for the supervisor.
    """

    def __init__(
        self,
        config: NodeRendezvous,
        hello: Hello,
        selector: selectors.BaseSelector,
        *,
        connection: socket.socket | None,
        notify: Callable[[Message], None],
    ) -> None:
        self._config, self._hello, self._selector, self._notify = config, hello, selector, notify
        self._deadline = time.monotonic() + config.timeout_s
        self._connector = RetryingConnector(config, selector, self._attach)
        self._socket: MessageSocket | None = None
        # The host is added after the server's answer.
        self._server_name = "node 0"
        self._welcome = self._joined = self._decided = False
        # True if a server refused this node, which proves that a server exists.
        self.was_refused = False
        if connection is not None:
            self._attach(connection)

    def poll(self, now: float) -> None:
        """Take the steps that are due: connect, send pings, and give up a server that is silent or does not listen."""
        if self._decided and self._socket is None:
            return
        # A server answers the first message at once.
        silence_s = self._config.silence_s if self._welcome else _CONNECT_TIMEOUT_S
        if not self._welcome and not self._decided and now > self._deadline:
            self._fail_join(self._describe_unreachable())
        elif self._socket is None:
            self._connector.poll(now)
        elif now - self._socket.last_received_at > silence_s:
            self._connection_lost(f"was silent for {silence_s:.0f} s")
        elif now - self._socket.last_sent_at >= PING_INTERVAL_S:
            self._socket.send(Ping())

    def reset_timeouts(self, now: float) -> None:
        """Restart the timeouts, because this process was suspended and the server's silence has no meaning."""
        if self._socket is not None:
            self._socket.last_received_at = now

    def send(self, message: RanksFailed | RanksExited) -> None:
        """Send a message of the supervisor to the server."""
        if self._socket is not None:
            self._socket.send(message)

    def flush(self) -> bool:
        """Return True if all messages were sent."""
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
        connection = self._socket
        if connection is None:
            return
        connection.flush()
        for message in connection.receive():
            self._handle_message(message)
        if connection.closed_reason and connection is self._socket:
            self._connection_lost(f"is lost: {connection.closed_reason}")

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
                # Pings need no answer.
                pass

    def _with_local_address(self, joined: JoinAccepted) -> JoinAccepted:
        """Add the address of node 0 and the interface, as seen from this node."""
        assert self._socket is not None
        sock = self._socket.sock
        if sock.family == socket.AF_UNIX:
            return joined
        interface = find_interface(str(sock.getsockname()[0]))
        # The peer's address works from this node, whatever names resolve to on other nodes.
        addr = str(sock.getpeername()[0])
        return replace(joined, interface=interface, layout=replace(joined.layout, master_addr=addr))

    def _connection_lost(self, reason: str) -> None:
        assert self._socket is not None
        self._socket.close()
        self._socket = None
        if self._decided:
            return
        if self._joined:
            self._decided = True
            self._notify(NodeFailed(line=f"{self._server_name} {reason}", code=LOST_NODE_EXIT_CODE, node_rank=0))
        elif not self._welcome:
            self._connector.record_failure(f"the program that answers is not a launcher of dtrain: it {reason}")
        else:
            # The launcher of node 0 exited, and may be started again.
            self._welcome = False
            self._connector.record_failure(f"{self._server_name} was there, and {reason}")

    def _describe_unreachable(self) -> str:
        config = self._config
        name = f"node {config.node_rank} ({self._hello.host})"
        problem = f"{name} did not reach node 0 at {config.addr}:{config.port} in {config.timeout_s:.0f} s"
        problem += f", last: {self._connector.last_error}"
        via = f" by interface {interface}" if (interface := self._outgoing_interface()) else ""
        advice = f"Check that node 0 runs, and --master-addr and --master-port, which this node tried{via}"
        return f"launch: {problem}. {advice}. {INTERFACE_HINT}."

    def _outgoing_interface(self) -> str:
        """Return the interface by which the kernel would reach the server."""
        try:
            family, target = resolve_address(self._config.addr, self._config.port, fallback=self._config.fallback_addr)[0]
            # Connecting a datagram socket sends nothing.
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                return find_interface(str(probe.getsockname()[0]))
        except OSError:
            return ""

    def _fail_join(self, line: str) -> None:
        self._decided = True
        self._connector.close()
        self._notify(JoinRefused(line=line))
