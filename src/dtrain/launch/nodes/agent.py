"""Run the agent process, which exchanges messages with other nodes, and connect it with its supervisor."""

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
from dtrain.launch.processes import die_with_parent, fork_process, reset_signal_handlers

_TICK_S = 0.2
# With so many seconds between two polls, this process was suspended.
_SUSPENDED_S = 2.0
# An earlier job may be about to release the port.
_PORT_RETRY_S = 2.0
# seconds for the job that uses the port to identify itself
_PORT_QUERY_S = 1.0
# seconds to send queued messages after the exit of the supervisor
_FLUSH_TIMEOUT_S = 2.0
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
    """Supervisor's end of the connection to the agent process. ``fileno`` is readable when ``read`` has messages.

    The first message is ``JoinAccepted`` or ``JoinRefused``; a ``Notice`` may come at any time. The supervisor sends
    ``RanksFailed`` as soon as a rank has failed or a stop was requested, and ``RanksExited`` when all its ranks have exited.
    The supervisor receives ``NodeFailed`` when another node failed or was lost, and ``JobFinished`` when the ranks of all nodes
    have exited. After ``RanksFailed`` or ``NodeFailed`` it need not wait for ``JobFinished``, which a lost node prevents.
    """

    def __init__(self, pid: int, sock: socket.socket, config: NodeRendezvous) -> None:
        self.pid = pid
        self._socket = MessageSocket(sock)
        self._joined = self._reported = False
        self._node_rank = config.node_rank

    def fileno(self) -> int:
        return self._socket.sock.fileno()

    def read(self) -> list[Message]:
        """Return the received messages, without waiting. After the exit of the agent, the last message reports the exit."""
        self._socket.flush()
        messages = self._socket.receive()
        self._joined |= any(isinstance(message, JoinAccepted) for message in messages)
        if self._socket.closed_reason and not self._reported:
            self._reported = True
            messages.append(self._exit_message())
        return messages

    def send(self, message: RanksFailed | RanksExited) -> None:
        """Send a message to the other nodes, without waiting."""
        self._socket.send(message)

    @property
    def has_exited(self) -> bool:
        """True after the exit of the agent. Stop watching ``fileno`` then, because it is always readable."""
        return bool(self._socket.closed_reason)

    def close(self) -> None:
        """Close the connection. The agent sends its queued messages and exits; the caller waits for the child process."""
        self._socket.close()

    def _exit_message(self) -> Message:
        problem = f"the process that talks to the other nodes (pid {self.pid}) has ended"
        if self._joined:
            return NodeFailed(line=f"node {self._node_rank}: {problem}", code=LOST_NODE_EXIT_CODE, node_rank=self._node_rank)
        return JoinRefused(line=f"launch: {problem}. Start the job again.")


def start_agent(config: NodeRendezvous) -> Agent:
    """Start the agent process. This process must have a single thread.

    Raises:
        OSError: the limit of processes or files is reached.
    """
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    try:
        with theirs:
            pid = fork_process(lambda: _run_agent(config, theirs, parent))
    except BaseException:
        ours.close()
        raise
    return Agent(pid, ours, config)


def _run_agent(config: NodeRendezvous, sock: socket.socket, parent: int) -> int:
    """Run the agent in this fork, and return its exit code."""
    try:
        die_with_parent(parent)
        # A scheduler may signal all processes. The agent must survive, to report the exit of its node.
        reset_signal_handlers(ignore=_IGNORED_SIGNALS)
        _close_other_fds(sock.fileno())
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        # The server has a connection to every node.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        _AgentLoop(config, sock).run()
    except Exception as error:  # noqa: BLE001 - every error is reported to the supervisor
        with contextlib.suppress(Exception):
            line = f"launch: cannot join the other nodes: {type(error).__name__}: {error}"
            MessageSocket(sock).send(JoinRefused(line=line))
    return 0


def _close_other_fds(fd: int) -> None:
    """Close inherited descriptors, because open ends of the supervisor's pipes would hide its exit."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    for other in map(int, os.listdir("/dev/fd")):
        if other > 2 and other != fd:
            # The descriptor of the listing is closed already.
            with contextlib.suppress(OSError):
                os.close(other)


class _AgentLoop:
    """Event loop of the agent: the client of its node, and on node 0 the rendezvous server."""

    def __init__(self, config: NodeRendezvous, sock: socket.socket) -> None:
        self._config = config
        self._selector = selectors.DefaultSelector()
        self._supervisor = MessageSocket(sock)
        self._supervisor.watch(self._selector, self._read_supervisor)
        self._hello = _make_hello(config)
        self._server: RendezvousServer | None = None
        self._client: RendezvousClient | None = None
        self._started_at, self._last_poll_at = time.monotonic(), 0.0
        if config.node_rank != 0:
            self._client = RendezvousClient(config, self._hello, self._selector, connection=None, notify=self._supervisor.send)

    def run(self) -> None:
        """Run until the supervisor closes its connection."""
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
        """Start the rendezvous server on node 0, and connect this node's client to the server."""
        config = self._config
        try:
            listener, notice = listen_for_nodes(config.addr, config.port, fallback=config.fallback_addr)
        except OSError as error:
            retry_s = {errno.EADDRINUSE: _PORT_RETRY_S, errno.ENOENT: config.timeout_s}.get(error.errno or 0, 0.0)
            if now - self._started_at >= min(retry_s, config.timeout_s):
                self._report_listen_failure(error)
            return
        if notice:
            self._supervisor.send(Notice(line=notice))
        self._server = RendezvousServer(
            config, self._hello, listener, self._selector, notify=lambda line: self._supervisor.send(Notice(line=line))
        )
        here, there = socket.socketpair()
        self._server.add_connection(there, "this node")
        self._client = RendezvousClient(config, self._hello, self._selector, connection=here, notify=self._supervisor.send)

    def _report_listen_failure(self, error: OSError) -> None:
        """Report why node 0 cannot listen. If another job's server uses the port, its refusal names that job."""
        config = self._config
        problem = f"node 0 cannot listen at {config.addr}:{config.port}: {(error.strerror or str(error)).lower()}"
        advice = "Choose another --master-port, or --master-addr, the same on each node."

        def report(message: Message) -> None:
            refused = self._client is not None and self._client.was_refused
            owner = (
                f" by another launch: {message.line.removeprefix('launch: ').rstrip('.')}"
                if refused and isinstance(message, JoinRefused)
                else ""
            )
            self._supervisor.send(JoinRefused(line=f"launch: {problem}{owner}. {advice}"))

        query_s = _PORT_QUERY_S if error.errno == errno.EADDRINUSE else 0.0
        query = replace(config, timeout_s=query_s)
        self._client = RendezvousClient(query, self._hello, self._selector, connection=None, notify=report)

    def _read_supervisor(self) -> None:
        self._supervisor.flush()
        for message in self._supervisor.receive():
            if self._client is not None and isinstance(message, RanksFailed | RanksExited):
                self._client.send(message)

    def _shut_down(self) -> None:
        """Send queued messages, with a time limit. On node 0, messages pass from the client to the server to other nodes."""
        for _ in range(3):
            self._select_once(0)
        parts = [part for part in (self._client, self._server) if part is not None]
        deadline = time.monotonic() + _FLUSH_TIMEOUT_S
        while [part for part in parts if not part.flush()] and time.monotonic() < deadline:
            time.sleep(0.01)
        for part in reversed(parts):
            part.close()


def _make_hello(config: NodeRendezvous) -> Hello:
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
