"""Addresses of this host: where to listen for the other nodes, and which interface an address belongs to."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_BACKLOG = 1024


def listen_for_nodes(addr: str, port: int, *, fallback: str = "") -> tuple[socket.socket, str]:
    """A socket that listens for other nodes at ``addr`` of this host, and a notice ("" for none).

    Where ``addr`` is not this host's own (it is translated on the way, say), or is a name that this host takes for its loopback
    while the others cannot, it listens on all interfaces instead, and the notice says so.

    Args:
        port: 0 for any that is free.
        fallback: used when ``addr`` does not resolve.

    Raises:
        OSError: the port is taken or may not be used, or no name resolves.
    """
    family, *own = _local_address(addr, fallback)
    try:
        if own:
            return _bind(family, own[0], port), ""
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    listener = _bind(family, "::" if family == socket.AF_INET6 else "0.0.0.0", port)
    return listener, f"launch: {addr} is no address that others reach this host by; it listens on all interfaces instead"


def resolve_address(addr: str, port: int, *, fallback: str = "") -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """What ``addr`` may stand for, each once.

    Raises:
        OSError: it does not resolve.
    """
    try:
        found = socket.getaddrinfo(addr, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        if fallback:
            return resolve_address(fallback, port)
        raise OSError(errno.ENOENT, f"the name {addr!r} does not resolve") from error
    return list(dict.fromkeys((family, (str(target[0]), int(target[1]))) for family, _, _, _, target in found))


def find_interface(address: str) -> str:
    """The name of this host's interface with ``address``; "" when none is found."""
    with contextlib.suppress(OSError, ValueError):
        wanted = ipaddress.ip_address(address.partition("%")[0])
        if wanted.is_loopback:
            return "lo"
        if mapped := getattr(wanted, "ipv4_mapped", None):
            wanted = mapped
        return _find_interface_v6(wanted) if wanted.version == 6 else _find_interface_v4(wanted)
    return ""


def _local_address(addr: str, fallback: str) -> tuple[socket.AddressFamily, *tuple[str, ...]]:
    """The family of ``addr``, and the address to bind unless it has to be all of them."""
    family, (address, _) = resolve_address(addr, 0, fallback=fallback)[0]
    by_name = addr != "localhost" and addr != address
    return (family,) if by_name and ipaddress.ip_address(address.partition("%")[0]).is_loopback else (family, address)


def _bind(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a job that has just ended left connections here
        if address == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _find_interface_v4(wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if reply[20:24] == wanted.packed:
                    return name
    return ""


def _find_interface_v6(wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
        packed, *_, name = line.split()
        if bytes.fromhex(packed) == wanted.packed:
            return name
    return ""
