"""The process that keeps a supervisor in touch with the other nodes, and the supervisor's end of it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import resource
import selectors
import signal
import socket
import time
from dataclasses import replace
from typing import NoReturn

from dtrain.launch.launch_plan import NodeRendezvous
from dtrain.launch.nodes.addresses import listen_for_nodes
from dtrain.launch.nodes.messages import (
    Hello,
    JoinAccepted,
    JoinRefused,
    Message,
    MessageSocket,
    NodeFailed,
    Notice,
    RanksExited,
    RanksFailed,
)
from dtrain.launch.nodes.rendezvous_client import RendezvousClient
from dtrain.launch.nodes.rendezvous_server import LOST_NODE_EXIT_CODE, RendezvousServer
from dtrain.launch.processes import die_with_parent, reset_signal_handlers

_TICK_S = 0.2
_SUSPENDED_S = 2.0  # between two turns: this process was stopped, or its machine asleep
_PORT_RETRY_S = 2.0  # an earlier job may be leaving the port at this moment
_PORT_QUERY_S = 1.0  # for the answer to who has the port
_FLUSH_TIMEOUT_S = 2.0  # for sending what is queued when the supervisor has gone
_IGNORED_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGPIPE,
)


class Agent:
    """The supervisor's end. ``fileno`` becomes readable when ``read`` has something to give.

    First comes ``Joined`` or ``Refused``, with a ``Notice`` at any time. Then the supervisor sends ``Failed`` as soon as a rank
    has failed, or it was told to end, and ``Ended`` when all its ranks have ended. It hears ``End`` when another node failed or
    was lost, and ``Over`` when the ranks of all nodes have ended. After ``Failed`` or ``End`` it need not wait for ``Over``,
    which a lost node keeps from coming.
    """

    def __init__(self, pid: int, sock: socket.socket, meeting: NodeRendezvous) -> None:
        self.pid = pid
        self._socket = MessageSocket(sock)
        self._joined = self._reported = False
        self._node_rank = meeting.node_rank

    def fileno(self) -> int:
        return self._socket.sock.fileno()

    def read(self) -> list[Message]:
        """What has come, without waiting. When the process is gone, the last message says so, once."""
        self._socket.flush()
        messages = self._socket.receive()
        self._joined |= any(isinstance(message, JoinAccepted) for message in messages)
        if self._socket.closed_reason and not self._reported:
            self._reported = True
            messages.append(self._exit_message())
        return messages

    def send(self, message: RanksFailed | RanksExited) -> None:
        """Pass a message on to the other nodes, without waiting."""
        self._socket.send(message)

    @property
    def has_exited(self) -> bool:
        """Whether the process has ended: ``fileno`` should not be watched any more, it would always be readable."""
        return bool(self._socket.closed_reason)

    def close(self) -> None:
        """Let the process end, once it has sent what it was given. It is a child to be waited for."""
        self._socket.close()

    def _exit_message(self) -> Message:
        what = f"the process that talks to the other nodes (pid {self.pid}) has ended"
        if self._joined:
            return NodeFailed(line=f"node {self._node_rank}: {what}", code=LOST_NODE_EXIT_CODE, node_rank=self._node_rank)
        return JoinRefused(line=f"launch: {what}; start the job again")


def start_agent(meeting: NodeRendezvous) -> Agent:
    """Start the process that meets the other nodes. This process must have a single thread.

    Raises:
        OSError: no more processes or files.
    """
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # our handlers must not run in the child
    try:
        pid = os.fork()
        if pid == 0:
            _run_agent(meeting, theirs, parent)
    except BaseException:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return Agent(pid, ours, meeting)


def _run_agent(meeting: NodeRendezvous, sock: socket.socket, parent: int) -> NoReturn:
    """Turn this fresh fork into the agent."""
    try:
        die_with_parent(parent)
        reset_signal_handlers(
            ignore=_IGNORED_SIGNALS
        )  # a scheduler signals everything at once: it must outlive that, to say how the node ended
        _close_other_fds(sock.fileno())
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the hub has a connection to every node
        _AgentLoop(meeting, sock).run()
    except BaseException as error:  # noqa: BLE001 - a copy of the supervisor must not live on, whatever went wrong
        with contextlib.suppress(Exception):
            MessageSocket(sock).send(JoinRefused(line=f"launch: cannot meet the other nodes: {type(error).__name__}: {error}"))
    finally:
        os._exit(0)


def _close_other_fds(fd: int) -> None:
    """Close what was inherited: the ends of the supervisor's pipes tell others that it lives."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    for other in map(int, os.listdir("/dev/fd")):
        if other > 2 and other != fd:
            with contextlib.suppress(OSError):  # the listing's own descriptor has been closed already
                os.close(other)


class _AgentLoop:
    """The agent's loop."""

    def __init__(self, meeting: NodeRendezvous, sock: socket.socket) -> None:
        self._config = meeting
        self._selector = selectors.DefaultSelector()
        self._supervisor = MessageSocket(sock)
        self._supervisor.watch(self._selector, self._read_supervisor)
        self._hello = _make_hello(meeting)
        self._server: RendezvousServer | None = None
        self._client: RendezvousClient | None = None
        self._started_at, self._last_poll_at = time.monotonic(), 0.0
        if meeting.node_rank != 0:
            self._client = RendezvousClient(meeting, self._hello, self._selector, connection=None, notify=self._supervisor.send)

    def run(self) -> None:
        """Until the supervisor has gone."""
        self._poll(time.monotonic())
        while not self._supervisor.closed_reason:
            self._select_once(_TICK_S)
            now = time.monotonic()
            if now - self._last_poll_at >= _TICK_S:
                self._poll(now)
        self._shut_down()

    def _select_once(self, wait_s: float) -> None:
        for key, _ in self._selector.select(wait_s):
            key.data()

    def _poll(self, now: float) -> None:
        if self._client is None:
            self._start_server(now)
        for part in (self._server, self._client):
            if part is not None:
                if now - self._last_poll_at > _SUSPENDED_S:
                    part.reset_timeouts(now)
                part.poll(now)
        self._last_poll_at = now

    def _start_server(self, now: float) -> None:
        """On node 0: become the hub, and its first member."""
        meeting = self._config
        try:
            listener, notice = listen_for_nodes(meeting.addr, meeting.port, fallback=meeting.fallback_addr)
        except OSError as error:
            patience_s = {errno.EADDRINUSE: _PORT_RETRY_S, errno.ENOENT: meeting.timeout_s}.get(error.errno or 0, 0.0)
            if now - self._started_at >= min(patience_s, meeting.timeout_s):
                self._report_listen_failure(error)
            return
        if notice:
            self._supervisor.send(Notice(line=notice))
        self._server = RendezvousServer(
            self._hello,
            listener,
            self._selector,
            addr=f"{meeting.addr}:{meeting.port}",
            hosts=meeting.hosts,
            timeout_s=meeting.timeout_s,
            silence_s=meeting.silence_s,
            notify=lambda line: self._supervisor.send(Notice(line=line)),
        )
        here, there = socket.socketpair()
        self._server.add_connection(there, "this node")
        self._client = RendezvousClient(meeting, self._hello, self._selector, connection=here, notify=self._supervisor.send)

    def _report_listen_failure(self, error: OSError) -> None:
        """Say why. If another job's hub has the port, it is asked who it is: its refusal names it."""
        meeting = self._config
        what = f"node 0 cannot listen at {meeting.addr}:{meeting.port}: {(error.strerror or str(error)).lower()}"
        do = "choose another --master-port, or --master-addr, the same on each node"

        def tell(message: Message) -> None:
            known = self._client is not None and self._client.was_refused and isinstance(message, JoinRefused)
            by = (
                f" by another launch: {message.line.removeprefix('launch: ')}"
                if known and isinstance(message, JoinRefused)
                else ""
            )
            self._supervisor.send(JoinRefused(line=f"launch: {what}{by}; {do}"))

        asked_s = _PORT_QUERY_S if error.errno == errno.EADDRINUSE else 0.0
        question = replace(meeting, timeout_s=asked_s)
        self._client = RendezvousClient(question, self._hello, self._selector, connection=None, notify=tell)

    def _read_supervisor(self) -> None:
        self._supervisor.flush()
        for message in self._supervisor.receive():
            if self._client is not None and isinstance(message, RanksFailed | RanksExited):
                self._client.send(message)

    def _shut_down(self) -> None:
        """Send what is queued, within reason. A few rounds: on node 0 it goes from the member to the hub to the others."""
        for _ in range(3):
            self._select_once(0)
        parts = [part for part in (self._client, self._server) if part is not None]
        deadline = time.monotonic() + _FLUSH_TIMEOUT_S
        while [part for part in parts if not part.flush()] and time.monotonic() < deadline:
            time.sleep(0.01)
        for part in reversed(parts):
            part.close()


def _make_hello(meeting: NodeRendezvous) -> Hello:
    return Hello(
        node_rank=meeting.node_rank,
        nodes=meeting.nodes,
        nproc=meeting.nproc,
        base_rank=meeting.base_rank,
        world_size=meeting.world_size,
        token=hashlib.sha256(meeting.token.encode()).hexdigest(),  # what is only compared need not be told
        host=socket.gethostname(),
        pid=os.getppid(),
        facts=dict(meeting.facts),
        run_name=meeting.run_name,
        store_port=meeting.store_port,
    )
