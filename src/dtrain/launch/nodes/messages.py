"""Define the records that agents, supervisors and the nodes' store hold, as frozen dataclasses encoded in one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from dtrain.launch.launch_plan import NodeLayout

_MAX_TEXT = 4000  # characters of one value
PROTOCOL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Record of an arriving node. Fields as in ``NodeRendezvous``.

    Attributes:
        token: digest of the run token.
        pid: supervisor of the node.
        own_addr: address of the node on its way to node 0; "" on node 0.
    """

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
    own_addr: str = ""
    protocol: int = PROTOCOL

    @property
    def display_name(self) -> str:
        """Name of the node in messages to the user."""
        return f"node {self.node_rank} ({self.host})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Record that marks the store as one of a launch. ``host`` is the host of node 0."""

    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAccepted:
    """Answer to a node when all nodes have joined and agree: the ranks may start.

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
    """Answer to a node when the rendezvous has failed. No rank was started."""

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
    """The first failure of a node. Sent to the supervisors of the other nodes, whose ranks must end."""

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


Message = Hello | Welcome | JoinAccepted | JoinRefused | Notice | RanksFailed | NodeFailed | RanksExited | JobFinished
_MESSAGE_TYPES: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (Hello, Welcome, JoinAccepted, JoinRefused, Notice, RanksFailed, NodeFailed, RanksExited, JobFinished)
}


class InvalidMessageError(ValueError):
    """Raised for bytes that are not a valid message."""


def encode(message: Message) -> bytes:
    """Encode the message as one line."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Decode one line. Text is escaped for a terminal, and truncated if too long.

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
