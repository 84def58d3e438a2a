"""Network interfaces and what names resolve to: where ranks can meet."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # linux/sockios.h
_UP, _LOOPBACK = 0x1, 0x8  # linux/if.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One network interface; ``up`` is the administrator's switch, not the cable."""

    name: str
    addresses: tuple[str, ...]
    loopback: bool
    up: bool


def interfaces(root: Path = Path("/")) -> tuple[Interface, ...]:
    """All interfaces in the order of their numbers, with the first IPv4 address and all IPv6 addresses of each.

    Args:
        root: where ``proc`` is.
    """
    ipv6 = ipv6_addresses(root)
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            flags = _query(probe, _SIOCGIFFLAGS, name)
            bits = struct.unpack_from("H", flags, 16)[0] if flags else 0
            address = _query(probe, _SIOCGIFADDR, name)
            ipv4 = [socket.inet_ntoa(address[20:24])] if address else []
            addresses = (*ipv4, *ipv6.get(name, ()))
            found.append(Interface(name=name, addresses=addresses, loopback=bool(bits & _LOOPBACK), up=bool(bits & _UP)))
    return tuple(found)


def _query(probe: socket.socket, request: int, name: str) -> bytes | None:
    """The kernel's ``struct ifreq`` for an interface, or None when it has no such value (no IPv4 address, say)."""
    try:
        return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None


def ipv6_addresses(root: Path) -> dict[str, list[str]]:
    """IPv6 addresses by interface, from ``/proc/net/if_inet6``."""
    try:
        lines = (root / "proc/net/if_inet6").read_text().splitlines()
    except OSError:  # a kernel without IPv6
        return {}
    found: dict[str, list[str]] = {}
    for line in lines:
        digits, *_, name = line.split()
        found.setdefault(name, []).append(str(ipaddress.IPv6Address(int(digits, 16))))
    return found


def resolve(names: Iterable[str], *, timeout_s: float = 5.0) -> dict[str, tuple[str, ...]]:
    """The addresses of host names, () for one that has none or whose name server does not answer in time."""
    found: dict[str, tuple[str, ...]] = dict.fromkeys(names, ())

    def look_up(name: str) -> None:
        try:
            answers = socket.getaddrinfo(name, None, proto=socket.IPPROTO_TCP)
        except (OSError, UnicodeError):  # unknown, or no host name at all
            return
        found[name] = tuple(dict.fromkeys(str(address[0]) for *_, address in answers))

    # getaddrinfo knows no timeout: a thread that is left behind, if need be, is the only way to give up on it.
    threads = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in found]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)
