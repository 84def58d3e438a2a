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

from dtrain.launch.nodes.addresses import listen
from dtrain.launch.nodes.hub import LOST_CODE, Hub
from dtrain.launch.nodes.lines import Lines
from dtrain.launch.nodes.meeting import Meeting
from dtrain.launch.nodes.member import Member
from dtrain.launch.nodes.messages import End, Ended, Failed, Hello, Joined, Message, Notice, Refused
from dtrain.launch.processes import die_with_parent, forget_signals

_TICK_S = 0.2
_STOOD_STILL_S = 2.0  # between two turns: this process was stopped, or its machine asleep
_PORT_TRIES_S = 2.0  # an earlier job may be leaving the port at this moment
_QUESTION_S = 1.0  # for the answer to who has the port
_LAST_WORDS_S = 2.0  # for sending what is queued when the supervisor has gone
_HARMLESS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)


class Agent:
    """The supervisor's end. ``fileno`` becomes readable when ``read`` has something to give.

    First comes ``Joined`` or ``Refused``, with a ``Notice`` at any time. Then the supervisor sends ``Failed`` as soon as a rank
    has failed, or it was told to end, and ``Ended`` when all its ranks have ended. It hears ``End`` when another node failed or
    was lost, and ``Over`` when the ranks of all nodes have ended. After ``Failed`` or ``End`` it need not wait for ``Over``,
    which a lost node keeps from coming.
    """

    def __init__(self, pid: int, sock: socket.socket, meeting: Meeting) -> None:
        self.pid = pid
        self._lines = Lines(sock)
        self._joined = self._reported = False
        self._node_rank = meeting.node_rank

    def fileno(self) -> int:
        return self._lines.sock.fileno()

    def read(self) -> list[Message]:
        """What has come, without waiting. When the process is gone, the last message says so, once."""
        self._lines.flush()
        messages = self._lines.receive()
        self._joined |= any(isinstance(message, Joined) for message in messages)
        if self._lines.lost and not self._reported:
            self._reported = True
            messages.append(self._gone())
        return messages

    def send(self, message: Failed | Ended) -> None:
        """Pass a message on to the other nodes, without waiting."""
        self._lines.send(message)

    @property
    def gone(self) -> bool:
        """Whether the process has ended: ``fileno`` should not be watched any more, it would always be readable."""
        return bool(self._lines.lost)

    def close(self) -> None:
        """Let the process end, once it has sent what it was given. It is a child to be waited for."""
        self._lines.close()

    def _gone(self) -> Message:
        what = f"the process that talks to the other nodes (pid {self.pid}) has ended"
        if self._joined:
            return End(line=f"node {self._node_rank}: {what}", code=LOST_CODE, node_rank=self._node_rank)
        return Refused(line=f"launch: {what}; start the job again")


def start_agent(meeting: Meeting) -> Agent:
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
            _be_agent(meeting, theirs, parent)
    except BaseException:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
    return Agent(pid, ours, meeting)


def _be_agent(meeting: Meeting, sock: socket.socket, parent: int) -> NoReturn:
    """Turn this fresh fork into the agent."""
    try:
        die_with_parent(parent)
        forget_signals(
            ignore=_HARMLESS
        )  # a scheduler signals everything at once: it must outlive that, to say how the node ended
        _keep_only(sock.fileno())
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the hub has a connection to every node
        _Process(meeting, sock).run()
    except BaseException as error:  # noqa: BLE001 - a copy of the supervisor must not live on, whatever went wrong
        with contextlib.suppress(Exception):
            Lines(sock).send(Refused(line=f"launch: cannot meet the other nodes: {type(error).__name__}: {error}"))
    finally:
        os._exit(0)


def _keep_only(fd: int) -> None:
    """Close what was inherited: the ends of the supervisor's pipes tell others that it lives."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    for other in map(int, os.listdir("/dev/fd")):
        if other > 2 and other != fd:
            with contextlib.suppress(OSError):  # the listing's own descriptor has been closed already
                os.close(other)


class _Process:
    """The agent's loop."""

    def __init__(self, meeting: Meeting, sock: socket.socket) -> None:
        self._meeting = meeting
        self._selector = selectors.DefaultSelector()
        self._supervisor = Lines(sock)
        self._supervisor.watch(self._selector, self._from_supervisor)
        self._hello = _introduce(meeting)
        self._hub: Hub | None = None
        self._member: Member | None = None
        self._began, self._last = time.monotonic(), 0.0
        if meeting.node_rank != 0:
            self._member = Member(meeting, self._hello, self._selector, link=None, tell=self._supervisor.send)

    def run(self) -> None:
        """Until the supervisor has gone."""
        self._turn(time.monotonic())
        while not self._supervisor.lost:
            self._answer(_TICK_S)
            now = time.monotonic()
            if now - self._last >= _TICK_S:
                self._turn(now)
        self._leave()

    def _answer(self, wait_s: float) -> None:
        for key, _ in self._selector.select(wait_s):
            key.data()

    def _turn(self, now: float) -> None:
        if self._member is None:
            self._open(now)
        for part in (self._hub, self._member):
            if part is not None:
                if now - self._last > _STOOD_STILL_S:
                    part.forgive(now)
                part.turn(now)
        self._last = now

    def _open(self, now: float) -> None:
        """On node 0: become the hub, and its first member."""
        meeting = self._meeting
        try:
            listener, notice = listen(meeting.addr, meeting.port, fallback=meeting.fallback_addr)
        except OSError as error:
            patience_s = {errno.EADDRINUSE: _PORT_TRIES_S, errno.ENOENT: meeting.timeout_s}.get(error.errno or 0, 0.0)
            if now - self._began >= min(patience_s, meeting.timeout_s):
                self._cannot_listen(error)
            return
        if notice:
            self._supervisor.send(Notice(line=notice))
        self._hub = Hub(
            self._hello,
            listener,
            self._selector,
            addr=f"{meeting.addr}:{meeting.port}",
            hosts=meeting.hosts,
            timeout_s=meeting.timeout_s,
            silence_s=meeting.silence_s,
            say=lambda line: self._supervisor.send(Notice(line=line)),
        )
        here, there = socket.socketpair()
        self._hub.adopt(there, "this node")
        self._member = Member(meeting, self._hello, self._selector, link=here, tell=self._supervisor.send)

    def _cannot_listen(self, error: OSError) -> None:
        """Say why. If another job's hub has the port, it is asked who it is: its refusal names it."""
        meeting = self._meeting
        what = f"node 0 cannot listen at {meeting.addr}:{meeting.port}: {(error.strerror or str(error)).lower()}"
        do = "choose another --master-port, or --master-addr, the same on each node"

        def tell(message: Message) -> None:
            known = self._member is not None and self._member.answered and isinstance(message, Refused)
            by = (
                f" by another launch: {message.line.removeprefix('launch: ')}" if known and isinstance(message, Refused) else ""
            )
            self._supervisor.send(Refused(line=f"launch: {what}{by}; {do}"))

        asked_s = _QUESTION_S if error.errno == errno.EADDRINUSE else 0.0
        question = replace(meeting, timeout_s=asked_s)
        self._member = Member(question, self._hello, self._selector, link=None, tell=tell)

    def _from_supervisor(self) -> None:
        self._supervisor.flush()
        for message in self._supervisor.receive():
            if self._member is not None and isinstance(message, Failed | Ended):
                self._member.send(message)

    def _leave(self) -> None:
        """Send what is queued, within reason. A few rounds: on node 0 it goes from the member to the hub to the others."""
        for _ in range(3):
            self._answer(0)
        parts = [part for part in (self._member, self._hub) if part is not None]
        deadline = time.monotonic() + _LAST_WORDS_S
        while [part for part in parts if not part.flush()] and time.monotonic() < deadline:
            time.sleep(0.01)
        for part in reversed(parts):
            part.close()


def _introduce(meeting: Meeting) -> Hello:
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
