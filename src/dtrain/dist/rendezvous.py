"""Where ranks find each other: the store, and the agreement that all of them are here."""

from __future__ import annotations

import itertools
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from dtrain.dist.timeout_report import call_with_timeout, clone_store
from dtrain.errors import ConfigError, DistError

_OPEN, _FAILED, _OVER = b"open", b"failed", b"over"
_MIN_RETRY_FRACTION = 0.1  # of the time that was given, for another try
_STORE_MARGIN_S = 5.0  # a store call that takes so much longer than its own time-out has lost its server
_TORCH_RETRY_S = 5.0  # torch connects once more when its time is over, after a pause of its own: up to 2.4 s were seen


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where the store is. ``is_server``: this process serves it; ``loopback_only``: it may listen on loopback only; ``served_by_launcher``: no
    rank serves it, but a process of the launcher's."""

    host: str
    port: int
    is_server: bool
    loopback_only: bool
    served_by_launcher: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousConfig:
    """One opening of the groups: who meets, where, and within which time. Frozen and comparable: equal ones share a store.

    ``address`` is that of the store, a torch rendezvous address (``"file:///path"``), or None in a world of one.
    """

    rank: int
    world_size: int
    address: StoreAddress | str | None

    @property
    def server_name(self) -> str:
        """Who serves the store."""
        return "the launcher" if isinstance(self.address, StoreAddress) and self.address.served_by_launcher else "rank 0"


def connect_store(rendezvous: RendezvousConfig, *, timeout_s: float) -> dist.Store:
    """The store of ``rendezvous``, served from here when that is this rank's part.

    Raises:
        DistError: rank 0 could not be reached, or does not answer; on rank 0, it cannot listen there.
    """
    limit, address, server = timedelta(seconds=timeout_s), rendezvous.address, rendezvous.server_name
    if address is None:
        return dist.HashStore()
    shown = address if isinstance(address, str) else f"{address.host}:{address.port}"
    silent = f"init_dist: {server} at {shown} does not answer rank {rendezvous.rank} within {timeout_s:g} s; is it stopped?"
    try:
        return call_with_timeout(
            lambda: _open_store(address, rendezvous, limit),
            timeout_s=timeout_s + _TORCH_RETRY_S + _STORE_MARGIN_S,
            message=silent,
        )
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        if isinstance(address, StoreAddress) and address.is_server:  # so it is about listening there
            raise DistError(
                f"init_dist: rank {rendezvous.rank} cannot open the meeting place at {shown} ({reason}); give all ranks another "
                "MASTER_PORT, or start them with dtrain launch, which finds a free one"
            ) from None
        raise DistError(
            f"init_dist: rank {rendezvous.rank} could not reach {server} at {shown} within {timeout_s:g} s ({reason}); "
            f"is {server} running, and is the port reachable from here?"
        ) from None


def _open_store(address: StoreAddress | str, rendezvous: RendezvousConfig, limit: timedelta) -> dist.Store:
    if isinstance(address, str):
        store: dist.Store = next(iter(dist.rendezvous(address, rendezvous.rank, rendezvous.world_size, timeout=limit)))[0]
        return store
    listener = _listen_on_loopback(address) if address.is_server and address.loopback_only else None
    return dist.TCPStore(
        address.host, address.port, None, address.is_server, limit, wait_for_workers=False, master_listen_fd=listener
    )


def _listen_on_loopback(address: StoreAddress) -> int:
    """A listening socket on loopback only: torch's own store would listen on every interface, without authentication."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the launcher holds the port with an idle socket
    listener.bind((address.host, address.port))
    listener.listen(1024)
    return listener.detach()


def join_rendezvous(
    store: dist.Store, rendezvous: RendezvousConfig, *, prefix: str, timeout_s: float
) -> tuple[dist.Store, str]:
    """Wait until every rank is here; the part of the store that belongs to this opening alone, and the prefix of its keys.

    A try ends with one verdict for all, written once: *open* by the rank that comes last, *failed* by the first one that is
    tired of waiting. Ranks that come after the verdict, or wait for it and hear of a failure, go on to the next try. So nobody
    has to count, a rank that tries again meets the others, and nobody opens groups with a rank that has left.

    Args:
        store: from ``connect``.
        rendezvous: who meets.
        prefix: of the keys of all tries, the same on all ranks.
        timeout_s: how long to wait, in seconds.

    Raises:
        ConfigError: two processes say that they are this rank.
        DistError: ranks that did not arrive in time, by number; or the rank that serves the store was stopped or has ended.
    """
    begun = time.monotonic()
    lost = f"init_dist: {rendezvous.server_name}, which serves the store of {rendezvous.world_size} ranks,"
    for attempt in itertools.count():
        room = f"{prefix}/{attempt}"
        left_s = max(0.001, begun + timeout_s - time.monotonic())
        trial = partial(_try_rendezvous, dist.PrefixStore(room, store), rendezvous, left_s=left_s, timeout_s=timeout_s)
        try:
            verdict = call_with_timeout(
                trial, timeout_s=left_s + _STORE_MARGIN_S, message=f"{lost} stopped answering; look at its output"
            )
        except dist.DistError:
            raise DistError(f"{lost} has ended; look at its output") from None
        except KeyboardInterrupt:
            _withdraw(store, room)
            raise
        if verdict == _OPEN:
            return dist.PrefixStore(room, store), room
    raise AssertionError("the count of attempts has no end")


def _try_rendezvous(store: dist.Store, rendezvous: RendezvousConfig, *, left_s: float, timeout_s: float) -> bytes:
    """The verdict of one try."""
    rank, world = rendezvous.rank, rendezvous.world_size
    if store.check(["verdict"]):
        return _OVER
    if store.add(f"here/{rank}", 1) > 1:
        raise ConfigError(f"init_dist: two processes say that they are rank {rank} of {world}; give each a RANK of its own")
    if store.add("arrived", 1) == world:
        store.compare_set("verdict", "", _OPEN.decode())
    begun, tired = time.monotonic(), False
    try:
        store.wait(["verdict"], timedelta(seconds=left_s))
    except dist.DistStoreError:
        tired = store.compare_set("verdict", "", _FAILED.decode()) == _FAILED
    verdict = bytes(store.get("verdict"))
    left_s -= time.monotonic() - begun
    # Ranks that were started together tire together: the second one to do so has no time for another try.
    if verdict == _FAILED and (tired or left_s < _MIN_RETRY_FRACTION * timeout_s):
        missing = [peer for peer in range(world) if not store.check([f"here/{peer}"])]
        raise DistError(
            f"init_dist: {len(missing)} of {world} ranks did not arrive within {timeout_s:g} s: "
            f"missing {missing}; look at their output, or raise init_timeout_s"
        )
    return verdict


def _withdraw(store: dist.Store, prefix: str) -> None:
    """Let a try fail that this rank leaves: its thread would go on to stand for a rank that is not there."""

    def withdraw() -> None:
        # The thread holds its connection while it waits.
        dist.PrefixStore(prefix, clone_store(store)).compare_set("verdict", "", _FAILED.decode())

    call_with_timeout(
        withdraw, timeout_s=_STORE_MARGIN_S, message="init_dist: interrupted, and rank 0 does not answer; is it stopped?"
    )
