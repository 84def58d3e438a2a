"""Open and close the process groups of this process (``init_dist``), and describe this rank (``DistInfo``).

``init_dist`` works under ``dtrain launch``, under torchrun, and in a plain ``python loop.py`` (one process, no environment).
Only this module and ``dtrain.dist.rendezvous`` read the environment of a rank.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from dtrain import launch_protocol, spans
from dtrain.arguments import check_choice, check_number, explain_arguments
from dtrain.device import collective_backend, find_accelerator, is_accelerator
from dtrain.dist import incident, reconfigure
from dtrain.dist.context import current_context
from dtrain.dist.control_plane import open_control_plane
from dtrain.dist.incident import Incidents, report_missing_ranks
from dtrain.dist.rendezvous import (
    RendezvousConfig,
    connect_store,
    join_rendezvous,
    open_default_group,
    read_master_address,
    read_rank_from_env,
    read_stop_signals,
    select_device,
)
from dtrain.errors import ConfigError, DistError
from dtrain.launch import heartbeats
from dtrain.machine import raise_open_file_limit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DistInfo:
    """This rank and its process groups. A context manager that closes the groups opened by ``init_dist``.

    The default group carries the training, and no group is used from two threads. A process that never called ``init_dist`` is
    a world of one rank.

    Args:
        rank: index of this rank.
        world_size: number of ranks.
        local_rank: index of this rank on its node.
        local_world_size: number of ranks on the node.
        node_rank: index of the node.
        device: device of this rank.
        backend: backend of the training group.
        run_dir: the launcher's folder of this launch, None without a launcher.
        timeout_s: time that a collective waits for a rank, in seconds.

    Leaving the context waits for background saves, and raises their errors. After an exception the exit runs no collective
    except those of the saves, so a failed rank never waits for its peers. If ``should_stop`` was true and a state was saved
    afterwards, leaving the context exits with code 75 (preempted and saved), also after ``sys.exit()``.
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
    # If True, leaving the context closes the groups.
    _owner: bool = field(default=False, repr=False)
    # If True, ``init_dist`` has opened the default group.
    _opened_group: bool = field(default=False, repr=False)

    @property
    def is_main(self) -> bool:
        """True on the main rank, rank 0, which prints and logs."""
        return self.rank == 0

    def print(self, *values: object, **options: Any) -> None:
        """Print as the built-in ``print``, on the main rank only, and flush. Values are computed on every rank.

        Args:
            values: values to print.
            options: ``sep``, ``end`` and ``file`` of the built-in function.

        Example:
            >>> import dtrain as dt
            >>> with dt.init_dist() as dist:
            ...     dist.print("ranks:", dist.world_size)
            ranks: 1
        """
        if self.is_main:
            print(*values, **{"flush": True, **options})

    def __enter__(self) -> DistInfo:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._owner:
            return
        context, preempted = current_context(), False
        preemption = context.preemption
        try:
            try:
                context.shutdown_hooks.run(error)
                if preemption.saved and isinstance(error, SystemExit) and error.code in (None, 0):
                    # All ranks were asked to stop and have saved, so sys.exit() is a regular way to leave.
                    error = None
            except BaseException as failure:
                error = failure
                raise
            finally:
                _close_groups(self, error=error)
            preempted = error is None and preemption.saved
        finally:
            preemption.close(preempted=preempted)
        if preempted:
            raise SystemExit(launch_protocol.PREEMPTED_EXIT_CODE)


def get_dist_info() -> DistInfo:
    """Return the open ``DistInfo``; without ``init_dist``, the info of a single rank without groups.

    Raises:
        DistError: torch.distributed runs with several ranks, but ``init_dist`` was not called.
    """
    info = current_context().info
    if info is not None:
        return info
    # Faster than ``is_initialized``, a function of Python around the same.
    if dist.group.WORLD is not None and dist.get_world_size() > 1:
        raise DistError("dist: torch.distributed is initialized, but the groups of dtrain are not. Call dt.init_dist() first.")
    return _SINGLE_PROCESS


# Made once, because a step reads the info several times.
_SINGLE_PROCESS = DistInfo()


def check_init_dist_called(caller: str) -> None:
    """Refuse a rank of a launcher that has not called ``init_dist``: each rank would train alone.

    Raises:
        ConfigError: the environment names several ranks, and ``init_dist`` is not open.
    """
    ranks = os.environ.get(launch_protocol.WORLD_SIZE, "")
    if current_context().info is None and not dist.is_initialized() and ranks.isdecimal() and int(ranks) > 1:
        raise ConfigError(
            f"{caller}: this process is one of {ranks} ranks ({launch_protocol.WORLD_SIZE}={ranks}), but init_dist is not "
            "open, so every rank would train alone. Put the loop into `with dt.init_dist() as info:`."
        )


@explain_arguments
@spans.timed("rendezvous")
def init_dist(
    *,
    backend: str | None = None,
    device: str | None = None,
    init_method: str | None = None,
    timeout_s: float = 600.0,
    init_timeout_s: float = 300.0,
    survive: bool = False,
) -> DistInfo:
    """Open the process groups and describe this rank.

    Args:
        backend: backend of the training group, ``"gloo"`` or the accelerator's, such as ``"nccl"``; None selects the backend of
            the device.
        device: ``"cpu"`` or the type of the accelerator, such as ``"cuda"``; None selects the accelerator if the node has a
            device for each of its ranks. With ``backend="gloo"`` the ranks may share a named accelerator, as in tests.
        init_method: torch rendezvous address (``"tcp://host:port"``, ``"file:///path"``); None uses the launcher's address.
        timeout_s: time that a collective waits for a rank before raising, in seconds.
        init_timeout_s: time that ``init_dist`` waits for all ranks, in seconds.
        survive: if True, the ranks in ``Checkpointer.retry`` stay when another rank is killed, and ``dtrain launch
            --max-restarts`` replaces that rank only. This needs torch 2.14, gloo on the CPU and one node. Otherwise all ranks
            start again, as without ``survive``.

    Returns:
        A frozen ``DistInfo``. A second call returns the open info, with its address and timeouts; only the first call's context
        closes the groups. A call after closing, or after a failure, starts a new rendezvous.

    Collective: every rank must call it. A process without a launcher is a world of one.

    Example:
        with dt.init_dist() as info:
            mesh = dt.build_mesh()
            model = dt.shard_model(build_model(), mesh, blocks=(Block,))
            train(model)

    Raises:
        ConfigError: a contradictory environment, an unavailable device, a device or backend that differs from the open groups,
            or too few open files allowed for the number of ranks.
        DistError: ranks that did not arrive in time, by number.
    """
    _check_group_options(backend, device, timeout_s, init_timeout_s)
    context = current_context()
    if context.info is not None:
        return replace(context.info, _owner=False)
    abandoned = context.earlier.abandoned_group
    if dist.is_initialized() and abandoned is not None and abandoned() is dist.group.WORLD:
        raise DistError("init_dist: NCCL groups of a failed run are still open in this process. Start a new process.")
    rank_info, stop_signals = read_rank_from_env(), read_stop_signals()
    raise_open_file_limit("init_dist", rank_info["world_size"])
    # NCCL refuses two ranks on one GPU. gloo copies through the host.
    rank_device = select_device(device, rank_info, share=backend == "gloo")
    if backend not in ("gloo", None) and not is_accelerator(rank_device):
        raise ConfigError(
            f"init_dist: backend={backend!r} needs GPUs, but this rank runs on the CPU. Use backend='gloo' or None."
        )
    run_dir = os.environ.get(launch_protocol.RUN_DIR)
    info = DistInfo(
        **rank_info,
        device=rank_device,
        backend=backend or _default_backend(rank_device),
        run_dir=Path(run_dir) if run_dir else None,
        timeout_s=timeout_s,
        _owner=True,
        _opened_group=not dist.is_initialized(),
    )
    context.membership = reconfigure.open_membership(info, init_timeout_s) if survive else None
    try:
        if context.membership is not None and context.membership.is_joining:
            context.control_plane = reconfigure.open_joining_plane(info)
            reconfigure.open_group(info, _open_store(info, init_method, init_timeout_s)[1])
        else:
            _connect(info, init_method, init_timeout_s)
        context.info = info
    except BaseException:
        _reset(destroy=info._opened_group and dist.is_initialized())
        raise
    job_failed_file = launch_protocol.job_failed_file(info.run_dir) if info.run_dir else None
    context.preemption.open(stop_signals, job_failed_file=job_failed_file)
    # The launcher's bootstrap connects Python scripts. Other programs that start a rank are connected here.
    heartbeats.connect_from_env(os.environ, info.rank)
    heartbeats.report(heartbeats.ProgressKind.OPENED, os.getpid())
    context.flight_recorder.start(os.environ, info, context.control_plane)
    return info


def _connect(info: DistInfo, init_method: str | None, init_timeout_s: float) -> None:
    """Meet the other ranks, and open the control plane and the default group."""
    context = current_context()
    store = _join_ranks(info, init_method, init_timeout_s)
    with report_missing_ranks("init_dist"):
        context.control_plane = plane = open_control_plane(info)
        if context.incidents is not None:
            context.incidents.watch(plane)
        if context.membership is not None:
            if not dist.is_initialized():
                reconfigure.open_group(info, _open_store(info, init_method, init_timeout_s)[1])
            reconfigure.connect_group(info, plane, init_timeout_s)
            plane["control"].record = context.membership.record if context.membership.in_setup else None
        elif info._opened_group:
            open_default_group(info, store)


@spans.timed("rendezvous")
def rejoin(restarts: int, error: BaseException | None) -> None:
    """Connect with the ranks of a restart that has replaced dead ranks: as a rank that stays, or as one of the new ranks.

    Args:
        restarts: number of the restart.
        error: error that ended the step of a rank that stays. Its frames are cleared. None on a new rank.

    Mutates: the current context; the default group; ``os.environ``.
    Collective: as ``init_dist``; every rank must call it.

    Raises:
        DistError: ranks that did not arrive in time, by number.
    """
    context = current_context()
    info, membership = context.info, context.membership
    assert info is not None, "the groups are open"
    assert membership is not None, "the caller has looked"
    context.flight_recorder.stop()
    before = context.incidents
    if before is not None:
        before.abandon()
    if context.control_plane is not None:
        context.control_plane.close()
    context.control_plane = context.incidents = None
    os.environ[launch_protocol.RESTART_COUNT] = str(restarts)
    if error is not None:
        reconfigure.leave_group(info, error)
    _connect(info, None, membership.connect_timeout_s)
    if before is not None:
        before.join()
    membership.is_joining = False
    heartbeats.follow(restarts)
    context.flight_recorder.start(os.environ, info, context.control_plane)


def _check_group_options(backend: str | None, device: str | None, timeout_s: float, init_timeout_s: float) -> None:
    """Refuse invalid arguments, and arguments that differ from the open groups."""
    check_number("init_dist", "timeout_s", timeout_s, above=0)
    check_number("init_dist", "init_timeout_s", init_timeout_s, above=0)
    accelerator = find_accelerator() or torch.device("cuda")
    check_choice("init_dist", "device", device, ("cpu", accelerator.type, None))
    if backend not in ("gloo", None):
        check_choice("init_dist", "backend", backend, ("gloo", collective_backend(accelerator), None))
    if (info := current_context().info) is None:
        return
    # "cpu:gloo,cuda:nccl" is nccl.
    training = info.backend.rpartition(":")[2]
    for name, value, current in (("device", device, info.device.type), ("backend", backend, training)):
        if value not in (None, current):
            raise ConfigError(
                f"init_dist: {name} must be {current!r} like the open groups, got {value!r}. "
                f"Close the groups first or omit {name}."
            )


def _default_backend(device: torch.device) -> str:
    """Return the backend of the training group for ranks on ``device``. Beside an accelerator, gloo carries CPU tensors."""
    return f"cpu:gloo,{device.type}:{collective_backend(device)}" if is_accelerator(device) else "gloo"


def _join_ranks(info: DistInfo, init_method: str | None, init_timeout_s: float) -> dist.Store:
    """Wait for all ranks, and prepare for failures of ranks. Return the store of the default group.

    If the user has opened the default group, no rank waits.
    """
    context = current_context()
    earlier = context.earlier
    # A launcher that restarts ranks may keep the store with its old keys.
    prefix = f"dtrain/{os.environ.get(launch_protocol.RESTART_COUNT, '0')}"
    if info._opened_group:
        config, first_store = _open_store(info, init_method, init_timeout_s)
        try:
            group_store, prefix = join_rendezvous(first_store, config, prefix=prefix, timeout_s=init_timeout_s)
        except BaseException:
            # The next attempt opens a new connection, because this one may be lost.
            if info.rank != 0:
                earlier.store = None
            raise
        store, server_rank = first_store, config.server_rank
    else:
        earlier.num_reused_groups += 1
        prefix = f"{prefix}/adopted/{earlier.num_reused_groups}"
        store = group_store = dist.distributed_c10d._get_default_store()
        server_rank = None
    # A single rank has no peer that could be missing.
    if info.world_size > 1:
        context.incidents = Incidents(
            store=store,
            prefix=f"{prefix}/missing",
            info=info,
            grace_s=incident.GRACE_S,
            server_rank=server_rank,
        )
    return group_store


def _open_store(info: DistInfo, init_method: str | None, init_timeout_s: float) -> tuple[RendezvousConfig, dist.Store]:
    """Return the rendezvous of this rank, and the connection to its store, opened once."""
    earlier = current_context().earlier
    address = read_master_address(info.rank, info.world_size) if init_method is None else init_method
    config = RendezvousConfig(rank=info.rank, world_size=info.world_size, address=address)
    if config != earlier.rendezvous:
        earlier.rendezvous, earlier.store = config, None
    if earlier.store is None:
        earlier.store = connect_store(config, timeout_s=init_timeout_s)
    return config, earlier.store


@contextmanager
def fake_dist_info(info: DistInfo) -> Iterator[None]:
    """Use ``info`` as the info of this process inside of the context, for simulated process groups.

    Mutates: the current context, which is reset on exit.

    Raises:
        DistError: ``init_dist`` has opened real groups.
    """
    context = current_context()
    if context.info is not None:
        raise DistError("dist: init_dist has opened groups in this process. Leave its block before simulating other groups.")
    context.info = info
    try:
        yield
    finally:
        context.info = None
        context.meshes.clear()


def _close_groups(info: DistInfo, *, error: BaseException | None = None) -> None:
    """Close the groups of ``info``. After an ``error`` run no collective, because the other ranks may never call it."""
    try:
        if error is not None:
            if (incidents := current_context().incidents) is not None:
                incidents.leave(error)
        elif dist.is_initialized():
            heartbeats.report(heartbeats.ProgressKind.LEAVING)
            if (incidents := current_context().incidents) is not None:
                incidents.leaving = True
            # The last collective of a peer may still be in flight. The exchange keeps its connections open until all are done.
            plane = current_context().control_plane
            if plane is not None and plane.layout.world_size > 1:
                with report_missing_ranks("leaving init_dist", group="control"):
                    plane["control"].all_gather(b"", caller="leaving init_dist")
    except BaseException as failure:
        error = failure
        raise
    finally:
        # After a failure NCCL's teardown may wait forever for other ranks. The process is about to end anyway.
        stuck = error is not None and is_accelerator(info.device) and info.world_size > 1
        if not info._opened_group and dist.is_initialized() and (group := current_context().cpu_group) is not None:
            dist.destroy_process_group(group)
        left_open = stuck and info._opened_group and dist.is_initialized()
        current_context().earlier.abandoned_group = (
            weakref.ref(dist.distributed_c10d._get_default_group()) if left_open else None
        )
        _reset(destroy=info._opened_group and dist.is_initialized() and not stuck)
        heartbeats.report(heartbeats.ProgressKind.CLOSED, os.getpid())


def _reset(*, destroy: bool) -> None:
    """Reset the context to a process without groups. If ``destroy``, destroy torch's groups, too."""
    context = current_context()
    if context.incidents is not None:
        context.incidents.stop()
    context.info = context.incidents = context.membership = None
    context.meshes.clear()
    context.cpu_group = context.leader_group = None
    if context.control_plane is not None:
        context.control_plane.close()
        context.control_plane = None
    if context.set_gloo_interface:
        os.environ.pop(launch_protocol.GLOO_INTERFACE, None)
        context.set_gloo_interface = False
    if destroy:
        dist.destroy_process_group()
        context.group_store = None
    context.flight_recorder.stop()
