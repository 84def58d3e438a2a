"""Serve and reach the store of the nodes, torch's ``TCPStore`` on node 0, and keep records and counters under a prefix.

A request of ``TCPStore`` has no time limit if its server is suspended or cut off. So a thread of its own makes the requests,
and another thread watches ``NodeStore.waiting_since``. This module does not import torch: the class comes as an argument.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from dtrain.launch.launch_plan import NodeRendezvous
from dtrain.launch.nodes.addresses import find_interface, listen_for_nodes, resolve_address
from dtrain.launch.nodes.messages import Message, decode, encode

# An address that drops packets must not use up the time of the next address.
_PROBE_TIMEOUT_S = 3.0
# A server that accepts hundreds of nodes at once answers late.
_CONNECT_TIMEOUT_S = 10.0
_PREFIX = "dtrain/nodes/"
_WILDCARD_ADDRESSES = {"0.0.0.0": "127.0.0.1", "::": "::1"}

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

    def post_first(self, key: str, message: Message) -> bool:
        """Set a record unless another node was first. Return True if this record was set."""
        record = encode(message).decode()
        return bool(self._ask(lambda: self._store.compare_set(_PREFIX + key, "", record)) == record.encode())

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
