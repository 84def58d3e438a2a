"""Exchange small data between all ranks over the ranks' own sockets: ``ControlPlane``.

Records of a step, JSON, agreements of a checkpoint and the stop signal all travel here. gloo passes a message of a hundred
bytes through several threads of each rank, which takes twenty times the processor time of a socket that the calling thread
itself writes and reads. Its groups also connect every rank with every rank. ``control_protocol`` says which rank sends what to
whom.

``open_control_plane`` connects the ranks: those of a node over Unix sockets, and the leaders of nodes over TCP. Addresses are
exchanged in the rendezvous store, with a number of requests that does not depend on the number of ranks.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

import torch.distributed as dist

from dtrain import launch_protocol
from dtrain.dist.context import ExchangeObserver, current_context
from dtrain.dist.control_protocol import Layout, Protocol, RowSpec, RowSummary, all_gather, gather, peers_of, reduce_rows
from dtrain.errors import DistError, StepError
from dtrain.machine import list_interfaces

if TYPE_CHECKING:
    from dtrain.dist.init import DistInfo


T = TypeVar("T")
ChannelName: TypeAlias = Literal["control", "background"]
CHANNELS: tuple[ChannelName, ...] = ("control", "background")

# Number of the exchange, length of the data, and the name of the exchange. Ranks whose numbers or names differ raise.
_NAME_BYTES = 40
_HEADER = struct.Struct(f"=qq{_NAME_BYTES}s")
# Most messages fit into one read.
_READ_BYTES = 1 << 16
_MAX_READ_BYTES = 1 << 20
# Sockets hold messages of this size, so a rank can send one before it reads.
_SMALL_BYTES = 1 << 15
_BACKLOG = 256
_PROOF_BYTES = 16
# Proof that the sender knows the listener and the secret of the job, rank of the sender, and index of the channel.
_HELLO = struct.Struct(f"={_PROOF_BYTES}sii")
# Process id, user id and group id of the other side of a Unix socket.
_CREDENTIALS = struct.Struct("=iII")
_CONNECT_TIMEOUT_S = 30.0
# Connections whose first bytes are awaited at once. A stranger may open connections and send nothing.
_MAX_PENDING = 512
# Time for all ranks to read a problem.
_SETTLE_S = 5.0
_CONNECTED = "connected"
Connections = dict[ChannelName, dict[int, socket.socket]]


class Channel:
    """Connections of this rank for the exchanges of one thread. All ranks run the same exchanges in the same order.

    After an exception the connections must be closed, so that the other ranks do not wait for this rank. The block of
    ``report_missing_ranks`` around the exchange does so, after it has told them of the failure.

    Args:
        name: name of the channel.
        layout: place of this rank.
        connections: socket to each rank that this rank exchanges messages with.
        timeout_s: time to wait for a message, in seconds.

    Attributes:
        count: number of exchanges that this rank has begun.
        num_records: number of records of a step among them.
        op: name of the last exchange.
        size: numbers or bytes of this rank in the last exchange.
        waits: if True, the last exchange has not ended.
        failed: if True, an exception has left an exchange.
        lost_peer: rank whose connection was closed; None after a timeout.
        record: function that gets the caller and the result of each ``all_gather``; None records nothing.
    """

    def __init__(
        self, name: ChannelName, layout: Layout, connections: Mapping[int, socket.socket], *, timeout_s: float
    ) -> None:
        self.name, self.layout, self.timeout_s = name, layout, timeout_s
        self._connections = dict(connections)
        self._buffers = {peer: bytearray() for peer in connections}
        for connection in connections.values():
            connection.settimeout(timeout_s)
        self.count, self.num_records, self.op, self.size, self.waits = 0, 0, "", 0, False
        self.failed, self._closed = False, False
        self.lost_peer: int | None = None
        self.record: Callable[[str, list[bytes]], None] | None = None
        self._interruption: BaseException | None = None

    def all_gather(self, payload: bytes, *, caller: str, timeout_s: float | None = None) -> list[bytes]:
        """Return the payloads of all ranks, by rank.

        Raises:
            DistNetworkError: a rank has closed its connections, or did not send in time.
            DistError: a rank is in another exchange.
        """
        protocol = all_gather(self.layout, payload)
        payloads = self._run(protocol, "all_gather", caller, len(payload), self.timeout_s if timeout_s is None else timeout_s)
        if self.record is not None:
            self.record(caller, payloads)
        self._notify("all_gather", sum(map(len, payloads)))
        return payloads

    def gather(self, payload: bytes, dst: int, *, caller: str) -> list[bytes] | None:
        """Return the payloads of all ranks on rank ``dst``, by rank; None on the other ranks. Raises like ``all_gather``."""
        payloads = self._run(gather(self.layout, payload, dst), "gather", caller, len(payload), self.timeout_s)
        self._notify("gather", 0 if payloads is None else sum(map(len, payloads)))
        return payloads

    def reduce_rows(
        self, row: Sequence[float], spec: RowSpec, *, caller: str
    ) -> tuple[RowSummary, list[tuple[float, ...]] | None]:
        """Return the summary of the rows of all ranks; on one node also the rows. Raises like ``all_gather``."""
        self.num_records += 1
        return self._run(reduce_rows(self.layout, row, spec), "record", caller, len(row), self.timeout_s)

    def _notify(self, op: str, size: int) -> None:
        for observer in current_context().exchange_observers:
            observer(self, op, size)

    def _run(self, protocol: Protocol[T], op: str, caller: str, size: int, timeout_s: float) -> T:
        """Run one exchange. An interrupt of a signal handler is raised after it, because the other ranks need this rank."""
        self.count, self.op, self.size, self.waits = self.count + 1, op, size, True
        self._interruption = None
        tag = _tag(op, size if op == "record" else 0, caller)
        received, peer = b"", -1
        try:
            if timeout_s != self.timeout_s:
                self._set_timeouts(timeout_s)
            transfer = next(protocol)
            while True:
                to, data, source = transfer
                if to is not None:
                    peer = to
                    self._send(to, _HEADER.pack(self.count, len(data), tag) + data, timeout_s)
                if source is not None:
                    peer = source
                    received = self._receive(source, tag, caller)
                transfer = protocol.send(received)
        except StopIteration as stop:
            result: T = stop.value
        except OSError as error:
            self.failed, self.lost_peer = True, None if isinstance(error, TimeoutError) else peer
            raise dist.DistNetworkError(f"{type(error).__name__}: {error}") from error
        except BaseException:
            self.failed = True
            raise
        self.waits = False
        if timeout_s != self.timeout_s:
            self._set_timeouts(self.timeout_s)
        if self._interruption is not None:
            raise self._interruption
        return result

    def _set_timeouts(self, timeout_s: float) -> None:
        for connection in self._connections.values():
            connection.settimeout(timeout_s)

    def _send(self, to: int, message: bytes, timeout_s: float) -> None:
        if len(message) <= _SMALL_BYTES:
            self._connections[to].sendall(message)
            return
        self._set_timeouts(0)
        try:
            rest = memoryview(message)
            while rest:
                try:
                    rest = rest[self._connections[to].send(rest) :]
                except BlockingIOError:
                    self._read_while_sending(to, timeout_s)
        finally:
            self._set_timeouts(timeout_s)

    def _read_while_sending(self, to: int, timeout_s: float) -> None:
        """Wait until rank ``to`` takes more bytes. Read meanwhile, because that rank may be waiting for this rank to read."""
        poll, peers = select.poll(), {connection.fileno(): peer for peer, connection in self._connections.items()}
        deadline = time.monotonic() + timeout_s
        for peer, connection in self._connections.items():
            poll.register(connection, select.POLLIN | (select.POLLOUT if peer == to else 0))
        while (remaining_s := deadline - time.monotonic()) > 0:
            for number, events in poll.poll(remaining_s * 1000):
                if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    data = self._connections[peers[number]].recv(_MAX_READ_BYTES)
                    self._buffers[peers[number]] += data
                    if not data:
                        # The exchange itself finds a lost peer when it needs the peer.
                        poll.unregister(number)
                if peers[number] == to and events & (select.POLLOUT | select.POLLHUP | select.POLLERR):
                    return
        raise TimeoutError("timed out")

    def _receive(self, source: int, tag: bytes, caller: str) -> bytes:
        connection, buffer = self._connections[source], self._buffers[source]
        end = 0
        while True:
            if buffer:
                if not end and len(buffer) >= _HEADER.size:
                    end = self._end_of_message(buffer, tag, caller, source)
                if end and len(buffer) >= end:
                    message = bytes(memoryview(buffer)[_HEADER.size : end])
                    del buffer[:end]
                    return message
            missing = end - len(buffer)
            try:
                data = connection.recv(_READ_BYTES if missing < _READ_BYTES else min(missing, _MAX_READ_BYTES))
            except OSError:
                raise
            # The other ranks need this exchange, too, as with a collective of torch, which no signal interrupts.
            except BaseException as error:
                if self._interruption is not None:
                    raise
                self._interruption = error
                continue
            if not data:
                raise ConnectionError("connection closed by peer")
            # A message of a record arrives at once and alone.
            if not buffer and len(data) >= _HEADER.size and len(data) == self._end_of_message(data, tag, caller, source):
                return data[_HEADER.size :]
            buffer += data

    def _end_of_message(self, data: bytes | bytearray, tag: bytes, caller: str, source: int) -> int:
        """Return the length of the message that begins with ``data``. Raise if it belongs to another exchange."""
        number, length, name = _HEADER.unpack_from(data)
        if number != self.count or name != tag:
            own, other = (text.rstrip(b"\0").decode(errors="replace") for text in (tag, name))
            place = "another record" if own == other or {own.split()[0], other.split()[0]} == {"record"} else repr(other)
            raise (StepError if own.startswith("record") else DistError)(
                f"{caller}: ranks must run the same exchange, got {place} from rank {source}. Take the same steps on all "
                "ranks, as loader.until does, and run collectives in one order."
            )
        return _HEADER.size + int(length)

    @property
    def closed_here(self) -> bool:
        """Return True if this process has closed a connection."""
        return self._closed or any(connection.fileno() < 0 for connection in self._connections.values())

    def file_numbers(self) -> dict[int, int]:
        """Return the rank of each connection, by file number."""
        return {connection.fileno(): peer for peer, connection in self._connections.items()}

    def shut_down(self) -> None:
        """End the connections for all processes that hold them, and wake the threads that wait for them."""
        for connection in self._connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self, *, shut_down: bool = True) -> None:
        """Close the connections.

        Args:
            shut_down: if False, other processes may go on using them.
        """
        self._closed = True
        if shut_down:
            self.shut_down()
        for connection in self._connections.values():
            connection.close()


@lru_cache(maxsize=256)
def _tag(op: str, size: int, caller: str) -> bytes:
    """Return the name of an exchange in its messages. The length of a record is part of its name."""
    name = f"{op} {size} {caller}" if op == "record" else f"{op} {caller}"
    return name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")


@dataclass(slots=True, eq=False)
class ControlPlane:
    """Channels of this rank, by name. No channel is used from two threads.

    Args:
        layout: place of this rank.
        channels: channels by name.
    """

    layout: Layout
    channels: dict[ChannelName, Channel] = field(default_factory=dict)

    def __getitem__(self, name: ChannelName) -> Channel:
        return self.channels[name]

    def close(self, *, shut_down: bool = True) -> None:
        """Close the connections of all channels."""
        for channel in self.channels.values():
            channel.close(shut_down=shut_down)


@contextmanager
def observe_exchanges(observer: ExchangeObserver) -> Iterator[None]:
    """Call ``observer`` after each gather of this process inside of the context, except after records of a step."""
    observers = current_context().exchange_observers
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)


def _close_in_fork() -> None:
    """Close the sockets in a fork of a rank, which would keep the connections open after the rank has died."""
    context = current_context()
    if context.incidents is not None:
        context.incidents.stop()
    if context.control_plane is not None:
        context.control_plane.close(shut_down=False)
        context.control_plane = None


os.register_at_fork(after_in_child=_close_in_fork)


def open_control_plane(info: DistInfo) -> ControlPlane:
    """Connect this rank with the ranks that it exchanges messages with, on every channel.

    If the ranks of a node cannot connect over Unix sockets, every rank becomes a leader, and all connections are TCP.

    Collective: about ten requests to the rendezvous store for each rank.

    Raises:
        DistError: some rank cannot connect to another rank; on all ranks.
    """
    incidents = current_context().incidents
    if incidents is None:
        layout = Layout(info.rank, info.world_size, info.world_size)
        return _plane(layout, {name: {} for name in CHANNELS}, info.timeout_s)
    store = dist.PrefixStore(f"{incidents.prefix}/control", incidents.store)
    problem = ""
    for node_size in dict.fromkeys([_agree_node_size(store, info), 1]):
        layout = Layout(info.rank, info.world_size, node_size)
        connections, problem = _connect_all(dist.PrefixStore(str(node_size), store), layout)
        if not problem:
            return _plane(layout, connections, info.timeout_s)
    seen = store.add("seen", 1)
    deadline = time.monotonic() + _SETTLE_S
    # The store ends with the rank that serves it, so this rank raises last.
    while incidents.server_rank == info.rank and seen < info.world_size and time.monotonic() < deadline:
        time.sleep(0.05)
        seen = store.add("seen", 0)
    raise DistError(
        f"init_dist: {problem}. Set {launch_protocol.GLOO_INTERFACE} to the network interface that reaches the other nodes."
    )


def _plane(layout: Layout, connections: Connections, timeout_s: float) -> ControlPlane:
    channels = {name: Channel(name, layout, connections[name], timeout_s=timeout_s) for name in CHANNELS}
    return ControlPlane(layout, channels)


def _agree_node_size(store: dist.Store, info: DistInfo) -> int:
    """Return the number of ranks of every node if all nodes have as many, and their ranks are consecutive; 1 otherwise.

    Each rank counts for its node, and each complete node counts for its size. The last rank to arrive reads the counts.
    """
    size, first = info.local_world_size, info.rank - info.local_rank
    # The name differs between hosts, also between containers of one host.
    host = socket.gethostname()
    with suppress(OSError):
        host += " " + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if first >= 0 and size > 0 and first % size == 0 and store.add(f"node/{first}/{size}/{host}", 1) == size:
        store.add(f"complete/{size}", size)
    if store.add("arrived", 1) < info.world_size:
        return int(store.get("node size"))
    agreed = size if store.add(f"complete/{size}", 0) == info.world_size else 1
    store.set("node size", str(agreed))
    return agreed


def _connect_all(store: dist.Store, layout: Layout) -> tuple[Connections, str]:
    """Connect this rank to its peers; return the connections, or the problem of some rank, equal on all ranks."""
    peers = peers_of(layout)
    connections: Connections = {name: {} for name in CHANNELS}
    with _listen(layout) as (listeners, address):
        store.set(f"address/{layout.rank}", json.dumps(address))
        # The higher rank of a pair connects, so each address must be known before.
        targets = sorted(peer for peer in peers if peer < layout.rank)
        addresses = [json.loads(text) for text in store.multi_get([f"address/{peer}" for peer in targets])] if targets else []
        problem = address.get("problem", "")
        try:
            for peer, target in zip(targets, addresses, strict=True):
                for index, name in enumerate(CHANNELS):
                    connections[name][peer] = _connect(layout, index, peer, target)
        except OSError as error:
            problem = problem or str(error)
        outcome = _report_outcome(store, layout, problem)
        if outcome:
            for connection in (connection for peers in connections.values() for connection in peers.values()):
                connection.close()
            return {}, outcome
        # All ranks have connected, so nothing waits here.
        _accept(listeners, {peer for peer in peers if peer > layout.rank}, address["nonce"], connections)
        return connections, ""


def _report_outcome(store: dist.Store, layout: Layout, problem: str) -> str:
    """Report whether this rank has connected. Return the problem of some rank, "" if all have connected."""
    if problem:
        store.set("problem", f"rank {layout.rank} {problem}")
    # One counter counts the ranks, and in its upper half those with a problem.
    count = store.add("reported", 1 + (bool(problem) << 32))
    if count % (1 << 32) < layout.world_size:
        outcome = store.get("outcome").decode()
    else:
        outcome = store.get("problem").decode() if count >> 32 else _CONNECTED
        store.set("outcome", outcome)
    return "" if outcome == _CONNECTED else outcome


@contextmanager
def _listen(layout: Layout) -> Iterator[tuple[list[socket.socket], dict[str, Any]]]:
    """Listen for the peers of this rank, and give the listeners and their address, as JSON. The address is no secret.

    An address with a ``problem`` makes all ranks take other connections.
    """
    address: dict[str, Any] = {"nonce": secrets.token_hex(16)}
    with ExitStack() as stack:
        listeners: list[socket.socket] = []
        try:
            if layout.node_size > 1:
                listeners.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
                # An abstract name, so that a rank that is killed leaves no file.
                address["path"] = f"\0dtrain-{secrets.token_hex(16)}"
                listeners[-1].bind(address["path"])
                listeners[-1].listen(_BACKLOG)
            if layout.remote_peers():
                address["tcp"] = []
                for host in _own_addresses():
                    family = socket.AF_INET6 if ":" in host else socket.AF_INET
                    listeners.append(stack.enter_context(socket.socket(family)))
                    listeners[-1].bind((host, 0))
                    listeners[-1].listen(_BACKLOG)
                    address["tcp"].append(listeners[-1].getsockname()[:2])
        except OSError as error:
            address["problem"] = f"cannot listen for other ranks ({error})"
        yield listeners, address


def _own_addresses() -> list[str]:
    """Return addresses of this host that the other nodes can reach, the best first.

    These are the address of the interface that gloo is told to use; or the address by which this host reaches the rendezvous
    store, and the address of this host's name, which gloo would use.
    """
    if os.environ.get(launch_protocol.LOOPBACK) == "1":
        return ["127.0.0.1"]
    interface = os.environ.get(launch_protocol.GLOO_INTERFACE, "").partition(",")[0]
    if interface:
        addresses_of_link = [address for link in list_interfaces() if link.name == interface for address in link.addresses]
        if not addresses_of_link:
            raise OSError(errno.ENODEV, f"network interface {interface!r} has no address")
        return addresses_of_link[:1]
    addresses: dict[str, None] = {}
    incidents = current_context().incidents
    store: Any = None if incidents is None else incidents.store
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        with suppress(OSError):
            family, _, _, _, target = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
            # The address of this host on the way to the store. Nothing is sent.
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                addresses[str(probe.getsockname()[0])] = None
    with suppress(OSError):
        addresses[socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0]] = None  # type: ignore[index]
    reachable = [host for host in addresses if not ipaddress.ip_address(host.partition("%")[0]).is_loopback]
    return reachable or ["127.0.0.1"]


def _connect(layout: Layout, channel: int, peer: int, address: Mapping[str, Any]) -> socket.socket:
    """Connect to ``peer``: over its Unix socket on this node, over TCP to another node.

    Raises:
        OSError: the rank listens at none of its addresses.
    """
    if "problem" in address:
        raise ConnectionError(f"cannot connect to rank {peer}, which {address['problem']}")
    targets = [address["path"]] if peer // layout.node_size == layout.node else list(map(tuple, address["tcp"]))
    problems = []
    for target in targets:
        family = socket.AF_UNIX if isinstance(target, str) else socket.AF_INET6 if ":" in target[0] else socket.AF_INET
        connection = socket.socket(family)
        try:
            connection.settimeout(_CONNECT_TIMEOUT_S)
            connection.connect(target)
            if family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not _is_own_user(connection):
                raise PermissionError("another user listens there")
            connection.sendall(_HELLO.pack(_proof(address["nonce"], layout.rank, channel), layout.rank, channel))
            return connection
        except OSError as error:
            connection.close()
            problems.append(f"{target}: {error}")
    raise ConnectionError(f"cannot connect to rank {peer} ({'; '.join(problems)})")


def _proof(nonce: str, rank: int, channel: int) -> bytes:
    """Return the proof of a hello. With a secret in the environment of the job, only ranks of the job can compute it."""
    secret = os.environ.get(launch_protocol.JOB_SECRET, "").encode()
    return hmac.digest(secret, f"{nonce} {rank} {channel}".encode(), "sha256")[:_PROOF_BYTES]


def _is_own_user(connection: socket.socket) -> bool:
    """Return False if the other side of a Unix socket is a process of another user. Over TCP the user is unknown."""
    if connection.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def _accept(listeners: list[socket.socket], peers: set[int], nonce: str, connections: Connections) -> None:
    """Accept the connections of ``peers`` on every channel. All other connections are closed, and none delays the others.

    Mutates: ``connections``.

    Raises:
        TimeoutError: a peer has not connected.
    """
    waiting = {(peer, channel) for peer in peers for channel in range(len(CHANNELS))}
    # First bytes of the connections of this user that have not sent a whole hello.
    pending: dict[socket.socket, bytes] = {}
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    with selectors.DefaultSelector() as selector:
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
        try:
            while waiting:
                if (remaining_s := deadline - time.monotonic()) <= 0:
                    raise TimeoutError(f"no connection from ranks {sorted({peer for peer, _ in waiting})}")
                for key, _ in selector.select(remaining_s):
                    source = cast(socket.socket, key.fileobj)
                    if source in listeners:
                        connection, _ = source.accept()
                        if not _is_own_user(connection) or len(pending) >= _MAX_PENDING:
                            connection.close()
                            continue
                        connection.setblocking(False)
                        pending[connection] = b""
                        selector.register(connection, selectors.EVENT_READ)
                        continue
                    data = b""
                    with suppress(OSError):
                        data = source.recv(_HELLO.size - len(pending[source]))
                    pending[source] += data
                    if data and len(pending[source]) < _HELLO.size:
                        continue
                    selector.unregister(source)
                    proof, peer, channel = _HELLO.unpack(pending.pop(source).ljust(_HELLO.size))
                    if (peer, channel) not in waiting or not hmac.compare_digest(proof, _proof(nonce, peer, channel)):
                        source.close()
                        continue
                    waiting.remove((peer, channel))
                    source.setblocking(True)
                    if source.family != socket.AF_UNIX:
                        source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connections[CHANNELS[channel]][peer] = source
        finally:
            for connection in pending:
                connection.close()
