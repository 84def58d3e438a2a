"""What agents say to each other and to their supervisors: frozen records, each one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from dtrain.launch.plan import Layout

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
    def who(self) -> str:
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
class Joined:
    """All nodes are there and agree: the ranks may start."""

    layout: Layout
    store_port: int  # at ``layout.master_addr``
    run_name: str
    interface: str = ""  # by which this node reaches the others, where it could be found out


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The meeting has failed; nothing was started."""

    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something worth a line on the terminal; everything goes on."""

    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """From a supervisor: a rank of its node has failed, or the launcher was told to end (``rank`` is -1 then)."""

    rank: int
    code: int  # what the launcher exits with for it
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Another node has failed, or was lost: end the ranks of this one."""

    line: str
    code: int
    node_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """From a supervisor: all ranks of its node have ended, with these codes by rank."""

    codes: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """The ranks of all nodes have ended, with these codes by rank."""

    codes: Mapping[int, int]


Message = Hello | Welcome | Ping | Joined | Refused | Notice | Failed | End | Ended | Over
_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind for kind in (Hello, Welcome, Ping, Joined, Refused, Notice, Failed, End, Ended, Over)
}


class GarbageError(ValueError):
    """A line that is none of the messages."""


def encode(message: Message) -> bytes:
    """The message as one line."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in a line without its end. Text in it is made safe to show on a terminal, and cut when it is long.

    Raises:
        GarbageError: it is no message.
    """
    try:
        record = json.loads(line)
        message: Message = _build(_KINDS[record["kind"]], record)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise GarbageError(f"no message: {line[:80]!r}") from error
    return message


def _build(kind: type[Any], record: Any) -> Any:
    """An instance of a dataclass; fields that it does not know are left out: a later version may have more."""
    values = {field.name: _CHECKS[str(field.type)](record[field.name]) for field in fields(kind) if field.name in record}
    return kind(**values)


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) > 2**53:
        raise TypeError("no whole number")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("no text")
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in value[:_MAX_TEXT])


def _codes(value: Any) -> dict[int, int]:
    return {int(key): _integer(code) for key, code in value.items()}


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "int": _integer,
    "int | None": lambda value: None if value is None else _integer(value),
    "str": _text,
    "Mapping[str, str]": lambda value: {_text(key): _text(text) for key, text in value.items()},
    "Mapping[int, int]": _codes,
    "Layout": lambda value: _build(Layout, value),
}
