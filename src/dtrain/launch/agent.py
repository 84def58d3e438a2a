"""Start the agent process, which talks to the other nodes, and connect it with its supervisor. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dtrain import launch_protocol
from dtrain.arguments import format_count
from dtrain.launch.coordinator import LOST_NODE_EXIT_CODE
from dtrain.launch.launch_plan import NodeRendezvous
from dtrain.launch.node_messages import (
    JobFinished,
    JoinAccepted,
    JoinRefused,
    Message,
    NodeFailed,
    RanksExited,
    RanksFailed,
    decode,
    encode,
)
from dtrain.launch.processes import die_with_parent, fork_process, inherited_flags, reset_signal_handlers
from dtrain.launch.worker_group import RestartPolicy

_CHUNK = 1 << 16
# A scheduler may signal all processes. The agent must survive, to report the exit of its node.
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
        # True after the exit of the agent. Stop watching ``fileno`` then, because it is always readable.
        self.has_exited = False
        self._socket, self._received = sock, b""
        self._joined = False
        self._node_rank = config.node_rank

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> list[Message]:
        """Return the received messages, without waiting. After the exit of the agent, the last message reports the exit."""
        messages: list[Message] = []
        while not self.has_exited:
            try:
                data = self._socket.recv(_CHUNK, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            *lines, self._received = (self._received + data).split(b"\n")
            messages += map(decode, lines)
            self._joined |= any(isinstance(message, JoinAccepted) for message in messages)
            if not data:
                self.has_exited = True
                messages.append(self._exit_message())
        return messages

    def send(self, message: RanksFailed | RanksExited) -> None:
        """Send a message to the other nodes. The agent reads at once; ``read`` reports an agent that has exited."""
        with contextlib.suppress(OSError):
            self._socket.sendall(encode(message))

    def close(self) -> None:
        """Close the connection. The agent publishes the messages that it has, and exits; the caller waits for the process."""
        self._socket.close()

    def _exit_message(self) -> Message:
        problem = f"the process that talks to the other nodes (pid {self.pid}) has ended"
        if self._joined:
            return NodeFailed(line=f"node {self._node_rank}: {problem}", code=LOST_NODE_EXIT_CODE, node_rank=self._node_rank)
        return JoinRefused(line=f"launch: {problem}. Start the job again.")


@dataclass(slots=True, kw_only=True, eq=False)
class OtherNodes:
    """State of the exchange with the launchers of other nodes.

    Attributes:
        agent: process that communicates with other nodes; None on a single node.
        joined: True once all nodes have joined.
        failure_reported: True once all nodes know of a failure.
        is_job_over: True if no further attempt follows.
        finished: exits of the ranks of all nodes.
        members: nodes of the last attempt.
        waiting: on node 0, nodes that wait for the next attempt.
        lost: node whose loss ended the last attempt; None for another failure.
    """

    agent: Agent | None = None
    joined: bool = False
    failure_reported: bool = False
    is_job_over: bool = False
    finished: JobFinished | None = None
    members: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    lost: int | None = None

    def accept(self, joined: JoinAccepted) -> None:
        """Record the nodes of an attempt that begins."""
        self.joined, self.members, self.waiting, self.lost = True, joined.members, (), None

    def enter(self, config: NodeRendezvous, policy: RestartPolicy) -> NodeRendezvous:
        """Return the entry to the next rendezvous: with the restarts so far, and the nodes that are expected there."""
        members = tuple(sorted({*self.members, *self.waiting}))
        return replace(config, restarts=policy.total, fruitless_restarts=policy.fruitless, members=members)


def describe_smaller_job(config: NodeRendezvous, joined: JoinAccepted) -> str:
    """Describe an attempt with fewer nodes than the largest number; "" for an attempt of all nodes."""
    missing = [node for node in range(config.nodes or 0) if node not in joined.members]
    if config.min_nodes is None or not missing:
        return ""
    names, layout = ", ".join(f"node {node}" for node in missing), joined.layout
    ranks = format_count(layout.world_size, "rank")
    return f"launch: {layout.nodes} of {config.nodes} nodes run {ranks}, without {names}"


def describe_wait(config: NodeRendezvous, lost: int | None) -> str:
    """Describe the wait for a lost node at the begin of the next rendezvous; "" on nodes that do not know who else waits.

    Args:
        config: entry to the rendezvous, with the nodes that are expected there.
        lost: node that is lost; None if all nodes of the last attempt live.
    """
    if lost == 0:
        where = "where all meet. Start its line again, on a machine with its address"
        return f"launch: waiting up to {config.timeout_s:g} s for node 0, {where}."
    if lost is None or config.node_rank != 0:
        return ""
    left = len({*config.members} - {lost})
    if config.min_nodes is None:
        return f"launch: waiting up to {config.timeout_s:g} s for node {lost}. Start its line again."
    if left < config.min_nodes:
        few = f"{format_count(left, 'node')} {'is' if left == 1 else 'are'} left, fewer than {config.min_nodes}"
        wait = f"waiting up to {config.timeout_s:g} s for another one. Start the line of node {lost} again"
        return f"launch: {few}: {wait}."
    wait_s = min(config.timeout_s, config.replace_timeout_s)
    then = f"then going on with {format_count(left, 'node')}"
    return f"launch: waiting up to {wait_s:g} s for node {lost}, {then}. Start its line again."


def start_agent(config: NodeRendezvous, *, run: Callable[[socket.socket, int], int] | None = None) -> Agent:
    """Start the agent process. This process must have a single thread.

    Args:
        run: program of the fork, which receives its connection and the pid of this process; None runs ``agent_main``.

    Raises:
        OSError: the limit of processes or files is reached.
    """
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    try:
        with theirs:
            pid = fork_process(lambda: (run or _exec_agent)(theirs, parent))
        # The command line would show the run token to other users.
        ours.sendall(json.dumps(asdict(config)).encode() + b"\n")
    except BaseException:
        ours.close()
        raise
    return Agent(pid, ours, config)


def _exec_agent(sock: socket.socket, parent: int) -> int:
    """Replace this fork by the agent program, which inherits ``sock`` and ignored signals."""
    program = os.fspath(Path(__file__).with_name("agent_main.py"))
    detach_from_supervisor(parent)
    sock.set_inheritable(True)
    # The agent computes nothing, so torch need not start threads for it.
    environment = {**os.environ, launch_protocol.OMP_THREADS: "1"}
    os.execve(sys.executable, [sys.executable, *inherited_flags(), program, str(sock.fileno())], environment)
    return 1


def detach_from_supervisor(parent: int) -> None:
    """Prepare a fork of the supervisor: the process dies with ``parent``, ignores signals and writes nothing.

    Mutates: this process's signal handlers, standard streams and limit of open files.
    """
    die_with_parent(parent)
    reset_signal_handlers(ignore=_IGNORED_SIGNALS)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    # The server has a connection to every node.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
