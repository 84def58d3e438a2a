"""A node's side: reaches the hub, and passes on between it and the supervisor."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from dtrain.launch.nodes.addresses import interface_of, resolve
from dtrain.launch.nodes.hub import CHOOSERS, LOST_CODE, PING_S
from dtrain.launch.nodes.lines import Lines
from dtrain.launch.nodes.meeting import Meeting
from dtrain.launch.nodes.messages import End, Ended, Failed, Hello, Joined, Message, Notice, Over, Ping, Refused, Welcome

_TRY_S = 3.0  # for one attempt to connect: an address that swallows packets must not use up the time of the next one
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Dial:
    """Connects to the hub, again and again: it may come later than this node."""

    def __init__(self, meeting: Meeting, selector: selectors.BaseSelector, on_open: Callable[[socket.socket], None]) -> None:
        self._meeting, self._selector, self._on_open = meeting, selector, on_open
        self._sock: socket.socket | None = None
        self._attempts, self._pause_s, self._due = 0, _FIRST_PAUSE_S, 0.0
        self.last = "not tried yet"

    def turn(self, now: float) -> None:
        """Begin the next attempt when it is due, or give up the one that gets no answer."""
        if self._sock is None and now >= self._due:
            self._begin(now)
        elif self._sock is not None and now >= self._due:
            self.failed(f"no answer in {_TRY_S:.0f} s")

    def failed(self, why: str) -> None:
        """The attempt came to nothing; the next one follows after a pause."""
        self.close()
        self.last = why
        self._due = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def close(self) -> None:
        if self._sock is not None:
            self._selector.unregister(self._sock)
            self._sock.close()
            self._sock = None

    def _begin(self, now: float) -> None:
        try:
            targets = resolve(self._meeting.addr, self._meeting.port, fallback=self._meeting.fallback_addr)
            family, target = targets[self._attempts % len(targets)]
            self._attempts += 1
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            problem = sock.connect_ex(target)
        except OSError as error:
            self.failed(error.strerror or str(error))
            return
        self._sock, self._due = sock, now + _TRY_S
        self._selector.register(sock, selectors.EVENT_WRITE, self._opened)
        if problem not in (0, errno.EINPROGRESS):
            self.failed(os.strerror(problem).lower())

    def _opened(self) -> None:
        sock = self._sock
        if sock is None:
            return
        problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem == 0 and sock.getsockname() == sock.getpeername():
            problem = errno.ECONNREFUSED  # nobody listens there: the kernel has connected the socket to itself
        if problem:
            self.failed(os.strerror(problem).lower())
            return
        self._selector.unregister(sock)
        self._sock = None
        self._on_open(sock)


class Member:
    """One node of the job. ``turn`` has to be called a few times a second.

    Args:
        link: to the hub where that is in this process; None to connect to it.
        tell: takes messages for the supervisor.
    """

    def __init__(
        self,
        meeting: Meeting,
        hello: Hello,
        selector: selectors.BaseSelector,
        *,
        link: socket.socket | None,
        tell: Callable[[Message], None],
    ) -> None:
        self._meeting, self._hello, self._selector, self._tell = meeting, hello, selector, tell
        self._deadline = time.monotonic() + meeting.timeout_s
        self._dial = Dial(meeting, selector, self._greet)
        self._lines: Lines | None = None
        self._hub = "node 0"  # with its host, once it is known
        self._welcome = self._joined = self._decided = False
        self.answered = False  # a hub has refused this node: so there is one
        if link is not None:
            self._greet(link)

    def turn(self, now: float) -> None:
        """Do what is due: connecting, pings, and giving up on a hub that is silent, or does not come."""
        if self._decided and self._lines is None:
            return
        silence_s = self._meeting.silence_s if self._welcome else _TRY_S  # a hub answers at once
        if not self._welcome and not self._decided and now > self._deadline:
            self._refuse(self._not_reached())
        elif self._lines is None:
            self._dial.turn(now)
        elif now - self._lines.heard_at > silence_s:
            self._lose(f"was silent for {silence_s:.0f} s")
        elif now - self._lines.sent_at >= PING_S:
            self._lines.send(Ping())

    def forgive(self, now: float) -> None:
        """Start counting anew: this process itself stood still, so the hub's silence means nothing."""
        if self._lines is not None:
            self._lines.heard_at = now

    def send(self, message: Failed | Ended) -> None:
        """Pass on what the supervisor says."""
        if self._lines is not None:
            self._lines.send(message)

    def flush(self) -> bool:
        """Whether everything that was said is on its way."""
        return self._lines is None or self._lines.flush()

    def close(self) -> None:
        self._dial.close()
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _greet(self, sock: socket.socket) -> None:
        self._lines = Lines(sock)
        self._lines.watch(self._selector, self._ready)
        self._lines.send(self._hello)

    def _ready(self) -> None:
        lines = self._lines
        if lines is None:
            return
        lines.flush()
        for message in lines.receive():
            self._take(message)
        if lines.lost and lines is self._lines:
            self._lose(f"is lost: {lines.lost}")

    def _take(self, message: Message) -> None:
        match message:
            case Welcome():
                self._hub, self._welcome = f"node 0 ({message.host})", True
            case Joined() if not self._joined:
                self._joined = True
                self._tell(self._placed(message))
            case Refused() if not self._joined:
                self._decided = self.answered = True
                self._tell(message)
            case End() | Over() if not self._decided:
                self._decided = True
                self._tell(message)
            case Over() | Notice():
                self._tell(message)
            case _:
                pass  # a ping

    def _placed(self, joined: Joined) -> Joined:
        """With what this node alone knows: how it reaches the first one."""
        assert self._lines is not None
        sock = self._lines.sock
        if sock.family == socket.AF_UNIX:
            return joined
        interface = interface_of(str(sock.getsockname()[0]))
        addr = str(sock.getpeername()[0])  # the one that works from here, whatever names resolve to elsewhere
        return replace(joined, interface=interface, layout=replace(joined.layout, master_addr=addr))

    def _lose(self, how: str) -> None:
        assert self._lines is not None
        self._lines.close()
        self._lines = None
        if self._decided:
            return
        if self._joined:
            self._decided = True
            self._tell(End(line=f"{self._hub} {how}", code=LOST_CODE, node_rank=0))
        elif not self._welcome:
            self._dial.failed(f"what answers is no launcher of dtrain's: it {how}")
        else:
            self._welcome = False  # its launcher was ended, and may be started again
            self._dial.failed(f"{self._hub} was there, and {how}")

    def _not_reached(self) -> str:
        meeting = self._meeting
        name = f"node {meeting.node_rank} ({self._hello.host})"
        what = f"{name} did not reach node 0 at {meeting.addr}:{meeting.port} in {meeting.timeout_s:.0f} s"
        what += f", last: {self._dial.last}"
        via = f" by interface {found}" if (found := self._interface()) else ""
        do = f"check that node 0 runs, and --master-addr and --master-port, which this node tried{via}"
        return f"launch: {what}; {do}; {CHOOSERS}"

    def _interface(self) -> str:
        """The interface by which the kernel would reach the hub."""
        try:
            family, target = resolve(self._meeting.addr, self._meeting.port, fallback=self._meeting.fallback_addr)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting such a socket sends nothing
                probe.connect(target)
                return interface_of(str(probe.getsockname()[0]))
        except OSError:
            return ""

    def _refuse(self, line: str) -> None:
        self._decided = True
        self._dial.close()
        self._tell(Refused(line=line))
