"""Resolve addresses, listen for other nodes, and find network interfaces by address."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

from dtrain.machine import list_interfaces

_BACKLOG = 1024


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
