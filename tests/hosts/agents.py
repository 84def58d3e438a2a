"""Several agents in one test, each with the supervisor's end of it, and their messages so far."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dtrain.launch.agent import Agent, detach_from_supervisor, start_agent
from dtrain.launch.launch_plan import NodeRendezvous
from dtrain.launch.local_ranks import reserve_port
from dtrain.launch.node_messages import Message

LONG_S = 300  # no promise: how long a busy test machine may take


@dataclass(kw_only=True)
class Node:
    agent: Agent
    said: list[Message] = field(default_factory=list)

    def only(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.said if isinstance(message, kind)]


@dataclass(kw_only=True)
class Nodes:
    """All agents of a test; ``port`` is where the first one listens unless the test says otherwise."""

    port: int
    started: list[Node] = field(default_factory=list)

    def start(
        self, node_rank: int, nodes: int | None = 2, *, nproc: int = 1, program: bool = False, **settings: object
    ) -> Node:
        """Start an agent: its own ``program``, or a fork of this process, which has imported torch already."""
        given = {"addr": "127.0.0.1", "port": self.port, "timeout_s": LONG_S, "run_name": "run" if node_rank == 0 else ""}
        meeting = NodeRendezvous(node_rank=node_rank, nodes=nodes, nproc=nproc, **{**given, **settings})
        self.started.append(Node(agent=start_agent(meeting, run=None if program else run_here)))
        return self.started[-1]

    def wait(self, done: Callable[[], object], *, within_s: float = LONG_S) -> None:
        """Read the messages of all agents until ``done()`` is true."""
        deadline = time.monotonic() + within_s
        while not done():
            assert time.monotonic() < deadline, [node.said for node in self.started]
            self.read(0.05)

    def read(self, wait_s: float) -> None:
        open_ = {node.agent.fileno(): node for node in self.started if node.agent.fileno() != -1 and not node.agent.has_exited}
        with selectors.DefaultSelector() as selector:  # descriptors may have any number in a process that runs all tests
            for fd in open_:
                selector.register(fd, selectors.EVENT_READ)
            ready = [key.fd for key, _ in selector.select(wait_s)]
        for fd in ready:
            open_[fd].said += open_[fd].agent.read()

    def wait_for(self, kind: type[Message], *nodes: Node) -> list[Message]:
        """The first message of this kind from each of ``nodes``."""
        self.wait(lambda: all(node.only(kind) for node in nodes))
        return [node.only(kind)[0] for node in nodes]

    def wait_until_gone(self, *nodes: Node) -> None:
        """Wait for the exit of agents whose connection the test has closed."""
        for node in nodes:
            _reap(node.agent.pid)

    def end(self) -> None:
        for node in self.started:
            node.agent.close()
        for node in self.started:
            _reap(node.agent.pid)


def run_here(sock: socket.socket, parent: int) -> int:
    """Run the agent in this fork of the test process, which has imported torch already."""
    from dtrain.launch import agent_main

    detach_from_supervisor(parent)
    for fd in map(int, os.listdir("/dev/fd")):
        if fd > 2 and fd != sock.fileno():
            with contextlib.suppress(OSError):  # the listing itself
                os.close(fd)
    agent_main.main(sock)
    return 0


def _reap(pid: int) -> None:
    deadline = time.monotonic() + LONG_S / 3
    with contextlib.suppress(ChildProcessError):  # the test has waited for it
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGCONT)
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise AssertionError(f"agent {pid} outlived its supervisor")
            time.sleep(0.01)


@contextlib.contextmanager
def several() -> Iterator[Nodes]:
    with reserve_port() as held:
        nodes = Nodes(port=held.getsockname()[1])
        try:
            yield nodes
        finally:
            nodes.end()
