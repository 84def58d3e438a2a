"""``init_dist``: the process groups, and the facts about this rank.

It works under ``dtrain launch``, under torchrun, and in a plain ``python loop.py`` (one process, no environment needed). This
module and ``place`` are the only ones that read the environment of a rank.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtrain import pulse, spans, wire
from dtrain.dist import stopping
from dtrain.dist.blackbox import close_blackbox, open_blackbox
from dtrain.dist.closing import finish_all
from dtrain.dist.place import choose_device, read_address, read_place, read_stop_signals
from dtrain.dist.rendezvous import Meeting, connect, meet
from dtrain.dist.timeouts import Lookout, leave_note, naming_missing, post_lookout
from dtrain.errors import ConfigError, DistError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DistInfo:
    """This rank and its process groups; a context manager that closes what ``init_dist`` made.

    ``control`` is a gloo group for agreements of the main thread, ``background`` one for checkpoint traffic; the default
    group carries the training. No group is used from two threads. The groups are None in a process that never called
    ``init_dist``, where everything is one rank. ``run_dir`` is the launcher's folder of this launch, None without it.

    Leaving the context waits for saves that are under way in the background, and raises what went wrong with them. After an
    exception it runs no collective besides theirs, so a failed rank never waits for what the others would do next. Leaving it
    after ``should_stop`` was true and a state was saved since, by ``sys.exit()`` as well, exits with code 75: preempted and
    saved.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    run_dir: Path | None = None
    timeout_s: float = field(default=600.0, repr=False)
    control: dist.ProcessGroup | None = field(default=None, repr=False)
    background: dist.ProcessGroup | None = field(default=None, repr=False)
    owner: bool = field(default=False, repr=False)
    opened_group: bool = field(default=False, repr=False)

    def __enter__(self) -> DistInfo:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.owner:
            return
        preempted = False
        try:
            try:
                finish_all(error)
                if stopping.saved() and isinstance(error, SystemExit) and error.code in (None, 0):
                    error = None  # sys.exit() is a way to leave, too: all ranks were asked to, and all have saved
            except BaseException as failure:
                error = failure
                raise
            finally:
                _close(self, error=error)
            preempted = error is None and stopping.saved()
        finally:
            stopping.finish(preempted=preempted)
        if preempted:
            raise SystemExit(wire.PREEMPTED)


@dataclass(slots=True)
class _Process:
    """What a process has open: there is one default group per process, so there is one of these."""

    info: DistInfo | None = None
    meeting: Meeting | None = None  # the last one
    store: dist.Store | None = None  # of the last meeting
    adopted: int = 0  # how many times a group of the user's own was taken over
    chose_interface: bool = False  # gloo's variable was set here, and is to be taken back
    # NCCL groups of a failed run that could not be closed. Weak: nothing here keeps a group, because one that is freed later in
    # a fork of this process waits for threads that only this process has.
    abandoned: weakref.ref[dist.ProcessGroup] | None = None
    meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = field(default_factory=dict)  # on the open groups


_PROCESS = _Process()
_BOTH = "cpu:gloo,cuda:nccl"  # what a rank with a GPU gets: CPU tensors travel, too


def current() -> DistInfo:
    """The open ``DistInfo``, or that of a single rank without groups when ``init_dist`` was not called.

    Raises:
        DistError: torch.distributed runs with several ranks, but ``init_dist`` was not called.
    """
    if _PROCESS.info is not None:
        return _PROCESS.info
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise DistError("dist: torch.distributed is running, but dtrain's own groups are not; call dt.init_dist() first")
    return _ALONE


_ALONE = DistInfo()  # asked for several times a step


def check_in_groups(where: str) -> None:
    """Refuse a rank of a launcher that has opened no groups: it would train alone, and so would all others.

    Raises:
        ConfigError: the environment says that there are several ranks, and ``init_dist`` is not open.
    """
    ranks = os.environ.get(wire.WORLD_SIZE, "")
    if _PROCESS.info is None and not dist.is_initialized() and ranks.isdecimal() and int(ranks) > 1:
        raise ConfigError(
            f"{where}: this process is one of {ranks} ranks ({wire.WORLD_SIZE}={ranks}), but init_dist is not open, so every "
            "rank would train alone; put the loop into `with dt.init_dist() as info:`"
        )


def open_meshes() -> dict[tuple[tuple[str, int], ...], DeviceMesh]:
    """The meshes made on the open groups, by axes and degrees: to be added to, and dropped when ``init_dist``'s block ends.

    A fresh dictionary without ``init_dist``: nobody says when groups of the user's own are closed.
    """
    return _PROCESS.meshes if _PROCESS.info is not None else {}


@spans.counted("setup")
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
        A frozen ``DistInfo``. Called again it returns the open one, which only the first call's context closes, and which keeps
        its address and time-outs; called after closing, or after it failed, it meets the others anew.

    Collective: every rank must call it. A process without a launcher is a world of one.

    Raises:
        ConfigError: a contradictory environment, a device that is not there, or a device or backend other than those of the
            groups that are open.
        DistError: ranks that did not arrive in time, by number.
    """
    _check_options(backend, device, timeout_s, init_timeout_s)
    if _PROCESS.info is not None:
        _check_agrees(_PROCESS.info, backend, device)
        return replace(_PROCESS.info, owner=False)
    if dist.is_initialized() and _PROCESS.abandoned is not None and _PROCESS.abandoned() is dist.group.WORLD:
        raise DistError("init_dist: NCCL groups of a failed run are still open in this process; start a new one")
    place, stop_signals = read_place(), read_stop_signals()
    chosen = choose_device(device, place)
    if backend == "nccl" and chosen.type != "cuda":
        raise ConfigError("init_dist: backend='nccl' needs GPUs, but this rank runs on the CPU; leave it out or take 'gloo'")
    backend = backend or (_BOTH if chosen.type == "cuda" else "gloo")
    opened_group = not dist.is_initialized()
    store, lookout = _meet(place, init_method, timeout_s, init_timeout_s) if opened_group else _adopt(place, timeout_s)
    post_lookout(lookout)
    try:
        with naming_missing("init_dist"):
            if opened_group:
                _open_default_group(place, store, backend, chosen, timeout_s)
            _PROCESS.info = _open_own_groups(place, backend, chosen, timeout_s, opened_group)
    except BaseException:
        _forget(destroy=opened_group and dist.is_initialized())
        raise
    run_dir = os.environ.get(wire.RUN_DIR)
    stopping.begin(stop_signals, failed=wire.failed_file(Path(run_dir)) if run_dir else None)
    _report_to_launcher(place["rank"])
    open_blackbox(os.environ, _PROCESS.info)
    return _PROCESS.info


@contextmanager
def standing_in(info: DistInfo) -> Iterator[None]:
    """Let ``info`` be this process's place among the ranks while the block runs: for groups that only pretend to be some.

    Mutates: this process's record, which is as before afterwards.

    Raises:
        DistError: ``init_dist`` has made real ones.
    """
    if _PROCESS.info is not None:
        raise DistError("dist: init_dist has opened groups in this process; leave its block before others stand in for them")
    _PROCESS.info, _PROCESS.meshes = info, {}
    try:
        yield
    finally:
        _PROCESS.info, _PROCESS.meshes = None, {}


def _check_options(backend: str | None, device: str | None, timeout_s: float, init_timeout_s: float) -> None:
    for name, seconds in (("timeout_s", timeout_s), ("init_timeout_s", init_timeout_s)):
        if not seconds > 0:
            raise ConfigError(f"init_dist: {name} must be a positive number of seconds, got {seconds!r}")
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"init_dist: device must be 'cpu' or 'cuda', got {device!r}")
    if backend not in (None, "gloo", "nccl"):
        raise ConfigError(f"init_dist: backend must be 'gloo' or 'nccl', got {backend!r}")


def _check_agrees(info: DistInfo, backend: str | None, device: str | None) -> None:
    """Refuse arguments that the open groups do not fulfil."""
    training = "nccl" if info.backend == _BOTH else info.backend
    for name, asked, have in (("device", device, info.device.type), ("backend", backend, training)):
        if asked not in (None, have):
            raise ConfigError(
                f"init_dist: {name}={asked!r}, but the open groups use {have!r}; close them first, or leave it out"
            )


def _meet(
    place: dict[str, int], init_method: str | None, timeout_s: float, init_timeout_s: float
) -> tuple[dist.Store, Lookout | None]:
    """The store of a new default group, after all ranks have come; and the lookout for those that go missing later."""
    rank, world = place["rank"], place["world_size"]
    meeting = Meeting(rank=rank, world_size=world, address=read_address(rank, world) if init_method is None else init_method)
    if meeting != _PROCESS.meeting:
        _PROCESS.meeting, _PROCESS.store = meeting, None
    # Opening again after closing meets at the same store: rank 0 cannot listen on its port a second time.
    if _PROCESS.store is None:
        _PROCESS.store = connect(meeting, within_s=init_timeout_s)
    try:
        store, room = meet(_PROCESS.store, meeting, prefix=_prefix(), within_s=init_timeout_s)
    except BaseException:
        if rank != 0:  # a later try begins with a new connection, in case that this one was lost
            _PROCESS.store = None
        raise
    serves = isinstance(meeting.address, str) or (meeting.address is not None and os.environ.get(wire.AGENT_STORE) != "True")
    return store, _lookout(place, store=_PROCESS.store, prefix=room, timeout_s=timeout_s, server=0 if serves else None)


def _adopt(place: dict[str, int], timeout_s: float) -> tuple[dist.Store, Lookout | None]:
    """The store of a default group that the user has opened, and a lookout."""
    _PROCESS.adopted += 1
    store: dist.Store = dist.distributed_c10d._get_default_store()
    prefix = f"{_prefix()}/adopted/{_PROCESS.adopted}"
    return store, _lookout(place, store=store, prefix=prefix, timeout_s=timeout_s, server=None)


def _prefix() -> str:
    """Of all keys: a launcher that restarts ranks may keep the store, with what the last ones wrote."""
    return f"dtrain/{os.environ.get(wire.RESTART_COUNT, '0')}"


def _lookout(place: dict[str, int], *, store: dist.Store, prefix: str, timeout_s: float, server: int | None) -> Lookout | None:
    if place["world_size"] == 1:
        return None  # nobody can be missing
    return Lookout(
        store=store,
        prefix=f"{prefix}/missing",
        rank=place["rank"],
        world_size=place["world_size"],
        timeout_s=timeout_s,
        server=server,
    )


def _open_default_group(place: dict[str, int], store: dist.Store, backend: str, device: torch.device, timeout_s: float) -> None:
    if place["world_size"] == 1 and wire.GLOO_INTERFACE not in os.environ:
        # One process talks to nobody: keep gloo's listener on loopback whatever the host name resolves to.
        os.environ[wire.GLOO_INTERFACE] = "lo0" if sys.platform == "darwin" else "lo"
        _PROCESS.chose_interface = True
    dist.init_process_group(
        backend=backend,
        store=store,
        rank=place["rank"],
        world_size=place["world_size"],
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" and "nccl" in backend else None,
    )


def _open_own_groups(
    place: dict[str, int], backend: str, device: torch.device, timeout_s: float, opened_group: bool
) -> DistInfo:
    limit, run_dir = timedelta(seconds=timeout_s), os.environ.get(wire.RUN_DIR)
    return DistInfo(
        **place,
        device=device,
        backend=backend,
        run_dir=Path(run_dir) if run_dir else None,
        control=dist.new_group(backend="gloo", timeout=limit),
        background=dist.new_group(backend="gloo", timeout=limit),
        timeout_s=timeout_s,
        owner=True,
        opened_group=opened_group,
    )


def _report_to_launcher(rank: int) -> None:
    pulse.connect_by(
        os.environ, rank
    )  # where the launcher's bootstrap has not done so: it has started a program of another kind
    pulse.report(pulse.Kind.OPENED, os.getpid())


def _close(info: DistInfo, *, error: BaseException | None = None) -> None:
    """Close what ``info`` opened. With an ``error`` no collective is run: the others may never come."""
    try:
        if error is not None:
            leave_note(error)
        elif dist.is_initialized():
            pulse.report(pulse.Kind.LEAVING)
            # The last collective of a peer may still be in flight: nobody takes its sockets away before all are here.
            with naming_missing("leaving init_dist", group="control"):
                dist.barrier(group=info.control)
    except BaseException as failure:
        error = failure
        raise
    finally:
        # After a failure NCCL's teardown may wait for peers that never come; the process is about to end anyway.
        stuck = error is not None and info.device.type == "cuda" and info.world_size > 1
        if not info.opened_group and dist.is_initialized():
            for group in (info.control, info.background):
                dist.destroy_process_group(group)
        left_open = stuck and info.opened_group and dist.is_initialized()
        _PROCESS.abandoned = weakref.ref(dist.distributed_c10d._get_default_group()) if left_open else None
        _forget(destroy=info.opened_group and dist.is_initialized() and not stuck)
        pulse.report(pulse.Kind.CLOSED, os.getpid())


def _forget(*, destroy: bool) -> None:
    """Back to a process without groups; ``destroy``: close torch's, too."""
    _PROCESS.info = None
    _PROCESS.meshes = {}
    post_lookout(None)
    if _PROCESS.chose_interface:
        os.environ.pop(wire.GLOO_INTERFACE, None)
        _PROCESS.chose_interface = False
    if destroy:
        dist.destroy_process_group()
    close_blackbox()
