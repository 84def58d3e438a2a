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

from dtrain import heartbeats, launch_protocol, spans
from dtrain.dist import preemption
from dtrain.dist.env import read_master_address, read_rank_from_env, read_stop_signals, select_device
from dtrain.dist.flight_recorder import start_dump_thread, stop_dump_thread
from dtrain.dist.rendezvous import RendezvousConfig, connect_store, join_rendezvous
from dtrain.dist.shutdown import run_shutdown_hooks
from dtrain.dist.timeout_report import MissingRankReporter, install_reporter, leave_error_note, report_missing_ranks
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
                run_shutdown_hooks(error)
                if preemption.is_saved() and isinstance(error, SystemExit) and error.code in (None, 0):
                    error = None  # sys.exit() is a way to leave, too: all ranks were asked to, and all have saved
            except BaseException as failure:
                error = failure
                raise
            finally:
                _close_groups(self, error=error)
            preempted = error is None and preemption.is_saved()
        finally:
            preemption.reset(preempted=preempted)
        if preempted:
            raise SystemExit(launch_protocol.PREEMPTED_EXIT_CODE)


@dataclass(slots=True)
class _DistContext:
    """What a process has open: there is one default group per process, so there is one of these."""

    info: DistInfo | None = None
    rendezvous: RendezvousConfig | None = None  # the last one
    store: dist.Store | None = None  # of the last meeting
    reused_groups: int = 0  # how many times a group of the user's own was taken over
    set_gloo_interface: bool = False  # gloo's variable was set here, and is to be taken back
    # NCCL groups of a failed run that could not be closed. Weak: nothing here keeps a group, because one that is freed later in
    # a fork of this process waits for threads that only this process has.
    abandoned_group: weakref.ref[dist.ProcessGroup] | None = None
    meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = field(default_factory=dict)  # on the open groups


_CONTEXT = _DistContext()
_GLOO_AND_NCCL = "cpu:gloo,cuda:nccl"  # what a rank with a GPU gets: CPU tensors travel, too


def get_dist_info() -> DistInfo:
    """The open ``DistInfo``, or that of a single rank without groups when ``init_dist`` was not called.

    Raises:
        DistError: torch.distributed runs with several ranks, but ``init_dist`` was not called.
    """
    if _CONTEXT.info is not None:
        return _CONTEXT.info
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise DistError("dist: torch.distributed is running, but dtrain's own groups are not; call dt.init_dist() first")
    return _SINGLE_PROCESS


_SINGLE_PROCESS = DistInfo()  # asked for several times a step


def check_init_dist_called(caller: str) -> None:
    """Refuse a rank of a launcher that has opened no groups: it would train alone, and so would all others.

    Raises:
        ConfigError: the environment says that there are several ranks, and ``init_dist`` is not open.
    """
    ranks = os.environ.get(launch_protocol.WORLD_SIZE, "")
    if _CONTEXT.info is None and not dist.is_initialized() and ranks.isdecimal() and int(ranks) > 1:
        raise ConfigError(
            f"{caller}: this process is one of {ranks} ranks ({launch_protocol.WORLD_SIZE}={ranks}), but init_dist is not open, so every "
            "rank would train alone; put the loop into `with dt.init_dist() as info:`"
        )


def mesh_cache() -> dict[tuple[tuple[str, int], ...], DeviceMesh]:
    """The meshes made on the open groups, by axes and degrees: to be added to, and dropped when ``init_dist``'s block ends.

    A fresh dictionary without ``init_dist``: nobody says when groups of the user's own are closed.
    """
    return _CONTEXT.meshes if _CONTEXT.info is not None else {}


@spans.timed("setup")
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
    if _CONTEXT.info is not None:
        _check_matches_open_groups(_CONTEXT.info, backend, device)
        return replace(_CONTEXT.info, owner=False)
    if dist.is_initialized() and _CONTEXT.abandoned_group is not None and _CONTEXT.abandoned_group() is dist.group.WORLD:
        raise DistError("init_dist: NCCL groups of a failed run are still open in this process; start a new one")
    place, stop_signals = read_rank_from_env(), read_stop_signals()
    chosen = select_device(device, place)
    if backend == "nccl" and chosen.type != "cuda":
        raise ConfigError("init_dist: backend='nccl' needs GPUs, but this rank runs on the CPU; leave it out or take 'gloo'")
    backend = backend or (_GLOO_AND_NCCL if chosen.type == "cuda" else "gloo")
    opened_group = not dist.is_initialized()
    store, lookout = (
        _join_rendezvous(place, init_method, timeout_s, init_timeout_s)
        if opened_group
        else _reuse_default_group(place, timeout_s)
    )
    install_reporter(lookout)
    try:
        with report_missing_ranks("init_dist"):
            if opened_group:
                _open_default_group(place, store, backend, chosen, timeout_s)
            _CONTEXT.info = _open_gloo_groups(place, backend, chosen, timeout_s, opened_group)
    except BaseException:
        _reset(destroy=opened_group and dist.is_initialized())
        raise
    run_dir = os.environ.get(launch_protocol.RUN_DIR)
    preemption.configure(stop_signals, job_failed_file=launch_protocol.job_failed_file(Path(run_dir)) if run_dir else None)
    _report_to_launcher(place["rank"])
    start_dump_thread(os.environ, _CONTEXT.info)
    return _CONTEXT.info


@contextmanager
def fake_dist_info(info: DistInfo) -> Iterator[None]:
    """Let ``info`` be this process's place among the ranks while the block runs: for groups that only pretend to be some.

    Mutates: this process's record, which is as before afterwards.

    Raises:
        DistError: ``init_dist`` has made real ones.
    """
    if _CONTEXT.info is not None:
        raise DistError("dist: init_dist has opened groups in this process; leave its block before others stand in for them")
    _CONTEXT.info, _CONTEXT.meshes = info, {}
    try:
        yield
    finally:
        _CONTEXT.info, _CONTEXT.meshes = None, {}


def _check_options(backend: str | None, device: str | None, timeout_s: float, init_timeout_s: float) -> None:
    for name, seconds in (("timeout_s", timeout_s), ("init_timeout_s", init_timeout_s)):
        if not seconds > 0:
            raise ConfigError(f"init_dist: {name} must be a positive number of seconds, got {seconds!r}")
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"init_dist: device must be 'cpu' or 'cuda', got {device!r}")
    if backend not in (None, "gloo", "nccl"):
        raise ConfigError(f"init_dist: backend must be 'gloo' or 'nccl', got {backend!r}")


def _check_matches_open_groups(info: DistInfo, backend: str | None, device: str | None) -> None:
    """Refuse arguments that the open groups do not fulfil."""
    training = "nccl" if info.backend == _GLOO_AND_NCCL else info.backend
    for name, asked, have in (("device", device, info.device.type), ("backend", backend, training)):
        if asked not in (None, have):
            raise ConfigError(
                f"init_dist: {name}={asked!r}, but the open groups use {have!r}; close them first, or leave it out"
            )


def _join_rendezvous(
    rank_info: dict[str, int], init_method: str | None, timeout_s: float, init_timeout_s: float
) -> tuple[dist.Store, MissingRankReporter | None]:
    """The store of a new default group, after all ranks have come; and the lookout for those that go missing later."""
    rank, world = rank_info["rank"], rank_info["world_size"]
    meeting = RendezvousConfig(
        rank=rank, world_size=world, address=read_master_address(rank, world) if init_method is None else init_method
    )
    if meeting != _CONTEXT.rendezvous:
        _CONTEXT.rendezvous, _CONTEXT.store = meeting, None
    # Opening again after closing meets at the same store: rank 0 cannot listen on its port a second time.
    if _CONTEXT.store is None:
        _CONTEXT.store = connect_store(meeting, timeout_s=init_timeout_s)
    try:
        store, room = join_rendezvous(_CONTEXT.store, meeting, prefix=_store_prefix(), timeout_s=init_timeout_s)
    except BaseException:
        if rank != 0:  # a later try begins with a new connection, in case that this one was lost
            _CONTEXT.store = None
        raise
    serves = isinstance(meeting.address, str) or (
        meeting.address is not None and os.environ.get(launch_protocol.AGENT_STORE) != "True"
    )
    return store, _make_missing_rank_reporter(
        rank_info, store=_CONTEXT.store, prefix=room, timeout_s=timeout_s, server=0 if serves else None
    )


def _reuse_default_group(rank_info: dict[str, int], timeout_s: float) -> tuple[dist.Store, MissingRankReporter | None]:
    """The store of a default group that the user has opened, and a lookout."""
    _CONTEXT.reused_groups += 1
    store: dist.Store = dist.distributed_c10d._get_default_store()
    prefix = f"{_store_prefix()}/adopted/{_CONTEXT.reused_groups}"
    return store, _make_missing_rank_reporter(rank_info, store=store, prefix=prefix, timeout_s=timeout_s, server=None)


def _store_prefix() -> str:
    """Of all keys: a launcher that restarts ranks may keep the store, with what the last ones wrote."""
    return f"dtrain/{os.environ.get(launch_protocol.RESTART_COUNT, '0')}"


def _make_missing_rank_reporter(
    rank_info: dict[str, int], *, store: dist.Store, prefix: str, timeout_s: float, server: int | None
) -> MissingRankReporter | None:
    if rank_info["world_size"] == 1:
        return None  # nobody can be missing
    return MissingRankReporter(
        store=store,
        prefix=f"{prefix}/missing",
        rank=rank_info["rank"],
        world_size=rank_info["world_size"],
        timeout_s=timeout_s,
        server_rank=server,
    )


def _open_default_group(
    rank_info: dict[str, int], store: dist.Store, backend: str, device: torch.device, timeout_s: float
) -> None:
    if rank_info["world_size"] == 1 and launch_protocol.GLOO_INTERFACE not in os.environ:
        # One process talks to nobody: keep gloo's listener on loopback whatever the host name resolves to.
        os.environ[launch_protocol.GLOO_INTERFACE] = "lo0" if sys.platform == "darwin" else "lo"
        _CONTEXT.set_gloo_interface = True
    dist.init_process_group(
        backend=backend,
        store=store,
        rank=rank_info["rank"],
        world_size=rank_info["world_size"],
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" and "nccl" in backend else None,
    )


def _open_gloo_groups(
    rank_info: dict[str, int], backend: str, device: torch.device, timeout_s: float, opened_group: bool
) -> DistInfo:
    limit, run_dir = timedelta(seconds=timeout_s), os.environ.get(launch_protocol.RUN_DIR)
    return DistInfo(
        **rank_info,
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
    heartbeats.connect_from_env(
        os.environ, rank
    )  # where the launcher's bootstrap has not done so: it has started a program of another kind
    heartbeats.report(heartbeats.ProgressKind.OPENED, os.getpid())


def _close_groups(info: DistInfo, *, error: BaseException | None = None) -> None:
    """Close what ``info`` opened. With an ``error`` no collective is run: the others may never come."""
    try:
        if error is not None:
            leave_error_note(error)
        elif dist.is_initialized():
            heartbeats.report(heartbeats.ProgressKind.LEAVING)
            # The last collective of a peer may still be in flight: nobody takes its sockets away before all are here.
            with report_missing_ranks("leaving init_dist", group="control"):
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
        _CONTEXT.abandoned_group = weakref.ref(dist.distributed_c10d._get_default_group()) if left_open else None
        _reset(destroy=info.opened_group and dist.is_initialized() and not stuck)
        heartbeats.report(heartbeats.ProgressKind.CLOSED, os.getpid())


def _reset(*, destroy: bool) -> None:
    """Back to a process without groups; ``destroy``: close torch's, too."""
    _CONTEXT.info = None
    _CONTEXT.meshes = {}
    install_reporter(None)
    if _CONTEXT.set_gloo_interface:
        os.environ.pop(launch_protocol.GLOO_INTERFACE, None)
        _CONTEXT.set_gloo_interface = False
    if destroy:
        dist.destroy_process_group()
    stop_dump_thread()
