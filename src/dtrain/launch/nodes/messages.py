"""Define the messages between agents and supervisors as frozen records, and send them as JSON lines over sockets."""

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

# The exit codes of tens of thousands of ranks fit into such a line.
MAX_LINE = 1 << 20  # bytes
_MAX_TEXT = 4000  # characters of one value
PROTOCOL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of an agent to the rendezvous server. Fields as in ``NodeRendezvous``; ``token`` is a digest."""

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
        """Name of the node in messages to the user."""
        return f"node {self.node_rank} ({self.host})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Answer of the server to ``Hello``: the node waits for other nodes. ``host`` is the host of node 0."""

    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Sent by both sides while no other message is due, so that a silent peer is a lost peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAccepted:
    """Sent when all nodes have joined and agree: the ranks may start.

    Attributes:
        layout: ranks of the node.
        store_port: port of the ranks' store at ``layout.master_addr``.
        run_name: name of the run folder.
        interface: network interface to the other nodes; "" if unknown.
    """

    layout: NodeLayout
    store_port: int
    run_name: str
    interface: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRefused:
    """Sent when the rendezvous has failed. No rank was started."""

    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Line for the user's terminal, without an effect on the job."""

    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksFailed:
    """Sent by a supervisor: a rank of its node has failed with exit code ``code``, or a stop was requested (``rank`` -1)."""

    rank: int
    code: int
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailed:
    """Sent to a supervisor: another node has failed or was lost, so the ranks of this node must end."""

    line: str
    code: int
    node_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksExited:
    """Sent by a supervisor: all ranks of its node have exited, with these exit codes."""

    exit_codes: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinished:
    """Sent to a supervisor: the ranks of all nodes have exited, with these exit codes."""

    exit_codes: Mapping[int, int]


Message = Hello | Welcome | Ping | JoinAccepted | JoinRefused | Notice | RanksFailed | NodeFailed | RanksExited | JobFinished
_MESSAGE_TYPES: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (Hello, Welcome, Ping, JoinAccepted, JoinRefused, Notice, RanksFailed, NodeFailed, RanksExited, JobFinished)
}


class InvalidMessageError(ValueError):
    """Raised for a line that is not a valid message."""


def encode(message: Message) -> bytes:
    """Encode the message as one line."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Decode a line without its line end. Text is escaped for a terminal, and truncated if too long.

    Raises:
        InvalidMessageError: the line is not a valid message.
    """
    try:
        record = json.loads(line)
        message: Message = _build(_MESSAGE_TYPES[record["kind"]], record)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidMessageError(f"no message: {line[:80]!r}") from error
    return message


def _build(kind: type[Any], record: Any) -> Any:
    """Build a dataclass from a record. Unknown fields are ignored, because later versions may add fields."""
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
    "NodeLayout": lambda value: _build(NodeLayout, value),
}


_CHUNK = 1 << 16
# A peer that does not read so many bytes is lost.
_MAX_QUEUED = 4 * MAX_LINE  # bytes


class MessageSocket:
    """Non-blocking connection that queues outgoing messages and parses incoming messages."""

    def __init__(self, sock: socket.socket, *, max_line: int = MAX_LINE) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.max_line = max_line
        # "" while messages can be received
        self.closed_reason = ""
        self.last_received_at = self.last_sent_at = time.monotonic()
        self._selector: selectors.BaseSelector | None = None
        self._in, self._out = bytearray(), bytearray()
        self._interest = selectors.EVENT_READ

    def watch(self, selector: selectors.BaseSelector, on_ready: Callable[[], None]) -> None:
        """Register with ``selector`` until ``close``, for incoming data and for space for queued messages."""
        selector.register(self.sock, self._interest, on_ready)
        self._selector = selector

    def send(self, message: Message) -> None:
        """Queue ``message``, and send as much as possible without waiting."""
        self._out += encode(message)
        self.last_sent_at = time.monotonic()
        if len(self._out) > _MAX_QUEUED:
            self.closed_reason = self.closed_reason or "it does not read"
        self.flush()

    def flush(self) -> bool:
        """Send as much as possible without waiting. Return True if the queue is empty, or the connection is closed."""
        if self.sock.fileno() == -1:
            return True
        try:
            while self._out:
                del self._out[: self.sock.send(self._out[:_CHUNK])]
        except (BlockingIOError, InterruptedError):
            pass
        # Earlier messages of the peer can still be read, and reading detects the end of the connection.
        except OSError:
            self._out.clear()
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)
        if self._selector is not None and interest != self._interest:
            self._interest = interest
            self._selector.modify(self.sock, interest, self._selector.get_key(self.sock).data)
        return not self._out

    def receive(self) -> list[Message]:
        """Return the complete messages. Afterwards ``closed_reason`` is set if no message can follow."""
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
            self.closed_reason = "it sent an invalid message"
        if len(rest) > self.max_line:
            self.closed_reason = "it sent a line without end"
        self._in = bytearray() if self.closed_reason else rest

    def close(self) -> None:
        """Send as much as possible without waiting, and close the connection."""
        if self.sock.fileno() == -1:
            return
        self.flush()
        # With unread bytes, the kernel would reset the connection and discard sent messages.
        with contextlib.suppress(OSError):
            while self.sock.recv(_CHUNK):
                pass
        if self._selector is not None:
            self._selector.unregister(self.sock)
        self.sock.close()
