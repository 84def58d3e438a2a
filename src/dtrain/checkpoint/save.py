"""Save a ``TrainState``: all ranks write into a staging folder, and rank 0 commits the folder by one rename.

The training thread collects the contents, checks that they are equal on all ranks, and copies them. All file operations are
done by the background thread (``save_thread``), also for a synchronous save.

The run's id and its commits are in the lineage of its ``RunContext``. The lock of a root and the staging memory belong to a
``Checkpointer``: ``save_sharded`` opens one per root of a run, which later saves of the run use again.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar, cast, get_args

import torch

from dtrain import spans, storage
from dtrain.arguments import check_choice, explain_arguments, warn
from dtrain.checkpoint import layout, tree_json
from dtrain.checkpoint.commit import SaveMode, SaveOptions, SaveRequest, SaveResult, run_save
from dtrain.checkpoint.data_file import MemoryPool, StagedFiles, stage_files
from dtrain.checkpoint.extra import check_loaders, check_stops, objects_of, warn_of_schedulers
from dtrain.checkpoint.layout import Manifest, MeshLayout, SaveScope
from dtrain.checkpoint.load import OneOrSeveral, load_sharded
from dtrain.checkpoint.lock import Lock, lock_root
from dtrain.checkpoint.node_memory import copy_to_next_node, find_memory_root, memory_root
from dtrain.checkpoint.save_thread import SaveTask, leave_saves, process_instance, save_thread
from dtrain.checkpoint.state_dict import (
    StateMark,
    States,
    check_equal_on_all_ranks,
    collect_contents,
    content_hashes,
    content_key,
    digest_entries,
    gc_paused,
    has_changed,
    mark_state,
    mark_unequal_values,
    rank_hashes,
)
from dtrain.checkpoint.step_choice import OnCorrupt
from dtrain.checkpoint.write_plan import RankWritePlan, plan_rank_write
from dtrain.dist import reconfigure
from dtrain.dist.collectives import all_gather_json, raise_on_all_ranks
from dtrain.dist.context import current_context, register_shutdown_hook
from dtrain.dist.incident import is_collective_error
from dtrain.dist.init import get_dist_info, rejoin
from dtrain.dist.mesh import leader_group
from dtrain.errors import CheckpointError, ConfigError, PeerError
from dtrain.launch import heartbeats
from dtrain.run_objects import unwrap
from dtrain.schedules.durations import Duration
from dtrain.shard.replica_check import raise_if_params_differ, replica_check_of
from dtrain.state import TrainState, check_block_open, check_state
from dtrain.step.optimizer_state import check_saved_state
from dtrain.storage import AnyPath

T = TypeVar("T")
_CALLER = "save_sharded"
# Each save in progress holds a copy of the rank's shards.
_MAX_IN_FLIGHT = 2


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
    _staged: StagedFiles = field(repr=False)

    @property
    def done(self) -> bool:
        """True if the save has ended on this rank, with or without an error."""
        return self._task.future.done()

    def wait_staged(self) -> None:
        """Return when the state has been copied. A state on the CPU has been copied when ``save_sharded`` returns."""
        self._staged.wait()

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


@explain_arguments
def save_sharded(
    root: AnyPath | str,
    state: TrainState | Mapping[str, TrainState],
    *,
    extra: Mapping[str, Any] | None = None,
    mode: SaveMode = "sync",
    scope: SaveScope = "all",
    dtype: torch.dtype | None = None,
    incremental: bool = False,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_steps: Collection[int] = (),
) -> SaveHandle:
    """Save ``state`` as one step under ``root``.

    Short form of ``Checkpointer(root, ...).save(state)``, for a run that saves in one place. The step holds the whole run, also
    the loader's position and the stateful objects of ``Step.init``. With ``mode="sync"`` the step is durable and verifiable on
    every rank when the function returns. With ``"async"`` it is durable when the handle's ``wait`` returns. The training thread
    then waits only while tensors are copied into host memory, which later saves use again, and may change the state at once.
    The end of ``init_dist``'s block waits for saves in progress.

        for batch in loader.until("3ep"):
            state, metrics = step(state, batch)
            if state.crossed("1ep"):
                dt.save_sharded("runs/gpt/ckpt", state, mode="async", keep_last=3)
        dt.save_sharded("runs/gpt/ckpt", state, keep_last=3)  # writes nothing if this step is saved already

    Args:
        root: folder on a file system that all ranks share, or a URL (``s3://bucket/run``); created if missing.
        state: newest state of the run. Several states by name (a GAN's two) become one step together, with the step number
            of the first.
        extra: objects that do not belong to the run, by name: objects with ``state_dict`` and ``load_state_dict``, or dicts,
            lists and tensors, which a load fills in place. They must be equal on all ranks, unless marked by
            ``dt.checkpoint.per_rank``. Tensors inside must not be sharded.
        mode: "sync" waits for the commit, "async" does not. "memory" copies the state into shared memory that ``dtrain launch``
            keeps when ranks die, instead of ``root``; a load from ``root`` finds the step there if it is the newest one. Memory
            holds one step, and the next one until it is complete.
        scope: "all" saves the whole state, "weights" parameters and buffers, "trainable" the trained parameters (an adapter).
            The last two take neither ``extra`` nor a root that holds whole states, because a run could not resume from such a
            step.
        dtype: dtype of the stored floating-point parameters. Loading them into parameters of another dtype has to be allowed.
        incremental: if True, parameters that are not trained get a file of their own, which is linked from the run's last step
            if unchanged.
        keep_last: number of the run's last steps that remain after the commit. The step that this process resumed from
            remains as well. None keeps all steps.
        keep_every: multiples of this number are kept as well.
        keep_steps: steps to keep as well.

    Returns:
        A handle, whose ``result()`` is the ``SaveResult``. A step that this process has committed or loaded already is not
        written again unless weights, buffers, the optimizer, a loader, a stateful object or ``extra`` have changed since.

    Mutates: ``state._run_context``; files. A step of the same run that this process did not write (after going back to an older
    step) is replaced. A folder at this step that is no valid checkpoint is moved aside with a warning.
    Collective: exchanges of JSON on the control group, and in the background thread on the background group; every rank must
    call it. Every rank writes its own shards; each replica of a shard writes a part of the tensors.
    Host sync: none for tensors on the CPU. On a GPU one per tensor in ``extra``, one for the digest of parameters that several
    ranks hold, one for such optimizer state, and one if the last save or load was of the same step. Other tensors on a GPU are
    copied to pinned memory in the order of the current stream; ``"async"`` does not wait for the copy.

    Raises:
        DesyncError: parameters or optimizer state that several ranks hold differ; see ``Step.init(replica_check_every=)``.
            No file has been touched.
        ConfigError: a value that is neither a tensor nor plain data (by its path), or that differs between ranks; an entry of
            ``extra`` that a load cannot put back; a loader in ``extra``; a loader of the last batches that the state lacks; a
            module whose state dict holds more than a checkpoint. No file has been touched.
        CheckpointError: the step exists and belongs to another run, another live job writes into ``root``, there is no space,
            or a file operation failed; the step is not committed. In ``"async"`` mode the handle raises it, or the next save
            (unless ``should_stop`` asked for this save, which comes first), or the end of ``init_dist``'s block.
        StepError: the model or the optimizer got a parameter after ``step.init``, or ``init_dist``'s block has ended. No file
            has been touched.
        StaleStateError: ``state`` was stepped already.
        PeerError: another rank failed.
    """
    options = SaveOptions(mode=mode, incremental=incremental, keep_last=keep_last, keep_every=keep_every, keep_steps=keep_steps)
    return start_save(root, state, extra or {}, scope, dtype, options)


def start_save(
    target: Checkpointer | AnyPath | str,
    state: TrainState | Mapping[str, TrainState],
    extra: Mapping[str, Any],
    scope: SaveScope,
    dtype: torch.dtype | None,
    options: SaveOptions,
) -> SaveHandle:
    """Save with a Checkpointer, or with the Checkpointer of a root and of the states' run. See ``save_sharded``."""
    started_at = time.monotonic()
    with spans.span("save"):
        with _on_all_ranks():
            states = _as_states(state)
            _check_savable(states, scope, options.mode, extra, dtype)
            options.check(_CALLER)
            if options.mode == "memory":
                target = memory_root(target.root if isinstance(target, Checkpointer) else storage.resolve_path(target), _CALLER)
            checkpointer = target if isinstance(target, Checkpointer) else checkpointer_of(target, states.values())
            shared, write_plan, facts = _plan_save(states, extra, scope, dtype, options)
            # A copy in memory is taken once a step, and in little time.
            marks = [] if options.mode == "memory" else [mark_state(state) for state in states.values()]
            facts["changed"] = list(map(has_changed, states.values(), marks))
        # The group of the leaders is made by the training thread.
        leaders = leader_group() if options.mode == "memory" else None
        total_bytes, entry_digests = _agree_on_contents(states, facts, shared, marks)
        if scope == "all":
            check_saved_state(list(states.values()), caller=_CALLER)
        save_thread().wait_for_slot(_MAX_IN_FLIGHT)
        with _on_all_ranks():
            first = next(iter(states.values()))
            key = content_key(states, scope, dtype, entry_digests)
            is_saved = first._run_context.lineage.roots[str(checkpointer.root)].steps.get(first.step) == key
            if is_saved:
                # Without a copy of the state the save must be waited for. It has nothing to write.
                options = replace(options, mode="sync")
            request = SaveRequest(
                root=checkpointer.root,
                acquire_lock=checkpointer._acquire_lock,
                lineages=[state._run_context.lineage for state in states.values()],
                options=options,
                manifest=_draft_manifest(states, scope),
                # The staged files reference the memory that is still needed, so the tensors may be freed.
                write_plan=replace(write_plan, tensors={}),
                staged=stage_files(write_plan.files, write_plan.tensors, checkpointer._staging, copy=options.mode == "async"),
                total_bytes=total_bytes,
                nodes=1 if leaders is None else len(leaders.ranks),
                content_key=key,
                info=get_dist_info(),
                # In the middle of a step the ranks have agreed to stop already, but the state is older.
                after_stop_agreed=scope == "all" and current_context().preemption.is_agreed() and first._step_counts is None,
                started_at=started_at,
            )
        task = _begin_save(request)
    if leaders is not None and not is_saved:
        copy = partial(_copy_to_next_node, checkpointer.root, request.step)
        save_thread().submit(f"the copy of step {request.step} on the next node", copy)
    # A copy in memory may be made at each step, and the ledger has no line per step.
    if not is_saved and options.mode != "memory":
        spans.record_event("save", step=request.step, blocked_s=time.monotonic() - started_at)
    path = checkpointer.root / layout.step_name(request.step)
    return SaveHandle(step=request.step, path=path, _task=task, _staged=request.staged)


def _begin_save(request: SaveRequest) -> SaveTask[SaveResult]:
    """Give a save to the thread of saves, and wait for the save unless it is asynchronous."""
    task = save_thread().submit(f"the save of step {request.step}", partial(run_save, request))
    if request.options.mode != "async":
        try:
            task.result()
        except BaseException:
            # The save writes the state's own memory, so an interrupt must cancel the save.
            task.cancelled = True
            task.wait()
            task.failure_reported = True
            raise
    return task


def _copy_to_next_node(root: AnyPath, step: int, task: SaveTask[None]) -> None:
    copy_to_next_node(root, step)


@contextmanager
def _on_all_ranks() -> Iterator[None]:
    """Run a block that fails on all ranks or on none. Without autograd, local shards are obtained faster."""
    with raise_on_all_ranks(_CALLER), gc_paused(), torch.no_grad():
        yield


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
            raise ConfigError(
                f"{_CALLER}: names of states must be strings, neither empty nor {tree_json.TAG!r}, got {name!r}. "
                f"Name the states as in {{'generator': g, 'discriminator': d}}."
            )
        if not isinstance(named_state, TrainState):
            raise ConfigError(
                f"{_CALLER}: {name} must be a TrainState, got {type(named_state).__name__}. "
                "Pass the state that the step returned."
            )
    return dict(state)


def _check_savable(states: States, scope: str, mode: str, extra: Mapping[str, Any], dtype: torch.dtype | None) -> None:
    for state in states.values():
        state._check_not_stale(_CALLER)
        check_block_open(state.spec, _CALLER)
        state._check_replicas_joined(_CALLER)
    if len({state._run_context.lineage.run_id for state in states.values()}) > 1:
        raise ConfigError(f"{_CALLER}: the states {list(states)} must belong to one run. Load them from one checkpoint.")
    check_choice(_CALLER, "scope", scope, get_args(SaveScope))
    if scope != "all" and mode == "memory":
        raise ConfigError(f"{_CALLER}: scope must be 'all' with mode='memory', got {scope!r}. Save the whole state.")
    if scope != "all" and extra:
        raise ConfigError(
            f"{_CALLER}: extra must be empty with scope={scope!r}, got {sorted(extra)}. Pass only one of the two."
        )
    if dtype is not None and (not dtype.is_floating_point or dtype not in layout.DTYPE_NAMES):
        raise ConfigError(f"{_CALLER}: dtype must be a floating-point dtype, got {dtype}. Pass torch.bfloat16, for example.")


def _plan_save(
    states: States, extra: Mapping[str, Any], scope: SaveScope, dtype: torch.dtype | None, options: SaveOptions
) -> tuple[dict[str, Any], RankWritePlan, dict[str, Any]]:
    """Collect the contents of the checkpoint, and plan the part that this rank writes.

    Returns:
        The values of the run, the plan, and the facts about this rank that the ranks compare before a save.

    Mutates: the record of the objects whose state was saved. ``early_stop`` must not change such objects any more in this step.
    """
    if scope == "all":
        check_loaders(states)
        check_stops(states, extra)
        warn_of_schedulers(states, extra)
    contents = collect_contents(states, extra, scope=scope, dtype=dtype)
    if scope == "all":
        values = [*extra.values(), *objects_of(states).values()]
        for state in states.values():
            state._run_context.lineage.saved_steps = {id(unwrap(value)): state.step for value in values}
    info = get_dist_info()
    write_plan = plan_rank_write(contents, info.rank, info.world_size, separate_frozen=options.incremental)
    hashes = content_hashes(contents)
    facts = {
        "hashes": hashes,
        "own": rank_hashes(contents),
        "entries": digest_entries(contents, hashes),
        # The file of frozen parameters may become a link, which needs no space.
        "bytes": write_plan.data_bytes if not options.incremental else next(iter(write_plan.files.values())).size,
        "replicas": sum(replica_check_of(state).digest(state) for state in states.values()),
        "failed": save_thread().has_unreported_failure,
    }
    return contents.shared, write_plan, facts


def _agree_on_contents(
    states: States, facts: dict[str, Any], shared: dict[str, Any], marks: Sequence[StateMark]
) -> tuple[int, list[str]]:
    """Check that contents and replicas are equal on all ranks and that no earlier save failed.

    Args:
        states: states by name.
        facts: facts about this rank.
        shared: values of the run.
        marks: marks of the states; none if the save does not compare them.

    Returns:
        The bytes of all ranks, and the digest of the entries of each rank.

    Mutates: ``shared``, in which the extra states of modules that differ between ranks are marked; the run context of the
        states, which counts the changes of any rank.
    Collective: one exchange of JSON on the control group, and one more if replicas differ.
    """
    facts_by_rank = cast(list[dict[str, Any]], all_gather_json(facts, caller=_CALLER))
    for index, (state, mark) in enumerate(zip(states.values(), marks, strict=False)):
        state._run_context.mark = mark
        state._run_context.changes += any(facts["changed"][index] for facts in facts_by_rank)
    failed = [rank for rank, facts in enumerate(facts_by_rank) if facts["failed"]]
    # After an agreed stop this save comes first; the end of the init_dist block raises the failure.
    if failed and not current_context().preemption.is_agreed():
        # A failed save fails on every rank, though not at the same time.
        save_thread().wait_all()
        raise PeerError(f"{_CALLER}: an earlier save failed on rank {failed[0]} and was not committed. Save again.")
    check_equal_on_all_ranks([facts["hashes"] for facts in facts_by_rank])
    mark_unequal_values(shared, [facts["own"] for facts in facts_by_rank])
    if sum(facts["replicas"] for facts in facts_by_rank):
        for state in states.values():
            raise_if_params_differ(state, _CALLER)
    return sum(facts["bytes"] for facts in facts_by_rank), [facts["entries"] for facts in facts_by_rank]


def _draft_manifest(states: States, scope: SaveScope) -> Manifest:
    """Return a manifest with the facts that are known before the commit."""
    first = next(iter(states.values()))
    mesh = first.spec.mesh
    return Manifest(
        run_id="",
        step=first.step,
        parent_step=None,
        serial=0,
        layout=MeshLayout(
            strategy=first.spec.strategy,
            axes=() if mesh is None else tuple(mesh.mesh_dim_names or ()),
            shape=() if mesh is None else tuple(mesh.shape),
        ),
        scope=scope,
        states=tuple(name for name in states if name),
        world_size=get_dist_info().world_size,
        bytes=0,
        index_bytes=0,
        index_sha256="",
    )


class Checkpointer:
    """Save and load steps under one root, with the same options each time.

    A Checkpointer owns the lock of the root, which excludes other jobs, and the host memory of asynchronous saves. Both are
    released by ``close``, at the end of the ``with`` block or of ``init_dist``'s block, or with the last reference. The next
    save takes them again. The identity of the run is in the state: saves of one run under several roots keep one run id.

        checkpoints = dt.Checkpointer("runs/gpt/ckpt", mode="async", keep_last=3)
        state = checkpoints.load(step.init(model, optimizer, loader=loader), missing_ok=True)
        for batch in loader.until("3ep"):
            state, metrics = step(state, batch)
            if state.crossed("1ep"):
                checkpoints.save(state)
        checkpoints.save(state)  # writes nothing if this step is saved already

    Args:
        root: folder on a file system that all ranks share, or a URL.
        mode: as in ``save_sharded``, like all further options.
        memory_every: ``keep`` copies the state into memory when the run crosses this duration, as ``"10ba"``; None for never.

    Raises:
        ConfigError: an invalid option.
    """

    @explain_arguments
    def __init__(
        self,
        root: AnyPath | str,
        *,
        mode: SaveMode = "sync",
        memory_every: Duration | int | str | None = None,
        incremental: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_steps: Collection[int] = (),
    ) -> None:
        self._memory_every = None if memory_every is None else Duration.parse(memory_every)
        # True after a copy in memory has failed, which the ranks do not try again.
        self._memory_failed = False
        # Options of the last ``load``, with which ``retry`` loads.
        self._load_options: dict[str, Any] = {}
        self.root = storage.resolve_path(root)
        self._options = SaveOptions(
            mode=mode, incremental=incremental, keep_last=keep_last, keep_every=keep_every, keep_steps=keep_steps
        )
        self._options.check("Checkpointer")
        self._staging = MemoryPool()
        self._lock: Lock | None = None
        process_instance(_OpenCheckpointers).members.add(self)

    def __repr__(self) -> str:
        return f"Checkpointer({str(self.root)!r})"

    @explain_arguments
    def save(
        self,
        state: TrainState | Mapping[str, TrainState],
        *,
        extra: Mapping[str, Any] | None = None,
        scope: SaveScope = "all",
        dtype: torch.dtype | None = None,
    ) -> SaveHandle:
        """Save ``state`` as one step under the root. See ``save_sharded``.

        handle = checkpoints.save(state)

        Collective: as ``save_sharded``; every rank must call it.
        """
        return start_save(self, state, extra or {}, scope, dtype, self._options)

    @explain_arguments
    def keep(
        self,
        state: TrainState | Mapping[str, TrainState],
        *,
        extra: Mapping[str, Any] | None = None,
    ) -> bool:
        """Copy ``state`` into memory if the run has crossed ``memory_every``, and return True then. Call it after each step.

        A restarted job loads this step instead of an older one on disk. Nothing happens where nobody keeps the memory of ranks
        that die: without ``dtrain launch``, and without ``memory_every``. If a copy fails, as when shared memory has no room
        for two copies of the state, a warning says so once, and the run goes on with its steps on disk. On several nodes the
        files of a node are also copied to the next node, while training continues.

        for batch in loader.until("3ep"):
            state, metrics = step(state, batch)
            checkpoints.keep(state)

        Collective: as ``save_sharded``, if it copies; every rank must call it.
        """
        first = state if isinstance(state, TrainState) else next(iter(state.values()))
        if self._memory_every is None or self._memory_failed or find_memory_root(self.root) is None:
            return False
        if not first.crossed(self._memory_every):
            return False
        try:
            start_save(self, state, extra or {}, "all", None, SaveOptions(mode="memory"))
        # A copy fails on all ranks or on none.
        except (CheckpointError, PeerError) as error:
            self._memory_failed = True
            if get_dist_info().rank == 0:
                reason = str(error).removeprefix(f"{_CALLER}: ")
                warn(f"Checkpointer.keep: going on without copies in memory: {reason}", RuntimeWarning)
            return False
        return True

    @explain_arguments
    def load(
        self,
        state: OneOrSeveral,
        *,
        extra: Mapping[str, Any] | None = None,
        scope: Literal["all", "weights"] = "all",
        ignore: Sequence[str] = (),
        allow_cast: bool = False,
        missing_ok: bool = False,
        on_corrupt: OnCorrupt = "raise",
    ) -> OneOrSeveral:
        """Load the newest step of the root into ``state``. See ``load_sharded``.

        state = checkpoints.load(state, missing_ok=True)
        """
        self._load_options = {"extra": extra, "on_corrupt": on_corrupt}
        return load_sharded(
            self.root, state, extra=extra, scope=scope, ignore=ignore, allow_cast=allow_cast,
            missing_ok=missing_ok, on_corrupt=on_corrupt,
        )  # fmt: skip

    def retry(self, train: Callable[[TrainState], T], state: TrainState) -> T:
        """Return ``train(state)``. If a rank is killed meanwhile, load the newest step on all ranks, and call ``train`` again.

        The ranks that stay keep their process, model and compiled code. A new process takes the place of the dead rank. This
        needs ``init_dist(survive=True)``, strategy ``"replicate"``, and a step that ``keep`` or ``save`` has committed. Where
        ranks cannot stay, ``train`` is called once, and ``dtrain launch`` starts all ranks again.

        def train(state):
            for batch in loader.until("3ep"):
                state, metrics = step(state, batch)
                checkpoints.keep(state)
            return state

        state = checkpoints.retry(train, state)

        Only the first call in a process lets ranks stay, because a new process cannot know in which call the others are.

        Args:
            train: function that trains from the state that it is given. It must begin each loop over the loader anew, and keep
                values that change in ``stateful``: others are not set back on the ranks that stay.
            state: state to start from.

        Collective: none without a death. After a death as ``init_dist`` and ``load``, on all ranks.

        Raises:
            CheckpointError: a rank has died before the first step was committed.
            DistError: the new rank did not arrive, or its setup differs.
        """
        check_state(state, "retry", "state = checkpoints.retry(train, state)")
        info, membership = current_context().info, current_context().membership
        if info is None or membership is None:
            return train(state)
        if reason := _why_none_stays(state, membership):
            if info.is_main:
                warn(f"retry: {reason}. All ranks start again when one dies.", RuntimeWarning)
            return train(state)
        if membership.is_joining:
            membership.in_setup = False
            state = self._rejoin(state, heartbeats.followed(), None)
        stays = reconfigure.end_setup(membership)
        try:
            while True:
                if stays:
                    heartbeats.report(heartbeats.ProgressKind.STAYS, 1)
                try:
                    return train(state)
                except Exception as error:
                    restarts = reconfigure.await_replacement(error, is_collective=is_collective_error(error))
                    if restarts is None:
                        raise
                    failure = error
                state = self._rejoin(state, restarts, failure)
                del failure
        finally:
            membership.is_over = True
            heartbeats.report(heartbeats.ProgressKind.STAYS, 0)

    def _rejoin(self, state: TrainState, restarts: int, error: Exception | None) -> TrainState:
        """Connect with the ranks of a restart, and return the newest step. ``error`` is None on a new rank."""
        before = state.restored
        if error is not None:
            leave_saves()
            self._staging = MemoryPool()
        rejoin(restarts, error)
        # A new rank has not seen a copy in memory fail.
        self._memory_failed = False
        state = self.load(state._as_newest(), **self._load_options)
        after = state.restored
        if before is not None and after is not None and before.ignored and before.path == after.path:
            raise CheckpointError(
                f"retry: the run must have committed a step of its own, got {after.path}, of which the first load ignored "
                f"{before.ignored[0]}. Call keep more often; all ranks start again."
            )
        state.drop_gradients()
        state._run_context.forget_first_steps()
        return state

    def close(self) -> None:
        """Wait for all saves of this process, and release the lock and the memory. The next save takes them again.

        Raises:
            CheckpointError, PeerError: a save has failed, and no caller has received the failure yet.
        """
        _close([self], None)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _close([self], error)

    def _acquire_lock(self, run_id: str, protected: Collection[int]) -> None:
        """Lock the root for a run, or check that this process still owns the lock.

        Raises:
            CheckpointError: another process has locked the root.
        """
        try:
            if self._lock is None:
                self._lock = lock_root(self.root, run_id, protected=protected)
            self._lock.check()
        except CheckpointError as error:
            raise CheckpointError(f"{_CALLER}: {error}") from None

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock, self._staging = None, MemoryPool()


def _why_none_stays(state: TrainState, membership: reconfigure.Membership) -> str:
    """Return the reason why no rank stays when another one dies; "" if they can."""
    if membership.is_over:
        return "only the first call in a process lets ranks stay"
    if state.spec.strategy != "replicate":
        return f"ranks stay with strategy 'replicate' only, got {state.spec.strategy!r}"
    if reconfigure.has_other_groups():
        return "there is a process group of several ranks beside the default group, which torch cannot connect anew"
    # A new rank would begin without what the setup has loaded into another run, such as a teacher.
    if any(run() is not state._run_context for run in membership.loaded):
        return "the setup has loaded a checkpoint into another state, which a new rank would lack"
    return ""


def checkpointer_of(root: AnyPath | str, states: Iterable[TrainState]) -> Checkpointer:
    """Return the Checkpointer of a root that the run of ``states`` uses, opened on the first call.

    Mutates: the run context of the states.
    """
    path = storage.resolve_path(root)
    contexts = [state._run_context for state in states]
    opened = (context.checkpointers[str(path)] for context in contexts if str(path) in context.checkpointers)
    checkpointer: Checkpointer = next(opened, None) or Checkpointer(path)
    for context in contexts:
        context.checkpointers[str(path)] = checkpointer
    return checkpointer


class _OpenCheckpointers:
    """Checkpointers of this process, which the end of ``init_dist``'s block closes."""

    def __init__(self) -> None:
        self.members: weakref.WeakSet[Checkpointer] = weakref.WeakSet()
        register_shutdown_hook("checkpoints", lambda error: _close(process_instance(_OpenCheckpointers).members, error))
        atexit.register(_at_exit, os.getpid())


def _close(checkpointers: Iterable[Checkpointer], error: BaseException | None) -> None:
    """Finish all saves of this process, and release the Checkpointers. ``error`` is the exception that leaves the block."""
    try:
        save_thread().wait_all()
    except Exception as failure:
        # Without an error of its own, the program would end as if all saves had succeeded.
        if error is None or isinstance(error, SystemExit):
            raise
        error.add_note(f"a save in the background failed, too: {failure}")
    finally:
        for checkpointer in list(checkpointers):
            checkpointer._release()


def _at_exit(pid: int) -> None:
    """Exit with an error code if the process ends with an unreported failure, and without ``init_dist``'s block."""
    if pid != os.getpid():
        return
    try:
        save_thread().wait_all()
    except Exception as failure:  # noqa: BLE001 - an exception of an exit handler does not change the exit code
        traceback.print_exception(failure)
        message = "dtrain: a save in the background failed, and the program ended without waiting for its result"
        print(message, file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)
