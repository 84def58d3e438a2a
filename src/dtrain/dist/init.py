"""``init_dist``: the process groups, and the facts about this rank.

The only module that reads the environment of a rank. It works under ``dtrain launch``, under torchrun, and in a plain
``python loop.py`` (one process, no environment needed).
"""

from __future__ import annotations

import os
import socket
import sys
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from dtrain import wire
from dtrain.errors import ConfigError, DistError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DistInfo:
    """This rank and its process groups; a context manager that closes what ``init_dist`` made.

    ``control`` is a gloo group for agreements of the main thread, ``background`` one for checkpoint traffic; the default
    group carries the training. No group is used from two threads. The groups are None in a process that never called
    ``init_dist``, where everything is one rank. ``run_dir`` is the launcher's folder of this launch, None without it.

    Leaving the context after an exception runs no collective, so a failed rank never waits for the others.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    run_dir: Path | None = None
    control: dist.ProcessGroup | None = field(default=None, repr=False)
    background: dist.ProcessGroup | None = field(default=None, repr=False)
    owner: bool = field(default=False, repr=False)
    opened_group: bool = field(default=False, repr=False)

    def __enter__(self) -> DistInfo:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.owner:
            _close(self, failed=kind is not None)


@dataclass(slots=True)
class _Process:
    """What a process has open: there is one default group per process, so there is one of these."""

    info: DistInfo | None = None
    store: dist.Store | None = None
    store_of: tuple[int, int, str | None] | None = None
    opened: int = 0


_PROCESS = _Process()


def current() -> DistInfo:
    """The open ``DistInfo``, or that of a single rank without groups when ``init_dist`` was not called.

    Raises:
        DistError: torch.distributed runs with several ranks, but ``init_dist`` was not called.
    """
    if _PROCESS.info is not None:
        return _PROCESS.info
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise DistError("dist: torch.distributed is running, but dtrain's own groups are not; call dt.init_dist() first")
    return DistInfo()


def init_dist(
    *,
    backend: str | None = None,
    device: str | None = None,
    init_method: str | None = None,
    timeout_s: float = 600.0,
    init_timeout_s: float = 300.0,
) -> DistInfo:
    """Join the other ranks and return who this one is.

    Args:
        backend: ``"gloo"`` or ``"nccl"`` for the training group; by default what the device needs.
        device: ``"cpu"`` or ``"cuda"``; by default CUDA when every rank of the node can have a GPU of its own.
        init_method: a torch rendezvous address (``"tcp://host:port"``, ``"file:///path"``); by default the launcher's.
        timeout_s: how long a collective waits for a rank before it raises, in seconds.
        init_timeout_s: how long to wait here for all ranks to arrive, in seconds.

    Returns:
        A frozen ``DistInfo``. Called again it returns the open one, which only the first call's context closes;
        called after closing it opens new groups.

    Collective: every rank must call it. A process without a launcher is a world of one.

    Raises:
        ConfigError: a contradictory environment, or a device that is not there.
        DistError: ranks that did not arrive in time, by number.
    """
    if _PROCESS.info is not None:
        return _shared(_PROCESS.info)
    for name, seconds in (("timeout_s", timeout_s), ("init_timeout_s", init_timeout_s)):
        if not seconds > 0:
            raise ConfigError(f"init_dist: {name} must be a positive number of seconds, got {seconds!r}")
    place = _place()
    chosen = _choose_device(device, place)
    backend = backend or ("cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo")
    opened_group = not dist.is_initialized()
    if opened_group:
        _open_default_group(place, backend, chosen, init_method, timeout_s, init_timeout_s)
    limit = timedelta(seconds=timeout_s)
    run_dir = os.environ.get(wire.RUN_DIR)
    _PROCESS.info = DistInfo(
        **place,
        device=chosen,
        backend=backend,
        run_dir=Path(run_dir) if run_dir else None,
        control=dist.new_group(backend="gloo", timeout=limit),
        background=dist.new_group(backend="gloo", timeout=limit),
        owner=True,
        opened_group=opened_group,
    )
    return _PROCESS.info


def _shared(info: DistInfo) -> DistInfo:
    names = DistInfo.__slots__
    return DistInfo(**{**{name: getattr(info, name) for name in names}, "owner": False})


def _place() -> dict[str, int]:
    """Rank and sizes from the launcher's environment, or a world of one."""
    env = os.environ
    if dist.is_initialized():
        return _adopted()
    if wire.RANK not in env and wire.WORLD_SIZE not in env:
        return {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "node_rank": 0}
    for name in (wire.RANK, wire.WORLD_SIZE):
        if name not in env:
            raise ConfigError(f"init_dist: {name} is not set but its partner is; start the script with `dtrain launch`")
    try:
        rank, world = int(env[wire.RANK]), int(env[wire.WORLD_SIZE])
        local_rank = int(env.get(wire.LOCAL_RANK, rank))
        local_world = int(env.get(wire.LOCAL_WORLD_SIZE, world))
        node = int(env.get(wire.NODE_RANK, "0"))
    except ValueError as error:
        raise ConfigError(
            f"init_dist: a rank variable is not a whole number ({error}); unset it or use `dtrain launch`"
        ) from None
    if not 0 <= rank < world:
        raise ConfigError(f"init_dist: needs 0 <= RANK < WORLD_SIZE, got RANK={rank} WORLD_SIZE={world}")
    return {
        "rank": rank,
        "world_size": world,
        "local_rank": local_rank,
        "local_world_size": local_world,
        "node_rank": node,
    }


def _adopted() -> dict[str, int]:
    """The place in a default group that the user has opened: torch knows it, whatever the environment says."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, value in ((wire.RANK, rank), (wire.WORLD_SIZE, world)):
        if os.environ.get(name, str(value)) != str(value):
            raise ConfigError(f"init_dist: {name}={os.environ[name]}, but the open process group says {value}; unset it")
    local = (int(os.environ.get(name, value)) for name, value in ((wire.LOCAL_RANK, rank), (wire.LOCAL_WORLD_SIZE, world)))
    places = dict(zip(("local_rank", "local_world_size"), local, strict=True))
    return {"rank": rank, "world_size": world, **places, "node_rank": int(os.environ.get(wire.NODE_RANK, "0"))}


def _choose_device(asked: str | None, place: dict[str, int]) -> torch.device:
    ranks, gpus = place["local_world_size"], torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked not in (None, "cpu", "cuda"):
        raise ConfigError(f"init_dist: device must be 'cpu' or 'cuda', got {asked!r}")
    if asked == "cuda" and gpus < ranks:
        raise ConfigError(f"init_dist: device='cuda' needs a GPU per rank, but this node has {gpus} for {ranks} ranks")
    if asked == "cpu" or gpus == 0:
        return torch.device("cpu")
    if gpus < ranks:
        if place["local_rank"] == 0:
            warnings.warn(f"init_dist: {ranks} ranks but {gpus} GPUs on this node: running on the CPU with gloo", stacklevel=3)
        return torch.device("cpu")
    chosen = torch.device("cuda", place["local_rank"])
    torch.cuda.set_device(chosen)
    return chosen


def _open_default_group(
    place: dict[str, int],
    backend: str,
    device: torch.device,
    init_method: str | None,
    timeout_s: float,
    init_timeout_s: float,
) -> None:
    rank, world = place["rank"], place["world_size"]
    # Opening again after closing meets at the same store: rank 0 cannot listen on its port a second time.
    if _PROCESS.store is None or _PROCESS.store_of != (rank, world, init_method):
        _PROCESS.store = _rendezvous(rank, world, init_method, init_timeout_s)
        _PROCESS.store_of = (rank, world, init_method)
    _PROCESS.opened += 1
    # A fresh prefix for each opening: keys of a closed group must not be read by the next one.
    store = dist.PrefixStore(f"dtrain/{_PROCESS.opened}", _PROCESS.store)
    _wait_for_all(store, rank, world, init_timeout_s)
    dist.init_process_group(
        backend=backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" and "nccl" in backend else None,
    )


def _rendezvous(rank: int, world: int, init_method: str | None, init_timeout_s: float) -> dist.Store:
    limit = timedelta(seconds=init_timeout_s)
    if init_method is not None:
        store: dist.Store = next(iter(dist.rendezvous(init_method, rank, world, timeout=limit)))[0]
        return store
    if world == 1:
        # One process talks to nobody: keep gloo's listener on loopback whatever the host name resolves to.
        os.environ.setdefault(wire.GLOO_INTERFACE, "lo0" if sys.platform == "darwin" else "lo")
        return dist.HashStore()
    try:
        addr, port = os.environ[wire.MASTER_ADDR], int(os.environ[wire.MASTER_PORT])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"init_dist: {world} ranks need {wire.MASTER_ADDR} and {wire.MASTER_PORT} ({error}); use `dtrain launch`"
        ) from None
    serves = rank == 0 and os.environ.get(wire.AGENT_STORE) != "True"
    listener = _loopback_listener(addr, port) if serves and os.environ.get(wire.LOOPBACK) == "1" else None
    try:
        return dist.TCPStore(addr, port, None, serves, limit, wait_for_workers=False, master_listen_fd=listener)
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise DistError(
            f"init_dist: rank {rank} could not reach rank 0 at {addr}:{port} within {init_timeout_s:g} s ({reason}); "
            "is rank 0 running, and is the port reachable from here?"
        ) from None


def _loopback_listener(addr: str, port: int) -> int:
    """A listening socket on loopback only: torch's own store would listen on every interface, without authentication."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the launcher holds the port with an idle socket
    listener.bind((addr, port))
    listener.listen(1024)
    return listener.detach()


def _wait_for_all(store: dist.Store, rank: int, world: int, init_timeout_s: float) -> None:
    """Wait until every rank has written its key, so that a rank that never comes can be named."""
    store.set(f"here/{rank}", "1")
    try:
        store.wait([f"here/{peer}" for peer in range(world)], timedelta(seconds=init_timeout_s))
    except dist.DistError:
        missing = [peer for peer in range(world) if not store.check([f"here/{peer}"])]
        raise DistError(
            f"init_dist: {len(missing)} of {world} ranks did not arrive within {init_timeout_s:g} s: "
            f"missing {missing}; look at their output, or raise init_timeout_s"
        ) from None


def _close(info: DistInfo, *, failed: bool) -> None:
    if not failed and dist.is_initialized():
        # The last collective of a peer may still be in flight: nobody takes its sockets away before all are here.
        dist.barrier(group=info.control)
    _PROCESS.info = None
    if not dist.is_initialized():
        return
    if not info.opened_group:
        for group in (info.control, info.background):
            dist.destroy_process_group(group)
    elif not (failed and info.device.type == "cuda"):
        # After a failure NCCL's teardown may wait for peers that never come; the process is about to end anyway.
        dist.destroy_process_group()
