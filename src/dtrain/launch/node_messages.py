"""Define the messages between the launchers of several nodes, and the store that holds them: torch's ``TCPStore`` on node 0.

A message is a frozen dataclass, encoded in one line of JSON. A request of ``TCPStore`` has no time limit if its server is
suspended or cut off. So a thread of its own makes the requests, and another thread watches ``NodeStore.waiting_since``. This
module does not import torch: the class comes as an argument.

The functions at the end resolve addresses of nodes, listen for other nodes, and find network interfaces by address.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import msgspec

from dtrain.launch.launch_plan import NodeLayout, NodeRendezvous, StatedLayout
from dtrain.machine import list_interfaces

PROTOCOL = 4
_MAX_TEXT = 4000  # characters of one value
_BACKLOG = 1024
# An address that drops packets must not use up the time of the next address.
_PROBE_TIMEOUT_S = 3.0
# A server that accepts hundreds of nodes at once answers late.
_CONNECT_TIMEOUT_S = 10.0
_PREFIX = "dtrain/nodes/"
_WILDCARD_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(StatedLayout):
    """Record of an arriving node. Other fields as in ``NodeRendezvous``.

    Attributes:
        token: digest of the run token.
        pid: supervisor of the node.
        own_addr: address of the node on its way to node 0; "" on node 0.
    """

    token: str
    host: str
    pid: int
    facts: Mapping[str, str]
    run_name: str
    store_port: int
    restarts: int = 0
    fruitless_restarts: int = 0
    members: tuple[int, ...] = ()
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
        restarts: restarts of the job so far, equal on all nodes.
        fruitless_restarts: restarts without a new checkpoint since, equal on all nodes.
        members: nodes of the attempt, by their ``--node-rank``. The layout numbers them anew if some are missing.
    """

    layout: NodeLayout
    store_port: int
    run_name: str
    interface: str = ""
    restarts: int = 0
    fruitless_restarts: int = 0
    members: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRefused:
    """Answer to a node when the rendezvous has failed, or the job has ended without the node. No rank was started."""

    line: str
    code: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Line for the user's terminal, without an effect on the attempt.

    Attributes:
        line: the line.
        waiting: on node 0, the nodes that wait for the next attempt; None if they did not change.
    """

    line: str
    waiting: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksFailed:
    """Sent by a supervisor: a rank of its node has failed with exit code ``code``, or a stop was requested (``rank`` -1).

    If ``is_final`` is True, the job ends; otherwise all nodes may join again.
    """

    rank: int
    code: int
    line: str
    is_final: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailed:
    """The first failure of a node. Sent to the supervisors of the other nodes, whose ranks must end.

    A node that is lost is not final, because a launcher may be started in its place. The launcher of another node lives.
    """

    line: str
    code: int
    node_rank: int
    is_final: bool = False
    is_lost: bool = False


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

    Unknown fields are ignored, because later versions may add fields.

    Raises:
        InvalidMessageError: the line is not a valid message.
    """
    try:
        record = json.loads(line)
        message: Message = msgspec.convert(_escape_text(record), _MESSAGE_TYPES[record["kind"]], str_keys=True)
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidMessageError(f"no message: {line[:80]!r}") from error
    return message


def _escape_text(value: Any) -> Any:
    """Escape and truncate the text in a JSON value, and refuse numbers that no message has."""
    if isinstance(value, str):
        return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in value[:_MAX_TEXT])
    if isinstance(value, dict):
        return {_escape_text(key): _escape_text(item) for key, item in value.items()}
    if isinstance(value, int) and abs(value) > 2**53:
        raise ValueError("no whole number of a message")
    return value


_Result = TypeVar("_Result")


class NodeStore:
    """Connection of one node to the store. Only one thread may use it.

    Args:
        tcp_store: the class ``torch.distributed.TCPStore``.

    Attributes:
        abandoned: if True, every later request raises. Any thread may set it.
        waiting_since: start of the current request; None between requests. Any thread may read it.
        server_addr: address of node 0 that works on this node.
        own_addr: address of this node on its way to node 0; "" on node 0.
        interface: interface on which node 0 listens; "" on other nodes, and if node 0 listens on all interfaces.
    """

    def __init__(self, tcp_store: Callable[..., Any]) -> None:
        self._tcp_store = tcp_store
        self._store: Any = None
        self.abandoned = False
        self.waiting_since: float | None = None
        self.server_addr = self.own_addr = self.interface = ""

    def serve(self, config: NodeRendezvous) -> str:
        """Serve the store in this process, and return a notice for the user ("" for none).

        Raises:
            OSError: the port is in use or not allowed, or no name resolves.
        """
        listener, notice = listen_for_nodes(config.addr, config.port, fallback=config.fallback_addr)
        address = str(listener.getsockname()[0])
        self.server_addr, self.interface = _WILDCARD_ADDRESSES.get(address, address), find_interface(address)
        # With an open socket, the store listens on no other address.
        self._open(config, is_master=True, master_listen_fd=listener.detach())
        return notice

    def connect(self, config: NodeRendezvous) -> None:
        """Connect to the store of node 0.

        Raises:
            OSError: no program listens at the address; the message has the reason.
            RuntimeError: the program that listens serves no store.
        """
        self.server_addr, self.own_addr = _probe(config)
        self._open(config, is_master=False)

    def _open(self, config: NodeRendezvous, **options: Any) -> None:
        timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)
        self._store = self._ask(
            lambda: self._tcp_store(
                self.server_addr, config.port, world_size=None, timeout=timeout, wait_for_workers=False, **options
            )
        )

    def post(self, key: str, message: Message) -> None:
        """Set a record."""
        self._ask(lambda: self._store.set(_PREFIX + key, encode(message)))

    def post_failure(self, message: Message) -> bool:
        """Set the record of the first failure unless another node was first. Return True if this record was set."""
        record = encode(message).decode()
        return bool(self._ask(lambda: self._store.compare_set(f"{_PREFIX}failure", "", record)) == record.encode())

    def exists(self, key: str) -> bool:
        return bool(self._ask(lambda: self._store.check([_PREFIX + key])))

    def find(self, key: str) -> Message | None:
        """Return a record, or None if it is not set.

        Raises:
            InvalidMessageError: the value is no record of this version.
        """
        return decode(self._ask(lambda: self._store.get(_PREFIX + key))) if self.exists(key) else None

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter, which starts at 0, and return its value."""
        return int(self._ask(lambda: self._store.add(_PREFIX + key, amount)))

    def set_counter(self, key: str, value: int) -> None:
        self._ask(lambda: self._store.set(_PREFIX + key, str(value)))

    def read_counters(self, keys: Sequence[str]) -> list[int]:
        """Return the values of counters that exist, in one request."""
        return [int(value) for value in self._ask(lambda: self._store.multi_get([_PREFIX + key for key in keys]))]

    def _ask(self, request: Callable[[], _Result]) -> _Result:
        if self.abandoned:
            raise RuntimeError("the connection was abandoned")
        self.waiting_since = time.monotonic()
        try:
            return request()
        finally:
            self.waiting_since = None


def _probe(config: NodeRendezvous) -> tuple[str, str]:
    """Find the first address of node 0 that accepts a connection; return it with this node's own address on the way.

    ``TCPStore`` names neither the reason of a failed connection nor the two addresses.
    """
    problem = "no address"
    for family, target in resolve_address(config.addr, config.port, fallback=config.fallback_addr):
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(_PROBE_TIMEOUT_S)
            try:
                sock.connect(target)
                # Without a listener, the kernel may connect the socket to itself.
                if sock.getsockname() != sock.getpeername():
                    return str(sock.getpeername()[0]), str(sock.getsockname()[0])
                problem = os.strerror(errno.ECONNREFUSED)
            except TimeoutError:
                problem = f"no answer in {_PROBE_TIMEOUT_S:.0f} s"
            except OSError as error:
                problem = error.strerror or str(error)
    raise OSError(errno.ECONNREFUSED, problem)


def listen_for_nodes(addr: str, port: int, *, fallback: str = "") -> tuple[socket.socket, str]:
    """Return a socket that listens for other nodes at ``addr`` of this host, and a notice ("" for none).

    If ``addr`` is not an address of this host (for example behind address translation), or is a name that resolves to loopback
    only on this host, the socket listens on all interfaces, and the notice says so.

    Args:
        port: the port; 0 for any free port.
        fallback: address for a name ``addr`` that does not resolve.

    Raises:
        OSError: the port is in use or not allowed, or no name resolves.
    """
    family, (address, _) = resolve_address(addr, 0, fallback=fallback)[0]
    by_name = addr != "localhost" and addr != address
    try:
        if not (by_name and ipaddress.ip_address(address.partition("%")[0]).is_loopback):
            return _bind(family, address, port), ""
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    listener = _bind(family, "::" if family == socket.AF_INET6 else "0.0.0.0", port)
    return listener, f"launch: {addr} is not an address of this host that other nodes can reach; listening on all interfaces"


def resolve_address(addr: str, port: int, *, fallback: str = "") -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """Resolve ``addr`` to its distinct families and socket addresses.

    Raises:
        OSError: the name does not resolve.
    """
    try:
        results = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if fallback:
            return resolve_address(fallback, port)
        raise OSError(errno.ENOENT, f"the name {addr!r} does not resolve") from error
    return list(dict.fromkeys((family, (str(target[0]), int(target[1]))) for family, _, _, _, target in results))


def find_interface(address: str) -> str:
    """Return the name of this host's interface with ``address``; "" if no interface has the address."""
    with contextlib.suppress(OSError, ValueError):
        ip = ipaddress.ip_address(address.partition("%")[0])
        if ip.is_loopback:
            return "lo"
        wanted = str(getattr(ip, "ipv4_mapped", None) or ip)
        return next((link.name for link in list_interfaces() if wanted in link.addresses), "")
    return ""


def outgoing_interface(addr: str, port: int, *, fallback: str = "") -> str:
    """Return the interface by which the kernel would reach ``addr``; "" if unknown."""
    try:
        family, target = resolve_address(addr, port, fallback=fallback)[0]
        # Connecting a datagram socket sends nothing.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return find_interface(str(probe.getsockname()[0]))
    except OSError:
        return ""


def _bind(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier job may still occupy the address.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
