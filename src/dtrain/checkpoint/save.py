"""Save a ``TrainState``: all ranks write into a staging folder, and rank 0 commits the folder by one rename.

The training thread collects the contents, checks that they are equal on all ranks, and copies them. All file operations are
done by the background thread (``save_thread``), also for a synchronous save.

Facts about the commits of this process are in ``state.run_context``.
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
from dtrain.dist.collectives import all_gather_json, raise_on_all_ranks
from dtrain.dist.context import current_context
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, PeerError
from dtrain.state import TrainState
from dtrain.storage import AnyPath

_CALLER = "save_sharded"
# Each save in progress holds a copy of the rank's shards.
_MAX_IN_FLIGHT = 2
_STAGING = StagingPool()
SaveMode = Literal["sync", "async"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveHandle:
    """Handle of a save in progress or done.

    Args:
        step: step of the state.
        path: folder of the step after the commit.
    """

    step: int
    path: AnyPath
    _task: SaveTask[SaveResult] = field(repr=False)
    _copy_events: Sequence[torch.cuda.Event] = field(default=(), repr=False)

    @property
    def done(self) -> bool:
        """True if the save has ended on this rank, with or without an error."""
        return self._task.future.done()

    def wait_staged(self) -> None:
        """Return when the state has been copied. A state on the CPU has been copied when ``save_sharded`` returns."""
        for event in self._copy_events:
            event.synchronize()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the step is durable and verifiable on every rank.

        Raises:
            TimeoutError: the save takes longer than ``timeout_s`` seconds; the save continues.
            CheckpointError, PeerError: the save failed; the step was not committed.
        """
        self._task.result(timeout_s)

    def result(self, timeout_s: float | None = None) -> SaveResult:
        """Wait for the save and return its result. Raises as ``wait`` does."""
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

    With ``mode="sync"`` the step is durable and verifiable on every rank when the function returns. With ``"async"`` it is
    durable when the handle's ``wait`` returns. The training thread then waits only while tensors are copied into host memory,
    which later saves use again, and may change the state at once. The end of ``init_dist``'s block waits for saves in progress.

        handle = dt.save_sharded("runs/gpt/ckpt", state, extra={"loader": loader}, mode="async", keep_last=3)
        ...  # train on
        print(handle.result().path)

    Args:
        root: folder on a file system that all ranks share, or a URL (``s3://bucket/run``); created if missing.
        state: newest state of the run. Several states by name (a GAN's two) become one step together, with the step number
            of the first.
        extra: objects with ``state_dict()``, or plain data, by name, equal on all ranks. Tensors inside must not be sharded.
        mode: "sync" waits for the commit, "async" does not.
        only: ``("model",)`` saves parameters and buffers, ``("trainable",)`` the trained parameters (an adapter). Neither
            takes ``extra``, nor a root that holds whole states, because a run could not resume from such a step.
        cast: dtype of the stored floating-point parameters. Loading them into parameters of another dtype has to be allowed.
        incremental: if True, parameters that are not trained get a file of their own, which is linked from the run's last step
            if unchanged.
        keep_last: number of the run's last steps that remain after the commit. The step that this process resumed from
            remains as well. None keeps all steps.
        keep_every: multiples of this number are kept as well.
        keep_steps: steps to keep as well.

    Returns:
        A handle, whose ``result()`` is the ``SaveResult``. A step that this process has committed or loaded already is not
        written again.

    Mutates: ``state.run_context``; files. A step of the same run that this process did not write (after going back to an older
    step) is replaced. A folder at this step that is no valid checkpoint is moved aside with a warning.
    Collective: exchanges of JSON on the control group, and in the background thread on the background group; every rank must
    call it. Every rank writes its own shards; each replica of a shard writes a part of the tensors.
    Host sync: none for tensors on the CPU. Tensors on a GPU are copied to pinned memory in the order of the current stream;
    ``"async"`` does not wait for the copy.

    Raises:
        ConfigError: a value that is neither a tensor nor plain data (by its path), or that differs between ranks. No file has
            been touched.
        CheckpointError: the step exists and belongs to another run, another live job writes into ``root``, there is no space,
            or a file operation failed; the step is not committed. In ``"async"`` mode the handle raises it, or the next save
            (unless ``should_stop`` asked for this save, which comes first), or the end of ``init_dist``'s block.
        StaleStateError: ``state`` was stepped already.
        PeerError: another rank failed.
    """
    save = None
    started_at = time.monotonic()
    with spans.span("save"):
        # Without autograd, local shards are obtained faster.
        with raise_on_all_ranks(_CALLER), gc_paused(), torch.no_grad():
            root_path, states = storage.resolve_path(root), _as_states(state)
            _check_arguments(states, mode, only, extra, cast)
            plan_retention([], keep_last, keep_every=keep_every, keep_steps=keep_steps)
            first = next(iter(states.values()))
            contents = collect_contents(states, extra or {}, only=tuple(only or ()), cast=cast)
            if not only:
                _record_saved_extra(states, extra or {})
            write_plan = plan_rank_write(
                contents, get_dist_info().rank, get_dist_info().world_size, separate_frozen=incremental
            )
            hashes = content_hashes(contents)
        # The file of frozen parameters may become a link, which needs no space.
        needed = write_plan.data_bytes if not incremental else next(iter(write_plan.files.values())).size
        total_bytes = _agree_on_contents(hashes, needed)
        save_thread.wait_for_slot(_MAX_IN_FLIGHT)
        with raise_on_all_ranks(_CALLER), gc_paused(), torch.no_grad():
            files, buffers, copy_events = _serialize_files(write_plan, mode)
            save = SaveRequest(
                caller=_CALLER,
                root=root_path,
                run=[s.run_context for s in states.values()],
                step=first.step,
                layout=_mesh_layout(first),
                only=tuple(only or ()),
                state_names=tuple(name for name in states if name),
                # The serialized files reference the memory that is still needed, so the tensors may be freed.
                write_plan=replace(write_plan, tensors={}),
                files=files,
                total_bytes=total_bytes,
                content_key=content_key(states, tuple(only or ()), cast),
                info=get_dist_info(),
                copy_events=copy_events,
                release_buffers=partial(_release_buffers, buffers),
                # In the middle of a step the ranks have agreed to stop already, but the state is older.
                after_stop_agreed=current_context().preemption.is_agreed() and first.step_counts is None,
                incremental=incremental,
                keep_last=keep_last,
                keep_every=keep_every,
                keep_steps=tuple(keep_steps),
                started_at=started_at,
            )
        assert save is not None, "the block has raised otherwise"
        task = save_thread.submit(f"the save of step {first.step}", partial(run_save, save))
        handle = SaveHandle(
            step=first.step, path=root_path / layout.step_name(first.step), _task=task, _copy_events=copy_events
        )
        if mode == "sync":
            _wait(task)
    spans.record_event("save", step=first.step, blocked_s=time.monotonic() - started_at)
    return handle


def _wait(task: SaveTask[SaveResult]) -> None:
    """Wait for a synchronous save, which writes the state's own memory: an interrupt must cancel the save."""
    try:
        task.result()
    except BaseException:
        task.cancelled = True
        save_thread.wait(task)
        task.failure_reported = True
        raise


def _as_states(state: TrainState | Mapping[str, TrainState]) -> dict[str, TrainState]:
    """Return the states by name; a single state has the empty name.

    Raises:
        ConfigError: a value of another type, or a name that a checkpoint cannot hold.
    """
    if isinstance(state, TrainState):
        return {"": state}
    if not isinstance(state, Mapping) or not state:
        raise ConfigError(f"{_CALLER}: state must be a TrainState, or several by name, got {state!r}"[:300])
    for name, named_state in state.items():
        if type(name) is not str or name in ("", tree_json.TAG):
            raise ConfigError(f"{_CALLER}: names of states must be strings, neither empty nor {tree_json.TAG!r}, got {name!r}")
        if not isinstance(named_state, TrainState):
            raise ConfigError(f"{_CALLER}: {name} must be a TrainState, got {type(named_state).__name__}")
    return dict(state)


def _check_arguments(
    states: States, mode: str, only: Sequence[str] | None, extra: Mapping[str, Any] | None, cast: torch.dtype | None
) -> None:
    for state in states.values():
        state._check_not_stale(_CALLER)
        state._check_replicas_joined(_CALLER)
    if len({state.run_context.run_id for state in states.values()}) > 1:
        raise ConfigError(f"{_CALLER}: the states {list(states)} must belong to one run. Load them from one checkpoint.")
    if mode not in ("sync", "async"):
        raise ConfigError(f"{_CALLER}: mode must be 'sync' or 'async', got {mode!r}")
    if only is not None and tuple(only) not in (("model",), ("trainable",)):
        raise ConfigError(f"{_CALLER}: only must be ('model',), ('trainable',) or None, got {only!r}")
    if only is not None and extra:
        raise ConfigError(
            f"{_CALLER}: extra must be empty with only={tuple(only)}, got {sorted(extra)}. Pass only one of the two."
        )
    if cast is not None and (not cast.is_floating_point or cast not in layout.DTYPE_NAMES):
        raise ConfigError(f"{_CALLER}: cast must be a floating-point dtype, got {cast}")


def _agree_on_contents(hashes: Mapping[str, str], nbytes: int) -> int:
    """Check that the contents are equal on all ranks and that no earlier save failed. Return the bytes of all ranks' data.

    Collective: one exchange of JSON on the control group.
    """
    facts: Any = {"hashes": hashes, "bytes": nbytes, "failed": save_thread.has_unreported_failure()}
    facts_by_rank = cast(list[dict[str, Any]], all_gather_json(facts, caller=_CALLER))
    failed = [rank for rank, facts in enumerate(facts_by_rank) if facts["failed"]]
    # After an agreed stop this save comes first; the end of the init_dist block raises the failure.
    if failed and not current_context().preemption.is_agreed():
        # A failed save fails on every rank, though not at the same time.
        save_thread.wait_all()
        raise PeerError(f"{_CALLER}: an earlier save failed on rank {failed[0]} and was not committed. Save again.")
    check_equal_on_all_ranks([facts["hashes"] for facts in facts_by_rank])
    return sum(facts["bytes"] for facts in facts_by_rank)


def _record_saved_extra(states: Mapping[str, TrainState], extra: Mapping[str, Any]) -> None:
    """Record the objects whose state was saved; ``early_stop`` must not change such objects any more in this step."""
    for state in states.values():
        state.run_context.extra_saved_steps = {id(value): state.step for value in extra.values()}


def _serialize_files(
    write_plan: RankWritePlan, mode: SaveMode
) -> tuple[dict[str, SerializedFile], list[StagingBuffer], list[torch.cuda.Event]]:
    """Serialize this rank's files. Tensors are copied for an asynchronous save, or if they are not on the CPU."""
    cuda = any(tensor.is_cuda for tensor in write_plan.tensors.values())
    if mode == "sync" and not cuda:
        return {name: serialize_in_place(file, write_plan.tensors) for name, file in write_plan.files.items()}, [], []
    buffers = [_STAGING.acquire(file.size, pinned=cuda) for file in write_plan.files.values()]
    pairs = zip(buffers, write_plan.files.items(), strict=True)
    files = {name: buffer.fill(file, write_plan.tensors) for buffer, (name, file) in pairs}
    copy_events = []
    for device in {tensor.device for tensor in write_plan.tensors.values() if tensor.is_cuda}:
        # The copies are in the order of this device's current stream.
        with torch.cuda.device(device):
            copy_events.append(torch.cuda.Event())
            copy_events[-1].record()
    return files, buffers, copy_events


def _release_buffers(buffers: Sequence[StagingBuffer]) -> None:
    for buffer in buffers:
        _STAGING.release(buffer)


def _mesh_layout(state: TrainState) -> MeshLayout:
    mesh = state.spec.mesh
    if mesh is None:
        return MeshLayout(strategy=state.spec.strategy, axes=(), shape=())
    return MeshLayout(strategy=state.spec.strategy, axes=tuple(mesh.mesh_dim_names or ()), shape=tuple(mesh.shape))
