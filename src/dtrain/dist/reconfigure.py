"""Let the other ranks stay when a rank dies: the only module that uses torch's reconfiguration of process groups.

The launcher replaces a killed rank by a new process and tells the others, if all ranks were in ``Checkpointer.retry``. The
ranks that stay keep their process, model and compiled code. Their default group stays the same object, so a model may hold it.
torch connects it anew with the new process (``enable_reconfigure``, since torch 2.14, gloo).

The new process runs the script from its begin, while no other rank runs the collectives of the setup. So the ranks record the
results of their exchanges up to ``retry``, and the new process reads them. Any other collective of its setup is an error, which
ends the attempt, and the launcher starts all ranks again.
"""

from __future__ import annotations

import base64
import gc
import inspect
import json
import os
import time
import traceback
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dtrain import launch_protocol
from dtrain.arguments import warn
from dtrain.dist.context import current_context
from dtrain.dist.control_plane import CHANNELS, Channel, ChannelName, ControlPlane
from dtrain.dist.control_protocol import Layout, RowSpec, RowSummary
from dtrain.errors import DistError
from dtrain.launch import heartbeats

if TYPE_CHECKING:
    from dtrain.dist.init import DistInfo

_MIN_TORCH = "2.14"
# Time for a busy launcher to see a death, or to answer that there is none.
_ANNOUNCEMENT_S = 10.0
# A process that dies closes its connections before the launcher can see its death.
_DYING_S = 0.5
_POLL_S = 0.002
# Exchanges of a setup that are larger are not recorded, and the ranks do not stay.
_MAX_RECORD_BYTES = 16 * 2**20


@dataclass(slots=True, kw_only=True, eq=False)
class Membership:
    """Facts of a rank that may stay when another rank dies, or that takes the place of a dead one.

    Args:
        is_joining: if True, this rank takes the place of a dead one, and is not connected with the others yet.
        connect_timeout_s: time to wait for the other ranks, in seconds.
        in_setup: if True, ``Checkpointer.retry`` has not begun on this rank.
        is_over: if True, it has ended on this rank.
        exchanges: exchanges of the setup, with the payload of each rank; None if they are too large.
        loaded: runs that the setup has loaded.
    """

    is_joining: bool
    connect_timeout_s: float
    in_setup: bool = True
    is_over: bool = False
    exchanges: list[tuple[str, list[bytes]]] | None = field(default_factory=list)
    loaded: list[weakref.ref[Any]] = field(default_factory=list)
    _recorded_bytes: int = 0

    def record(self, caller: str, payloads: list[bytes]) -> None:
        """Record an exchange of the setup, except those of a load: a rank that joins loads in ``retry``."""
        if self.exchanges is None or caller == "load_sharded":
            return
        self._recorded_bytes += sum(map(len, payloads))
        if self._recorded_bytes > _MAX_RECORD_BYTES:
            self.exchanges = None
        else:
            self.exchanges.append((caller, payloads))


def is_joining() -> bool:
    """Return True if this rank takes the place of a dead one, and is not connected with the others yet."""
    membership = current_context().membership
    return membership is not None and membership.is_joining


def note_load(runs: Iterable[Any]) -> None:
    """Note the runs that a load fills. A new rank loads only the run that ``Checkpointer.retry`` trains.

    Mutates: the current context.
    """
    membership = current_context().membership
    if membership is not None and membership.in_setup:
        membership.loaded += map(weakref.ref, runs)


def why_no_rank_stays(info: DistInfo) -> str:
    """Return the reason why all ranks start again when one dies; "" if the others can stay."""
    if "enable_reconfigure" not in inspect.signature(dist.init_process_group).parameters:
        return f"torch {torch.__version__} cannot connect a process group anew, which needs torch {_MIN_TORCH}"
    if info.backend != "gloo" or info.device.type != "cpu":
        return f"the training group is {info.backend} on {info.device.type}, and must be gloo on the CPU"
    if info.local_world_size != info.world_size:
        return "the job has several nodes"
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        return "TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the training group"
    return ""


def open_membership(info: DistInfo, connect_timeout_s: float) -> Membership | None:
    """Return the facts for ranks that stay; None if the launcher of this rank replaces no ranks, or if they cannot stay.

    Warns on rank 0 of a reason that is not in the launch.
    """
    restarts = os.environ.get(launch_protocol.MAX_RESTARTS, "0") != "0" and heartbeats.can_see_replacements()
    if not restarts or info.world_size == 1 or setup_file() is None or not info._opened_group:
        return None
    if reason := why_no_rank_stays(info):
        if info.rank == 0:
            message = f"init_dist: survive has no effect: {reason}. All ranks start again when one dies."
            warn(message, RuntimeWarning)
        return None
    joins = os.environ.pop(launch_protocol.JOINS, "") == "1"
    return Membership(is_joining=joins, connect_timeout_s=connect_timeout_s)


def setup_file() -> Path | None:
    """Return the file with the exchanges of the setup, in memory that outlives the ranks; None without such memory."""
    folder = os.environ.get(launch_protocol.MEMORY_FOLDER)
    return None if folder is None or not os.path.isdir(folder) else Path(folder, "setup-exchanges")


def open_group(info: DistInfo, store: dist.Store) -> None:
    """Open the default group, which is not connected before ``connect_group``.

    Args:
        info: this rank.
        store: store of this attempt of all ranks, without a prefix: ranks that are replaced later must find the same keys.
    """
    options: dict[str, Any] = {"enable_reconfigure": True}
    dist.init_process_group(
        backend="gloo",
        store=dist.PrefixStore("dtrain/group", store),
        rank=info.rank,
        world_size=info.world_size,
        timeout=timedelta(seconds=info.timeout_s),
        **options,
    )


def connect_group(info: DistInfo, plane: ControlPlane, timeout_s: float) -> None:
    """Connect the default group with the groups of all ranks of this restart. Collective: one exchange."""
    channel = plane["background"]
    handles = channel.all_gather(_c10d()._get_reconfigure_handle().encode(), caller="init_dist")
    # Reports count the exchanges from the first one after init_dist.
    channel.count = 0
    _reconfigure(_number() * (info.world_size + 1), [handle.decode() for handle in handles], timeout_s)


def leave_group(info: DistInfo, error: BaseException) -> None:
    """Close the connections of the default group, so that the other ranks notice, also those that wait for other ranks.

    Args:
        info: this rank.
        error: error of a collective. The connections last as long as the works of collectives that its frames hold.

    Mutates: the frames of ``error``, whose variables are deleted.
    """
    chain = [error]
    # The list grows during the loop.
    for link in chain:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        chain += [other for other in (link.__cause__, link.__context__) if other is not None and other not in chain]
    gc.collect()
    number = _number() * (info.world_size + 1) + 1 + info.rank
    _reconfigure(number, [_c10d()._get_reconfigure_handle()], info.timeout_s)


def has_other_groups() -> bool:
    """Return True if this process has another group of several ranks than the default group, which cannot be connected anew."""
    groups: Sequence[dist.ProcessGroup] = list(_c10d()._world.pg_map)
    return any(group is not dist.group.WORLD and group.size() > 1 for group in groups)


def await_replacement(error: BaseException, *, is_collective: bool) -> int | None:
    """Return the number of the restart in which the launcher replaces a dead rank; None if no rank is replaced.

    Args:
        error: error of this rank.
        is_collective: if True, the launcher may be about to see the death that is the cause, so wait for its word.
    """
    membership = current_context().membership
    if membership is None or membership.in_setup or membership.is_over or not isinstance(error, Exception):
        return None
    began_at, answers = time.monotonic(), None
    while (restarts := heartbeats.replacement()) is None and is_collective:
        waited_s = time.monotonic() - began_at
        if answers is not None and heartbeats.num_answers() > answers:
            # The launcher may have replaced a rank since.
            return heartbeats.replacement()
        if waited_s >= _ANNOUNCEMENT_S:
            break
        if answers is None and waited_s >= _DYING_S:
            answers = heartbeats.num_answers()
            heartbeats.report(heartbeats.ProgressKind.ASKS)
        time.sleep(_POLL_S)
    return restarts


def _number() -> int:
    # A number must be new in each call. After a death all ranks have the number of the restart.
    return int(os.environ.get(launch_protocol.RESTART_COUNT, "0"))


def _c10d() -> Any:
    return dist.distributed_c10d


def _reconfigure(number: int, handles: Sequence[str], timeout_s: float) -> None:
    _c10d()._reconfigure(uuid=number, handles=list(handles), timeout=timedelta(seconds=timeout_s)).wait()


def end_setup(membership: Membership) -> bool:
    """End the record of the setup, and write it for ranks that join. Return False if there is none, so that no rank may join.

    A rank that has joined itself writes nothing.
    """
    plane, exchanges, file = current_context().control_plane, membership.exchanges, setup_file()
    assert plane is not None, "the groups are open"
    plane["control"].record = None
    was_in_setup, membership.in_setup = membership.in_setup, False
    if not was_in_setup:
        return True
    if file is None or exchanges is None:
        return False
    membership.exchanges = []
    if plane.layout.rank != 0:
        return True
    rows = [[caller, [base64.b64encode(payload).decode() for payload in payloads]] for caller, payloads in exchanges]
    try:
        launch_protocol.replace_text(file, json.dumps(rows))
    except OSError:
        return False
    return True


def open_joining_plane(info: DistInfo) -> ControlPlane:
    """Return a control plane without connections, which answers the exchanges of the setup as at the start of the job.

    Raises:
        DistError: the record of the setup is gone.
    """
    file = setup_file()
    try:
        assert file is not None, "the launcher keeps memory"
        rows = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DistError(f"init_dist: the exchanges of the other ranks' setup cannot be read: {error}") from error
    exchanges = [(caller, [base64.b64decode(payload) for payload in payloads]) for caller, payloads in rows]
    layout = Layout(info.rank, info.world_size, info.world_size)
    recorded = {"control": exchanges}
    channels: dict[ChannelName, Channel] = {
        name: _JoiningChannel(name, layout, {}, timeout_s=info.timeout_s, exchanges=recorded.get(name, ())) for name in CHANNELS
    }
    return ControlPlane(layout, channels)


class _JoiningChannel(Channel):
    """Channel of a rank that is not connected yet. An exchange returns what the other ranks sent at the start of the job."""

    def __init__(self, *args: Any, exchanges: Sequence[tuple[str, list[bytes]]] = (), **options: Any) -> None:
        super().__init__(*args, **options)
        self._exchanges = list(exchanges)

    def all_gather(self, payload: bytes, *, caller: str, timeout_s: float | None = None) -> list[bytes]:
        if not self._exchanges or self._exchanges[0][0] != caller:
            raise self._refusal(caller)
        payloads = self._exchanges.pop(0)[1]
        payloads[self.layout.rank] = payload
        return payloads

    def gather(self, payload: bytes, dst: int, *, caller: str) -> list[bytes] | None:
        raise self._refusal(caller)

    def reduce_rows(
        self, row: Sequence[float], spec: RowSpec, *, caller: str
    ) -> tuple[RowSummary, list[tuple[float, ...]] | None]:
        raise self._refusal(caller)

    def _refusal(self, caller: str) -> DistError:
        return DistError(
            f"{caller}: rank {self.layout.rank} takes the place of a dead rank, and the other ranks do not run this exchange "
            "now. Use Checkpointer.retry after the same setup on all ranks; all ranks start again."
        )
