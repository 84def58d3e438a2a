"""Connect the ranks of a control plane: agree on the nodes, listen, and connect to the ranks of ``control_protocol``.

The ranks of a node connect over Unix sockets, and the leaders of nodes over TCP. Addresses are exchanged in the rendezvous
store, with a number of requests that does not depend on the number of ranks.
"""

from __future__ import annotations

import fcntl
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from dtrain import launch_protocol
from dtrain.dist.context import current_context
from dtrain.dist.control_plane import CHANNELS, Channel, ChannelName, ControlPlane
from dtrain.dist.control_protocol import Layout, peers_of
from dtrain.errors import DistError

if TYPE_CHECKING:
    from dtrain.dist.init import DistInfo

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
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_CONNECTED = "connected"

Connections = dict[ChannelName, dict[int, socket.socket]]


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
    if first >= 0 and size > 0 and first % size == 0 and store.add(f"node/{first}/{size}/{_host_id()}", 1) == size:
        store.add(f"complete/{size}", size)
    if store.add("arrived", 1) < info.world_size:
        return int(store.get("node size"))
    agreed = size if store.add(f"complete/{size}", 0) == info.world_size else 1
    store.set("node size", str(agreed))
    return agreed


def _host_id() -> str:
    """Return a name that differs between hosts, also between containers of one host."""
    boot_id = ""
    with suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot_id}"


def _connect_all(store: dist.Store, layout: Layout) -> tuple[Connections, str]:
    """Connect this rank to its peers; return the connections, or the problem of some rank, equal on all ranks."""
    peers = peers_of(layout)
    connections: Connections = {name: {} for name in CHANNELS}
    with _listen(layout) as (listeners, address):
        store.set(f"address/{layout.rank}", json.dumps(address))
        # The higher rank of a pair connects, so each address must be known before.
        targets = sorted(peer for peer in peers if peer < layout.rank)
        addresses = [json.loads(found) for found in store.multi_get([f"address/{peer}" for peer in targets])] if targets else []
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
        return [_interface_address(interface)]
    found: dict[str, None] = {}
    incidents = current_context().incidents
    store: Any = None if incidents is None else incidents.store
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        with suppress(OSError):
            found[_route_to(store.host, store.port)] = None
    with suppress(OSError):
        found[socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0]] = None  # type: ignore[index]
    reachable = [host for host in found if not ipaddress.ip_address(host.partition("%")[0]).is_loopback]
    return reachable or ["127.0.0.1"]


def _interface_address(name: str) -> str:
    """Return the IPv4 address of a network interface, or its first IPv6 address.

    Raises:
        OSError: the interface does not exist, or has no address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
        except OSError as error:
            with suppress(OSError):
                for line in Path("/proc/net/if_inet6").read_text().splitlines():
                    digits, *_, link = line.split()
                    if link == name:
                        return str(ipaddress.IPv6Address(int(digits, 16)))
            raise OSError(error.errno, f"network interface {name!r} has no address") from error


def _route_to(host: str, port: int) -> str:
    """Return the address of this host on the way to ``host``. Nothing is sent."""
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


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
    with closing(_greetings(listeners, time.monotonic() + _CONNECT_TIMEOUT_S)) as greetings:
        while waiting:
            connection, hello = next(greetings, (None, b""))
            if connection is None:
                raise TimeoutError(f"no connection from ranks {sorted({peer for peer, _ in waiting})}")
            proof, peer, channel = _HELLO.unpack(hello)
            if (peer, channel) not in waiting or not hmac.compare_digest(proof, _proof(nonce, peer, channel)):
                connection.close()
                continue
            waiting.remove((peer, channel))
            connection.setblocking(True)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connections[CHANNELS[channel]][peer] = connection


def _greetings(listeners: list[socket.socket], deadline: float) -> Generator[tuple[socket.socket, bytes], None, None]:
    """Iterate until ``deadline`` over new connections of this user that have sent a hello. Silent connections are closed."""
    # First bytes of the connections, the oldest connection first.
    pending: dict[socket.socket, bytes] = {}
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        stack.callback(_close_all, pending)
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
        while (remaining_s := deadline - time.monotonic()) > 0:
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
                part = _read_some(source, _HELLO.size - len(pending[source]))
                pending[source] += part
                if part and len(pending[source]) < _HELLO.size:
                    continue
                selector.unregister(source)
                hello = pending.pop(source)
                if part:
                    yield source, hello
                else:
                    source.close()


def _close_all(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def _read_some(connection: socket.socket, size: int) -> bytes:
    """Return the next bytes of a readable connection; none if it was closed."""
    try:
        return connection.recv(size)
    except OSError:
        return b""
