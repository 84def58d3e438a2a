"""Talk to the other nodes of a job: ``python agent_main.py FD``, started by the supervisor. Imports torch.

The main thread watches the time. One thread reads messages of the supervisor. Each ``NodeSession`` has a thread that makes its
requests to the store, because a request may never return.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # Modules in this file's folder must not shadow modules of the program.
    del sys.path[0]

import contextlib
import errno
import hashlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import IO

from dtrain.launch.addresses import outgoing_interface
from dtrain.launch.coordinator import INTERFACE_HINT, LOST_NODE_EXIT_CODE, SUSPENDED_S
from dtrain.launch.launch_plan import NodeRendezvous
from dtrain.launch.node_messages import (
    Hello,
    JobFinished,
    JoinAccepted,
    JoinRefused,
    Message,
    NodeFailed,
    NodeStore,
    Notice,
    RanksExited,
    RanksFailed,
    Welcome,
    decode,
    encode,
)
from dtrain.launch.node_session import POLL_S, NodeSession, NotALaunchError, SessionEnded

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0
# An earlier job may be about to release the port.
_PORT_RETRY_S = 2.0


# seconds for the job that uses the port to identify itself
_PORT_QUERY_S = 3.0
# seconds to publish the last messages after the exit of the supervisor
_LEAVE_TIMEOUT_S = 2.0


def main(sock: socket.socket) -> None:
    """Run the agent until the supervisor closes its connection, whose first line is the node's entry to the rendezvous."""
    lines = sock.makefile("rb")
    record = json.loads(lines.readline())
    config = NodeRendezvous(**{**record, "hosts": tuple(record["hosts"])})
    try:
        from torch.distributed import TCPStore

        AgentLoop(config, sock, lines, lambda: NodeStore(TCPStore)).run()
    except Exception as error:  # noqa: BLE001 - every error is reported to the supervisor
        with contextlib.suppress(OSError):
            sock.sendall(encode(JoinRefused(line=f"launch: cannot join the other nodes: {_describe(error)}")))


class AgentLoop:
    """Main thread of the agent: starts sessions until one joins, and relays messages between session and supervisor.

    Args:
        config: entry of the node to the rendezvous.
        sock: connection to the supervisor.
        lines: file that reads from ``sock``.
        make_store: function that returns an unconnected store.
    """

    def __init__(
        self, config: NodeRendezvous, sock: socket.socket, lines: IO[bytes], make_store: Callable[[], NodeStore]
    ) -> None:
        self._config, self._socket, self._lines, self._make_store = config, sock, lines, make_store
        self._hello = make_hello(config)
        # Events with their session; the sender is None for messages of the supervisor, whose last event is None.
        self._events: queue.SimpleQueue[tuple[NodeSession | None, Message | SessionEnded | None]] = queue.SimpleQueue()
        self._session: NodeSession | None = None
        self._started_at = self._checked_at = self._resumed_at = time.monotonic()
        self._next_attempt_at, self._pause_s = 0.0, _FIRST_PAUSE_S
        self._last_error = "not tried yet"
        # The host is added after the server's answer.
        self._server_name = "node 0"
        # Set while this process asks the owner of its port for a name.
        self._listen_problem, self._query_ends_at = "", 0.0
        self._joined = self._decided = self._supervisor_gone = False

    def run(self) -> None:
        """Run until the supervisor closes its connection."""
        threading.Thread(target=self._read_supervisor, daemon=True).start()
        while not self._supervisor_gone:
            self._check_session(time.monotonic())
            with contextlib.suppress(queue.Empty):
                self._handle_event(*self._events.get(timeout=POLL_S))
        self._leave()

    def _read_supervisor(self) -> None:
        with contextlib.suppress(OSError):
            for line in self._lines:
                self._events.put((None, decode(line)))
        self._events.put((None, None))

    def _check_session(self, now: float) -> None:
        """Take the steps that are due: start a session, or give up a store that does not answer."""
        if now - self._checked_at > SUSPENDED_S:
            # This process was suspended, so the time of a request has no meaning.
            self._resumed_at = now
        self._checked_at = now
        deadline = self._started_at + self._config.timeout_s
        if self._decided:
            return
        if self._listen_problem and now > self._query_ends_at:
            self._report_listen_problem()
        elif self._session is None:
            if self._config.node_rank != 0 and now > deadline:
                self._refuse(self._describe_unreachable())
            elif now >= self._next_attempt_at:
                self._start_session(serves=self._config.node_rank == 0 and not self._listen_problem)
        elif self._config.node_rank != 0 and not self._session.was_welcome and now > deadline:
            self._lose_session("was silent")
        elif (waiting_since := self._session.waiting_since) is not None:
            silence_s = self._config.silence_s
            if now - max(waiting_since, self._resumed_at) > silence_s:
                self._lose_session(f"was silent for {silence_s:.0f} s")

    def _start_session(self, *, serves: bool) -> None:
        self._session = NodeSession(
            self._config,
            self._hello,
            self._make_store(),
            serves=serves,
            notify=lambda session, event: self._events.put((session, event)),
        )
        self._session.start()

    def _handle_event(self, sender: NodeSession | None, event: Message | SessionEnded | None) -> None:
        if sender is not None:
            # Events of abandoned sessions come too late.
            if sender is self._session:
                self._handle_session_event(event)
        elif event is None:
            self._supervisor_gone = True
        elif self._session is not None and isinstance(event, RanksFailed | RanksExited):
            self._session.send(event)

    def _handle_session_event(self, event: Message | SessionEnded | None) -> None:
        match event:
            case Welcome():
                self._server_name = f"node 0 ({event.host})"
            case SessionEnded():
                self._handle_session_end(event.error)
            case JoinRefused() if self._listen_problem:
                self._report_listen_problem(f" by another launch: {event.line.removeprefix('launch: ').rstrip('.')}")
            case JoinAccepted():
                self._joined = True
                self._send(event)
            case JoinRefused() | NodeFailed() | JobFinished():
                self._decided = True
                self._send(event)
            case Notice():
                self._send(event)

    def _handle_session_end(self, error: Exception | None) -> None:
        if self._decided or error is None:
            self._session = None
        elif self._listen_problem:
            self._report_listen_problem()
        elif isinstance(error, OSError) and self._config.node_rank == 0:
            self._handle_listen_error(error)
        elif isinstance(error, OSError):
            self._retry((error.strerror or str(error)).lower())
        elif isinstance(error, NotALaunchError):
            self._lose_session(str(error))
        elif isinstance(error, RuntimeError):
            self._lose_session("closed the connection")
        else:
            self._fail(f"cannot join the other nodes: {_describe(error)}")

    def _lose_session(self, reason: str) -> None:
        """Handle the loss of the store: the end of a running job; otherwise try again."""
        assert self._session is not None
        self._session.abandon()
        silent = reason.startswith("was silent")
        if self._session.was_welcome:
            loss = f"{self._server_name} {reason}" if silent else f"{self._server_name} is lost: it {reason}"
            if self._joined:
                self._fail(loss)
            else:
                # The launcher of node 0 exited, and may be started again.
                self._retry(f"{self._server_name} was there, and {loss.removeprefix(self._server_name).lstrip()}")
        else:
            self._retry(f"the program that answers is not a launcher of dtrain: it {reason}")

    def _retry(self, reason: str) -> None:
        """Start the next session after a pause."""
        self._session, self._last_error = None, reason
        self._next_attempt_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)

    def _handle_listen_error(self, error: OSError) -> None:
        """Try again to listen if the port may become free. Otherwise ask the program that uses the port for its name."""
        config = self._config
        self._retry((error.strerror or str(error)).lower())
        retry_s = {errno.EADDRINUSE: _PORT_RETRY_S, errno.ENOENT: config.timeout_s}.get(error.errno or 0, 0.0)
        now = time.monotonic()
        if now - self._started_at >= min(retry_s, config.timeout_s):
            self._listen_problem = f"node 0 cannot listen at {config.addr}:{config.port}: {self._last_error}"
            self._query_ends_at = now + (_PORT_QUERY_S if error.errno == errno.EADDRINUSE else 0.0)
            self._next_attempt_at = now

    def _report_listen_problem(self, owner: str = "") -> None:
        advice = "Choose another --master-port, or --master-addr, the same on each node."
        self._refuse(f"launch: {self._listen_problem}{owner}. {advice}")

    def _refuse(self, line: str) -> None:
        self._decided, self._session = True, None
        self._send(JoinRefused(line=line))

    def _fail(self, line: str) -> None:
        """Report the failure of the connection to node 0."""
        if not self._joined:
            self._refuse(f"launch: {line}")
            return
        self._decided, self._session = True, None
        self._send(NodeFailed(line=line, code=LOST_NODE_EXIT_CODE, node_rank=0))

    def _describe_unreachable(self) -> str:
        config = self._config
        name = f"node {config.node_rank} ({self._hello.host})"
        problem = f"{name} did not reach node 0 at {config.addr}:{config.port} in {config.timeout_s:.0f} s"
        problem += f", last: {self._last_error}"
        interface = outgoing_interface(config.addr, config.port, fallback=config.fallback_addr)
        via = f" by interface {interface}" if interface else ""
        advice = f"Check that node 0 runs, and --master-addr and --master-port, which this node tried{via}"
        return f"launch: {problem}. {advice}. {INTERFACE_HINT}."

    def _send(self, message: Message) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendall(encode(message))

    def _leave(self) -> None:
        """Publish the last messages. On node 0, wait until the other nodes have read the end of the job."""
        session = self._session
        if session is None or not session.was_welcome:
            return
        session.leave()
        limit_s = self._config.silence_s if self._config.node_rank == 0 else _LEAVE_TIMEOUT_S
        deadline = time.monotonic() + limit_s
        while (remaining_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                sender, event = self._events.get(timeout=remaining_s)
                if sender is session and isinstance(event, SessionEnded):
                    return


def make_hello(config: NodeRendezvous) -> Hello:
    """Build the record of this node, for the coordinator."""
    return Hello(
        node_rank=config.node_rank,
        nodes=config.nodes,
        nproc=config.nproc,
        base_rank=config.base_rank,
        world_size=config.world_size,
        # Tokens are only compared, so a digest suffices.
        token=hashlib.sha256(config.token.encode()).hexdigest(),
        host=socket.gethostname(),
        pid=os.getppid(),
        facts=dict(config.facts),
        run_name=config.run_name,
        store_port=config.store_port,
    )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
    # Threads may wait for a store that never answers.
    os._exit(0)
