"""``save_sharded``: all ranks write into a side folder, agree, and rank 0 commits it by one rename.

The training thread takes the contents apart, agrees with the other ranks that they are the same, and copies them; all that
touches files happens in the background thread (``background``), for a synchronous save as well.

What this process knows of its own commits is in ``state.shared``.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch

from dtrain import spans, storage
from dtrain.checkpoint import layout, save_thread, tree_json
from dtrain.checkpoint.data_file import SerializedFile, serialize_in_place
from dtrain.checkpoint.layout import MeshLayout, SaveScope
from dtrain.checkpoint.retention import plan_retention
from dtrain.checkpoint.run_save import SaveRequest, SaveResult, run_save
from dtrain.checkpoint.save_thread import SaveTask, StagingBuffer, StagingPool
from dtrain.checkpoint.state_dict import (
    States,
    check_equal_on_all_ranks,
    collect_contents,
    content_hashes,
    content_key,
    gc_paused,
)
from dtrain.checkpoint.write_plan import RankWritePlan, plan_rank_write
from dtrain.dist import preemption
from dtrain.dist.collectives import all_gather_json
from dtrain.dist.init import get_dist_info
from dtrain.dist.rank_errors import RaiseOnAllRanks
from dtrain.errors import ConfigError, PeerError
from dtrain.state import TrainState
from dtrain.storage import AnyPath

_WHERE = "save_sharded"
_MAX_IN_FLIGHT = 2  # saves under way at a time: each holds a copy of the rank's shards
_STAGING = StagingPool()
SaveMode = Literal["sync", "async"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveHandle:
    """A save that is under way, or done.

    Args:
        step: of the state.
        path: the folder that it will have.
    """

    step: int
    path: AnyPath
    _task: SaveTask[SaveResult] = field(repr=False)
    _copy_events: Sequence[torch.cuda.Event] = field(default=(), repr=False)

    @property
    def done(self) -> bool:
        """Whether it has ended on this rank, well or not."""
        return self._task.future.done()

    def wait_staged(self) -> None:
        """Return when the state has been copied. Where it lies on the CPU, it was when ``save_sharded`` returned."""
        for event in self._copy_events:
            event.synchronize()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the step is durable and verifiable on every rank.

        Raises:
            TimeoutError: not within ``timeout_s`` seconds; it goes on.
            CheckpointError, PeerError: the save failed; nothing was published.
        """
        self._task.result(timeout_s)

    def result(self, timeout_s: float | None = None) -> SaveResult:
        """The committed step; waits for it, and raises as ``wait`` does."""
        return self._task.result(timeout_s)


def save_sharded(
    root: Path | str,
    state: TrainState | Mapping[str, TrainState],
    *,
    extra: Mapping[str, Any] | None = None,
    mode: SaveMode = "sync",
    only: Sequence[SaveScope] | None = None,
    cast: torch.dtype | None = None,
    incremental: bool = False,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_steps: Collection[int] = (),
) -> SaveHandle:
    """Save ``state`` as one step under ``root``.

    With ``mode="sync"`` the step is durable and verifiable on every rank when this returns. With ``"async"`` it is when the
    handle's ``wait`` returns; the training thread is held only while tensors are copied into host memory, which is used again
    by later saves, and may change the state at once. Leaving ``init_dist``'s block waits for what is under way.

    Args:
        root: a folder on a file system that all ranks share, or a URL (``s3://bucket/run``, and so on); made if missing.
        state: the newest state of the run; or several by name (a GAN's two), which become one step together. The step is that
            of the first of them.
        extra: by name, objects with ``state_dict()``, or plain data; tensors are allowed inside, sharded ones are not. The
            same on all ranks.
        mode: whether to wait.
        only: ``("model",)`` saves parameters and buffers, ``("trainable",)`` the parameters that are trained (an adapter);
            neither takes ``extra``, nor goes into a root that holds whole states: a run could not resume from it.
        cast: store floating-point parameters in this dtype; loading them into others has to be asked for.
        incremental: give parameters that are not trained a file of their own, and link it from the run's last step when it has
            not changed.
        keep_last: after the commit, remove all but this many of the run's last steps. The step that this process resumed
            from stays as well. None keeps all.
        keep_every: steps that are multiples of it are kept as well.
        keep_steps: these steps, too.

    Returns:
        A handle: its ``result()`` says what was written. A step that this process has committed or loaded already is not
        written again.

    Mutates: ``state.shared`` (the run's place among checkpoints); files. A step of the same run that this process did not
    write (after going back to an older one) is replaced; a folder at this step that is no valid checkpoint is moved aside
    with a warning.
    Collective: exchanges of JSON on the control group, and in the background thread on the background group; every rank must
    call it. Every rank writes its own shards; of what several ranks hold, each writes a part.
    Host sync: none for tensors on the CPU. Those on a GPU are copied to pinned memory in the order of the current stream;
    ``"async"`` does not wait for that.

    Raises:
        ConfigError: something that is neither a tensor nor plain data (by its path), or that differs between ranks; before
            any file is touched.
        CheckpointError: the step exists and belongs to another run, another live job writes into ``root``, there is no space,
            or a file operation failed; nothing is published then. In ``"async"`` mode this is raised by the handle, by the
            next save (not by one that ``should_stop`` asked for: that comes first), or when ``init_dist``'s block is left.
        StaleStateError: ``state`` was stepped already.
        PeerError: another rank failed.
    """
    save = None
    begun = time.monotonic()
    with spans.span("save"):
        with RaiseOnAllRanks(_WHERE), gc_paused(), torch.no_grad():  # a shard is had faster where no gradient could flow
            where, states = storage.resolve_path(root), _as_states(state)
            _check_arguments(states, mode, only, extra, cast)
            plan_retention([], keep_last, keep_every=keep_every, keep_steps=keep_steps)
            first = next(iter(states.values()))
            contents = collect_contents(states, extra or {}, only=tuple(only or ()), cast=cast)
            if not only:
                _record_saved_extra(states, extra or {})
            share = plan_rank_write(contents, get_dist_info().rank, get_dist_info().world_size, separate_frozen=incremental)
            parts = content_hashes(contents)
        needed = share.data_bytes if not incremental else next(iter(share.files.values())).size  # the other may be a link
        total_bytes = _agree_on_contents(parts, needed)
        save_thread.wait_for_slot(_MAX_IN_FLIGHT)
        with RaiseOnAllRanks(_WHERE), gc_paused(), torch.no_grad():  # a shard is had faster where no gradient could flow
            images, buffers, copied = _serialize_files(share, mode)
            save = SaveRequest(
                where=_WHERE,
                root=where,
                run=[s.run_context for s in states.values()],
                step=first.step,
                layout=_mesh_layout(first),
                only=tuple(only or ()),
                state_names=tuple(name for name in states if name),
                write_plan=replace(share, tensors={}),  # the images have what they need; the rest may be freed
                files=images,
                total_bytes=total_bytes,
                content_key=content_key(states, tuple(only or ()), cast),
                info=get_dist_info(),
                copy_events=copied,
                release_buffers=partial(_release_buffers, buffers),
                # In the middle of a step the ranks have agreed already, but the state is that before the step.
                after_stop_agreed=preemption.is_agreed() and first.step_counts is None,
                incremental=incremental,
                keep_last=keep_last,
                keep_every=keep_every,
                keep_steps=tuple(keep_steps),
                started_at=begun,
            )
        assert save is not None, "Agreed raises"
        task = save_thread.submit(f"the save of step {first.step}", partial(run_save, save))
        handle = SaveHandle(step=first.step, path=where / layout.step_name(first.step), _task=task, _copy_events=copied)
        if mode == "sync":
            _wait(task)
    spans.record_event("save", step=first.step, held_s=time.monotonic() - begun)
    return handle


def _wait(task: SaveTask[SaveResult]) -> None:
    """Wait for a synchronous save, which writes the state's own memory: after an interrupt it must not go on."""
    try:
        task.result()
    except BaseException:
        task.cancelled = True
        save_thread.wait(task)
        task.failure_reported = True
        raise


def _as_states(given: TrainState | Mapping[str, TrainState]) -> dict[str, TrainState]:
    """The states by name; a single one has the empty name.

    Raises:
        ConfigError: something else was given, or a name that a checkpoint cannot hold.
    """
    if isinstance(given, TrainState):
        return {"": given}
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(f"{_WHERE}: needs a TrainState, or some of them by name, got {given!r}"[:300])
    for name, state in given.items():
        if type(name) is not str or name in ("", tree_json.TAG):
            raise ConfigError(f"{_WHERE}: states have names (text, not empty, not {tree_json.TAG!r}), got {name!r}")
        if not isinstance(state, TrainState):
            raise ConfigError(f"{_WHERE}: {name}: needs a TrainState, got {type(state).__name__}")
    return dict(given)


def _check_arguments(
    states: States, mode: str, only: Sequence[str] | None, extra: Mapping[str, Any] | None, cast: torch.dtype | None
) -> None:
    for state in states.values():
        state._check_not_stale(_WHERE)
        state._check_replicas_joined(_WHERE)
    if len({state.run_context.run_id for state in states.values()}) > 1:
        raise ConfigError(f"{_WHERE}: the states {list(states)} belong to different runs; load them from one checkpoint")
    if mode not in ("sync", "async"):
        raise ConfigError(f"{_WHERE}: mode must be 'sync' or 'async', got {mode!r}")
    if only is not None and tuple(only) not in (("model",), ("trainable",)):
        raise ConfigError(f"{_WHERE}: only must be ('model',), ('trainable',) or None, got {only!r}")
    if only is not None and extra:
        raise ConfigError(f"{_WHERE}: only={tuple(only)} saves no extra, got {sorted(extra)}; leave out one of the two")
    if cast is not None and (not cast.is_floating_point or cast not in layout.DTYPE_NAMES):
        raise ConfigError(f"{_WHERE}: cast must be a floating-point dtype, got {cast}")


def _agree_on_contents(mine: Mapping[str, str], nbytes: int) -> int:
    """Bytes of all ranks' data, after a check that the ranks hold the same, and that no earlier save has failed unseen.

    Collective: one exchange of JSON on the control group.
    """
    facts: Any = {"parts": mine, "bytes": nbytes, "failed": save_thread.has_unreported_failure()}
    everyone = cast(list[dict[str, Any]], all_gather_json(facts, caller=_WHERE))
    failed = [rank for rank, facts in enumerate(everyone) if facts["failed"]]
    if failed and not preemption.is_agreed():  # then this save comes first; the failure is raised where the block is left
        save_thread.wait_all()  # a save that fails does so on every rank, though not at the same time
        raise PeerError(f"{_WHERE}: an earlier save failed on rank {failed[0]}; nothing of it was published, save again")
    check_equal_on_all_ranks([facts["parts"] for facts in everyone])
    return sum(facts["bytes"] for facts in everyone)


def _record_saved_extra(states: Mapping[str, TrainState], extra: Mapping[str, Any]) -> None:
    """Remember the objects whose state this save took, for what must not change any more in this step (``early_stop``)."""
    for state in states.values():
        state.run_context.extra_saved_steps = {id(thing): state.step for thing in extra.values()}


def _serialize_files(
    share: RankWritePlan, mode: SaveMode
) -> tuple[dict[str, SerializedFile], list[StagingBuffer], list[torch.cuda.Event]]:
    """The content of this rank's files: a copy of the tensors where training goes on, or where they are not on the CPU."""
    cuda = any(tensor.is_cuda for tensor in share.tensors.values())
    if mode == "sync" and not cuda:
        return {name: serialize_in_place(placed, share.tensors) for name, placed in share.files.items()}, [], []
    buffers = [_STAGING.acquire(placed.size, pinned=cuda) for placed in share.files.values()]
    pairs = zip(buffers, share.files.items(), strict=True)
    images = {name: buffer.fill(placed, share.tensors) for buffer, (name, placed) in pairs}
    copied = []
    for device in {tensor.device for tensor in share.tensors.values() if tensor.is_cuda}:
        with torch.cuda.device(device):  # the copies are in the order of this device's current stream
            copied.append(torch.cuda.Event())
            copied[-1].record()
    return images, buffers, copied


def _release_buffers(buffers: Sequence[StagingBuffer]) -> None:
    for buffer in buffers:
        _STAGING.release(buffer)


def _mesh_layout(state: TrainState) -> MeshLayout:
    mesh = state.spec.mesh
    if mesh is None:
        return MeshLayout(strategy=state.spec.strategy, axes=(), shape=())
    return MeshLayout(strategy=state.spec.strategy, axes=tuple(mesh.mesh_dim_names or ()), shape=tuple(mesh.shape))
