"""Several hosts on one machine: network namespaces with host names of their own, joined by a switch in one more."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

ADDRS = tuple(f"10.77.0.{place + 1}" for place in range(3))
ADDRS6 = tuple(f"fd77::{place + 1}" for place in range(3))
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000  # linux/sched.h
_NAMED = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts 0 to 2, called ``host0`` and so on, with ``ADDRS`` on ``eth0``. ``mark`` is in the names of its namespaces."""

    mark: str

    def on(self, place: int, *command: object) -> list[str]:
        """The command line that runs ``command`` on a host, as the same process: a signal reaches it."""
        where = ["ip", "netns", "exec", f"{self.mark}-{place}", "unshare", "--uts", "sh", "-c", _NAMED, f"host{place}"]
        return [*where, *map(str, command)]

    def enter(self, place: int) -> None:
        """Move this process, which has one thread, to a host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/var/run/netns/{self.mark}-{place}") as namespace:
            moved = libc.setns(namespace.fileno(), _CLONE_NEWNET) == 0 and libc.unshare(_CLONE_NEWUTS) == 0
        if not moved:
            raise OSError(ctypes.get_errno(), "cannot enter the namespace")
        socket.sethostname(f"host{place}")

    def plug(self, place: int, state: str) -> None:
        """Turn the switch's end of a cable ``up`` or ``down``; the host itself does not notice."""
        _ip("-n", f"{self.mark}-sw", "link", "set", f"port{place}", state)

    def build(self) -> None:
        switch = f"{self.mark}-sw"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for place, (addr, addr6) in enumerate(zip(ADDRS, ADDRS6, strict=True)):
            name = f"{self.mark}-{place}"
            _ip("netns", "add", name)
            _ip("-n", switch, "link", "add", f"port{place}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "set", f"port{place}", "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{addr}/24", "dev", "eth0")
            _ip("-n", name, "addr", "add", f"{addr6}/64", "dev", "eth0", "nodad")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")
        subprocess.run(self.on(0, "true"), check=True, capture_output=True, text=True)

    def remove(self) -> None:
        for name in [*(f"{self.mark}-{place}" for place in range(len(ADDRS))), f"{self.mark}-sw"]:
            with contextlib.suppress(subprocess.CalledProcessError):  # it was never made
                _ip("netns", "del", name)


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Build the network; skip the test, with the error, where this machine does not allow it."""
    built = Network(mark=f"dt{uuid.uuid4().hex[:8]}")
    try:
        try:
            built.build()
        except FileNotFoundError as error:
            pytest.skip(f"needs iproute2 and util-linux: {error}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        yield built
    finally:
        with contextlib.suppress(FileNotFoundError):
            built.remove()


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True)
