"""What agents say to each other and to their supervisors: frozen records, each one line of JSON.

Messages over a socket that never waits."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from dtrain.launch.launch_plan import NodeLayout

MAX_LINE = 1 << 20  # bytes: the exit codes of tens of thousands of ranks
_MAX_TEXT = 4000  # characters of one value
PROTOCOL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """An agent introduces its node to the hub. Fields as in ``Meeting``; ``token`` is a digest of the run token."""

    node_rank: int
    nodes: int | None
    nproc: int
    base_rank: int | None
    world_size: int | None
    token: str
    host: str
    pid: int
    facts: Mapping[str, str]
    run_name: str
    store_port: int
    protocol: int = PROTOCOL

    @property
    def display_name(self) -> str:
        """How messages name this node."""
        return f"node {self.node_rank} ({self.host})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The hub has taken a node in; it waits for the others now."""

    host: str  # of node 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Both sides send it while they have nothing else to say, so that silence means something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAccepted:
    """All nodes are there and agree: the ranks may start."""

    layout: NodeLayout
    store_port: int  # at ``layout.master_addr``
    run_name: str
    interface: str = ""  # by which this node reaches the others, where it could be found out


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRefused:
    """The meeting has failed; nothing was started."""

    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something worth a line on the terminal; everything goes on."""

    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksFailed:
    """From a supervisor: a rank of its node has failed, or the launcher was told to end (``rank`` is -1 then)."""

    rank: int
    code: int  # what the launcher exits with for it
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailed:
    """Another node has failed, or was lost: end the ranks of this one."""

    line: str
    code: int
    node_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksExited:
    """From a supervisor: all ranks of its node have ended, with these codes by rank."""

    exit_codes: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinished:
    """The ranks of all nodes have ended, with these codes by rank."""

    exit_codes: Mapping[int, int]


Message = Hello | Welcome | Ping | JoinAccepted | JoinRefused | Notice | RanksFailed | NodeFailed | RanksExited | JobFinished
_MESSAGE_TYPES: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (Hello, Welcome, Ping, JoinAccepted, JoinRefused, Notice, RanksFailed, NodeFailed, RanksExited, JobFinished)
}


class InvalidMessageError(ValueError):
    """A line that is none of the messages."""


def encode(message: Message) -> bytes:
    """The message as one line."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in a line without its end. Text in it is made safe to show on a terminal, and cut when it is long.

    Raises:
        InvalidMessageError: it is no message.
    """
    try:
        record = json.loads(line)
        message: Message = _build(_MESSAGE_TYPES[record["kind"]], record)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidMessageError(f"no message: {line[:80]!r}") from error
    return message


def _build(kind: type[Any], record: Any) -> Any:
    """An instance of a dataclass; fields that it does not know are left out: a later version may have more."""
    values = {field.name: _FIELD_PARSERS[str(field.type)](record[field.name]) for field in fields(kind) if field.name in record}
    return kind(**values)


def _parse_int(value: Any) -> int:
    if type(value) is not int or abs(value) > 2**53:
        raise TypeError("no whole number")
    return value


def _parse_text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("no text")
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in value[:_MAX_TEXT])


def _parse_exit_codes(value: Any) -> dict[int, int]:
    return {int(key): _parse_int(code) for key, code in value.items()}


_FIELD_PARSERS: dict[str, Callable[[Any], Any]] = {
    "int": _parse_int,
    "int | None": lambda value: None if value is None else _parse_int(value),
    "str": _parse_text,
    "Mapping[str, str]": lambda value: {_parse_text(key): _parse_text(text) for key, text in value.items()},
    "Mapping[int, int]": _parse_exit_codes,
    "Layout": lambda value: _build(NodeLayout, value),
}


_CHUNK = 1 << 16
_MAX_QUEUED = 4 * MAX_LINE  # bytes for a peer that does not read: it is given up then


class MessageSocket:
    """One end of a connection: messages are queued to be sent, and read as far as they have come."""

    def __init__(self, sock: socket.socket, *, max_line: int = MAX_LINE) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.max_line = max_line
        self.closed_reason = ""  # why nothing can be received any more; "" while it can
        self.last_received_at = self.last_sent_at = time.monotonic()
        self._selector: selectors.BaseSelector | None = None
        self._in, self._out = bytearray(), bytearray()
        self._interest = selectors.EVENT_READ

    def watch(self, selector: selectors.BaseSelector, on_ready: Callable[[], None]) -> None:
        """Have ``selector`` notice, until ``close``, when there is something to read, or room for what is queued."""
        selector.register(self.sock, self._interest, on_ready)
        self._selector = selector

    def send(self, message: Message) -> None:
        """Queue ``message`` and send what goes without waiting."""
        self._out += encode(message)
        self.last_sent_at = time.monotonic()
        if len(self._out) > _MAX_QUEUED:
            self.closed_reason = self.closed_reason or "it does not read"
        self.flush()

    def flush(self) -> bool:
        """Send what goes without waiting; whether nothing is left, or nobody to send it to."""
        if self.sock.fileno() == -1:
            return True
        try:
            while self._out:
                del self._out[: self.sock.send(self._out[:_CHUNK])]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:  # what the peer said before it left can still be read, and reading finds the end
            self._out.clear()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        if self._selector is not None and wanted != self._interest:
            self._interest = wanted
            self._selector.modify(self.sock, wanted, self._selector.get_key(self.sock).data)
        return not self._out

    def receive(self) -> list[Message]:
        """The messages that have come whole. Afterwards ``lost`` says whether these were the last."""
        messages: list[Message] = []
        while not self.closed_reason and self.sock.fileno() != -1:
            try:
                data = self.sock.recv(_CHUNK)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self.closed_reason = error.strerror or str(error)
                break
            if not data:
                self.closed_reason = "it closed the connection"
                break
            self.last_received_at = time.monotonic()
            self._in += data
            self._parse_received(messages)
        return messages

    def _parse_received(self, messages: list[Message]) -> None:
        *lines, rest = self._in.split(b"\n")
        try:
            messages.extend(decode(bytes(line)) for line in lines)
        except InvalidMessageError:
            self.closed_reason = "it sent what is no message"
        if len(rest) > self.max_line:
            self.closed_reason = "it sent a line without end"
        self._in = bytearray() if self.closed_reason else rest

    def close(self) -> None:
        """Send what goes without waiting, and close."""
        if self.sock.fileno() == -1:
            return
        self.flush()
        with contextlib.suppress(OSError):  # unread bytes would turn the end into a reset, which overtakes what was sent
            while self.sock.recv(_CHUNK):
                pass
        if self._selector is not None:
            self._selector.unregister(self.sock)
        self.sock.close()
