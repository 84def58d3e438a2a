"""Talk to the other nodes of a job: ``python agent_main.py FD``, started by the supervisor. Imports torch.

The main thread watches the time. One thread reads messages of the supervisor. Each ``NodeSession`` has a thread that makes its
requests to the store, because a request may never return. A session is one connection: it joins, beats, and exchanges failures
and exits. If a request never returns, the main thread abandons the session with its thread.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # Modules in this file's folder must not shadow modules of the program.
    del sys.path[0]

import contextlib
import errno
import hashlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import IO

import msgspec

from dtrain.launch.coordinator import HEARTBEAT_S, INTERFACE_HINT, LEFT, LOST_NODE_EXIT_CODE, SUSPENDED_S, Coordinator
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
    find_interface,
    outgoing_interface,
)

POLL_S = 0.2
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0
# Node 0 marks its store at once.
_WELCOME_TIMEOUT_S = 3.0
# An earlier job may be about to release the port. With restarts it may be the agent of a lost launcher, which listens until the
# other nodes know, and for ``silence_s`` at most.
_PORT_RETRY_S = 2.0
# seconds for the job that uses the port to identify itself
_PORT_QUERY_S = 3.0
# seconds to publish the last messages after the exit of the supervisor
_LEAVE_TIMEOUT_S = 2.0


def main(sock: socket.socket) -> None:
    """Run the agent until the supervisor closes its connection, whose first line is the node's entry to the rendezvous."""
    lines = sock.makefile("rb")
    config = msgspec.json.decode(lines.readline(), type=NodeRendezvous)
    try:
        from torch.distributed import TCPStore

        AgentLoop(config, sock, lines, lambda: NodeStore(TCPStore)).run()
    except Exception as error:  # noqa: BLE001 - every error is reported to the supervisor
        with contextlib.suppress(OSError):
            sock.sendall(encode(JoinRefused(line=f"launch: cannot join the other nodes: {_format_error(error)}")))


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
            self._fail(f"cannot join the other nodes: {_format_error(error)}")

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
                if self._session.waits:
                    # The attempt without this node has ended, and the next one begins.
                    self._started_at, self._pause_s = time.monotonic(), _FIRST_PAUSE_S
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
        in_use_s = _PORT_RETRY_S + (config.silence_s if config.max_restarts else 0.0)
        retry_s = {errno.EADDRINUSE: in_use_s, errno.ENOENT: config.timeout_s}.get(error.errno or 0, 0.0)
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
        self._send(NodeFailed(line=line, code=LOST_NODE_EXIT_CODE, node_rank=0, is_lost=True))

    def _describe_unreachable(self) -> str:
        config = self._config
        name = f"node {config.node_rank} ({self._hello.host})"
        problem = f"{name} did not reach node 0 at {config.addr}:{config.port} in {config.timeout_s:.0f} s"
        problem += f", last: {self._last_error}"
        interface = outgoing_interface(config.addr, config.port, fallback=config.fallback_addr)
        via = f" by interface {interface}" if interface else ""
        advice = f"Check that node 0 runs, and --master-addr and --master-port, which this node tried{via}"
        if config.restarts:
            advice = f"Start the line of node 0 again, on a machine with its address, which this node tried{via}"
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
        restarts=config.restarts,
        fruitless_restarts=config.fruitless_restarts,
        min_nodes=config.min_nodes,
        members=config.members,
    )


def _format_error(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


class NotALaunchError(Exception):
    """Raised if the program at the address of node 0 serves a store, but is not a launcher of dtrain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded:
    """Last event of a session: the error that ended the session, or None after ``leave``."""

    error: Exception | None


class NodeSession:
    """Session of one node.

    Args:
        config: entry of the node.
        hello: record of the node.
        store: unconnected store.
        serves: if True, this process serves the store, and coordinates the nodes.
        notify: function that receives the session's events, in the session's thread: the messages for the supervisor, and
            ``Welcome`` once the store is known to be one of a launch.
    """

    def __init__(
        self,
        config: NodeRendezvous,
        hello: Hello,
        store: NodeStore,
        *,
        serves: bool,
        notify: Callable[[NodeSession, Message | SessionEnded], None],
    ) -> None:
        self._config, self._hello, self._store, self._serves = config, hello, store, serves
        self._notify = notify
        self._inbox: queue.SimpleQueue[RanksFailed | RanksExited | None] = queue.SimpleQueue()
        self._coordinator: Coordinator | None = None
        self._number = 0
        self._beat_at = 0.0
        self._answered = self._joined = self._failure_known = self._exits_posted = self._finished = self._end_read = False
        self.was_welcome = False
        # True once node 0 has said that this node joins at the next restart.
        self.waits = False

    @property
    def waiting_since(self) -> float | None:
        """Start of the request to the store that has no answer yet; None between requests."""
        return self._store.waiting_since

    def start(self) -> None:
        """Run the session in a thread that does not keep the process alive."""
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, message: RanksFailed | RanksExited) -> None:
        """Pass a message of the supervisor to the other nodes."""
        self._inbox.put(message)

    def leave(self) -> None:
        """End the session. On node 0 the session ends after the other nodes have read the end of the job."""
        self._inbox.put(None)

    def abandon(self) -> None:
        """End the session without another request."""
        self._store.abandoned = True
        self._inbox.put(None)

    def _run(self) -> None:
        error: Exception | None = None
        try:
            self._connect()
            self._arrive()
            while self._handle_next_message():
                self._poll(time.monotonic())
            self._leave()
        except Exception as caught:  # noqa: BLE001 - the agent reports every error to the supervisor
            error = caught
        self._notify(self, SessionEnded(error=error))

    def _connect(self) -> None:
        if self._serves:
            notice = self._store.serve(self._config)
            if notice:
                self._notify(self, Notice(line=notice))
            self._coordinator = Coordinator(
                self._config, self._hello, self._store, notify=lambda notice: self._notify(self, notice)
            )
        else:
            self._store.connect(self._config)
        deadline = time.monotonic() + _WELCOME_TIMEOUT_S
        while not isinstance(welcome := self._store.find("welcome"), Welcome):
            if time.monotonic() > deadline:
                raise NotALaunchError("serves a store without a launch")
            time.sleep(POLL_S)
        self.was_welcome = True
        self._notify(self, welcome)

    def _arrive(self) -> None:
        self._number = self._store.add("arrivals")
        # Node 0 reads the heartbeats of all arrivals, so the counter comes first.
        self._beat(time.monotonic())
        self._store.post(f"hello/{self._number}", replace(self._hello, own_addr=self._store.own_addr))

    def _beat(self, now: float) -> None:
        self._store.add(f"heartbeat/{self._number}")
        self._beat_at = now

    def _handle_next_message(self) -> bool:
        """Handle a message of the supervisor, or wait until the next poll is due. Return False after ``leave``."""
        try:
            message = self._inbox.get(timeout=POLL_S)
        except queue.Empty:
            return True
        if isinstance(message, RanksFailed):
            self._post_failure(f": {message.line}", message.code, is_final=message.is_final)
        elif isinstance(message, RanksExited):
            self._store.post(f"exits/{self._hello.node_rank}", message)
            self._store.add("exited")
            self._exits_posted = True
        return message is not None

    def _post_failure(self, reason: str, code: int, *, is_final: bool = False, is_lost: bool = False) -> None:
        """Post the failure of this node, unless another failure was first, which the next poll reads."""
        if not self._joined or self._failure_known:
            return
        line = f"{self._hello.display_name}{reason}"
        rank = self._hello.node_rank
        failure = NodeFailed(line=line, code=code, node_rank=rank, is_final=is_final, is_lost=is_lost)
        self._failure_known = self._store.post_failure(failure)
        self._mark_end_read(self._failure_known)

    def _poll(self, now: float) -> None:
        if self._coordinator is not None:
            self._coordinator.poll(now)
        if now - self._beat_at >= HEARTBEAT_S:
            self._beat(now)
        if not self._answered:
            self._read_answer()
        elif self._joined and not self._failure_known and isinstance(failure := self._store.find("failure"), NodeFailed):
            self._failure_known = True
            self._notify(self, failure)
            self._mark_end_read()
        if self._exits_posted and not self._finished and isinstance(finished := self._store.find("finished"), JobFinished):
            self._finished = True
            self._notify(self, finished)
            self._mark_end_read()

    def _read_answer(self) -> None:
        answer = self._store.find(f"answer/{self._number}")
        if isinstance(answer, JoinAccepted):
            self._answered = self._joined = True
            # The address of node 0 works from this node, whatever names resolve to on other nodes.
            layout = replace(answer.layout, master_addr=self._store.server_addr)
            interface = answer.interface or (find_interface(self._store.own_addr) if self._store.own_addr else "")
            self._notify(self, replace(answer, layout=layout, interface=interface))
        elif isinstance(answer, JoinRefused):
            self._answered = True
            self._notify(self, answer)
            self._mark_end_read()
        elif isinstance(answer, Notice) and not self.waits:
            self.waits = True
            self._notify(self, answer)

    def _mark_end_read(self, end_read: bool = True) -> None:
        """Count this node among those that do not need the store any more. Node 0 waits for all of them."""
        if end_read and not self._end_read:
            self._end_read = True
            self._store.add("readers_done")

    def _leave(self) -> None:
        if not self._exits_posted:
            self._post_failure(" is lost: its launcher has ended", LOST_NODE_EXIT_CODE, is_lost=True)
        self._store.set_counter(f"heartbeat/{self._number}", LEFT)
        self._mark_end_read()
        if self._coordinator is None or self._coordinator.is_joining:
            return
        while self._store.add("readers_done", 0) < self._coordinator.readers:
            time.sleep(POLL_S / 4)
            self._coordinator.poll(time.monotonic())


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
    # Threads may wait for a store that never answers.
    os._exit(0)
