"""Run a save in the background thread of every rank: decide, write, commit, and remove old steps.

On a file system the commit is a rename. Until the rename nothing under the step's name has changed, so a failure leaves the
earlier steps unchanged. A killed save leaves a staging folder, which is never read and which the run's next save removes. An
object store has no rename: there the commit is the manifest, written last and only if there is none.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast, get_args

import msgspec

from dtrain import spans, storage
from dtrain.arguments import check_choice, warn
from dtrain.checkpoint import layout
from dtrain.checkpoint.checkpoint_info import scan_root
from dtrain.checkpoint.data_file import StagedFiles, digest_blocks, plan_blocks, write_data_file
from dtrain.checkpoint.layout import Blocks, Manifest
from dtrain.checkpoint.node_memory import check_free_memory, commit_on_nodes, prepare_node
from dtrain.checkpoint.retention import (
    RetentionRules,
    apply_retention,
    check_free_space,
    check_no_other_job,
    move_aside,
    remove_leftovers,
    remove_or_warn,
    remove_step,
    resumed_steps,
)
from dtrain.checkpoint.save_thread import SaveTask
from dtrain.checkpoint.write_plan import INLINE, RankWritePlan, link_frozen_file, write_rank_index, write_run_index
from dtrain.dist.collectives import broadcast_decision, broadcast_json, gather_json, raise_on_all_ranks
from dtrain.dist.context import current_context
from dtrain.dist.init import DistInfo, get_dist_info
from dtrain.errors import CheckpointError, ConfigError
from dtrain.launch import heartbeats
from dtrain.run_context import Commit, Lineage
from dtrain.storage import AnyPath

_CALLER = "save_sharded"
# Threads per rank. They wait for the disk most of the time, so more threads gain nothing.
WRITE_THREADS = 2
_ADVICE = ". The step was not committed and earlier steps are unchanged. Free space or repair the file system, then save again."

SaveMode = Literal["sync", "async", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions(RetentionRules):
    """Options of a save that do not change its contents; see ``save_sharded``."""

    mode: SaveMode = "sync"
    incremental: bool = False

    def check(self, caller: str) -> None:
        """Raise ConfigError if an option is invalid."""
        check_choice(caller, "mode", self.mode, get_args(SaveMode))
        RetentionRules.check(self, caller)
        given = [name for name in ("incremental", "keep_last", "keep_every", "keep_steps") if getattr(self, name)]
        if self.mode == "memory" and given:
            raise ConfigError(
                f"{caller}: {given[0]} must not be set with mode='memory', got {getattr(self, given[0])}. Leave it out: memory "
                "holds one step, and the next one until it is complete."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """Result of a save.

    Args:
        step: step of the state.
        path: folder of the step.
        bytes: bytes written by all ranks; 0 if the step was not written.
        written: False if this process had committed or loaded the step before, and nothing has changed since.
    """

    step: int
    path: AnyPath
    bytes: int
    written: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SaveRequest:
    """Inputs of a save in the background thread. They do not change while training continues.

    Args:
        root: folder of steps.
        acquire_lock: function that locks the root for a run and protects steps, or raises if another process has the lock.
        lineages: lineage of each state's run.
        options: options of the save.
        manifest: facts about the states; the commit fills in the run, its commits and the index.
        write_plan: part of this rank, without tensors.
        staged: contents of the rank's files in memory.
        total_bytes: bytes that the ranks write in all.
        nodes: number of nodes whose memory holds the step together; 1 if one folder holds it.
        content_key: key of the contents.
        info: ranks at the call.
        after_stop_agreed: True if a run that was asked to stop can resume from this step.
        started_at: ``time.monotonic()`` at the call of ``save_sharded``.
    """

    root: AnyPath
    acquire_lock: Callable[[str, Collection[int]], None]
    lineages: Sequence[Lineage]
    options: SaveOptions
    manifest: Manifest
    write_plan: RankWritePlan
    staged: StagedFiles
    total_bytes: int
    nodes: int
    content_key: object
    info: DistInfo
    after_stop_agreed: bool
    started_at: float

    @property
    def step(self) -> int:
        """Step of the states."""
        return self.manifest.step

    @property
    def bytes_in_memory(self) -> int:
        """Bytes of the step in the memory of one node: the files of its ranks, and a copy of those of another node."""
        return -(-self.total_bytes * min(2, self.nodes) // self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDecision:
    """Decision of rank 0 about a save.

    Args:
        action: "skip" if this process has committed or loaded the same contents already, else "write".
        root: root, as rank 0 names it.
        run_id: id of the run.
        staging_folder: folder to write into: a staging folder, or the step's folder if the storage has no rename.
        serial: number of the commit.
        replaces: if True, the run has a step of this number from an abandoned lineage or with other contents.
        previous: name of the run's newest step, whose files may be linked; None without one.
    """

    action: Literal["write", "skip"]
    root: str
    run_id: str
    staging_folder: str
    serial: int
    replaces: bool
    previous: str | None

    @property
    def staging(self) -> AnyPath:
        """Path of the folder to write into."""
        return storage.resolve_path(self.root) / self.staging_folder


def run_save(save: SaveRequest, task: SaveTask[SaveResult]) -> SaveResult:
    """Run a save in the background thread, and release its buffers."""
    try:
        _check_groups_open(save)
        values = broadcast_decision(_CALLER, lambda: asdict(prepare_save(save)), group="background", advice=_ADVICE)
        decision = SaveDecision(**cast(dict[str, Any], values))
        if save.nodes > 1:
            decision = replace(decision, root=str(save.root))
            _prepare_nodes(decision, save)
        for lineage in save.lineages:
            lineage.run_id = decision.run_id
        root = storage.resolve_path(decision.root)
        result = SaveResult(step=save.step, path=root / layout.step_name(save.step), bytes=0, written=False)
        if decision.action == "write":
            try:
                result = replace(result, bytes=_write_and_commit(decision, save, task), written=True)
            except Exception:
                if save.info.rank == 0:
                    remove_or_warn(decision.staging, _CALLER)
                raise
            if save.nodes > 1:
                commit_on_nodes(decision.staging, result.path)
            for lineage in save.lineages:
                lineage.roots[decision.root].steps[save.step] = save.content_key
        current_context().preemption.record_save(after_agreement=save.after_stop_agreed)
        # Each node has a launcher, which counts restarts without a new checkpoint.
        if save.info.local_rank == 0 and result.written:
            heartbeats.report(heartbeats.ProgressKind.COMMITTED, save.step)
        if save.info.rank == 0:
            if result.written and save.options.mode != "memory":
                seconds = time.monotonic() - save.started_at
                spans.record_event("committed", step=save.step, seconds=seconds, bytes=result.bytes)
            # On several nodes the step before is needed until the copy on other nodes is complete.
            if save.nodes == 1:
                _remove_old_steps(root, decision.run_id, save)
        return result
    finally:
        save.staged.release()


def _prepare_nodes(decision: SaveDecision, save: SaveRequest) -> None:
    """Prepare the memory of all nodes after that of rank 0."""
    with raise_on_all_ranks(_CALLER, group="background", advice=_ADVICE):
        if decision.action == "write" and save.info.local_rank == 0 and save.info.rank != 0:
            prepare_node(save.root, decision.staging, save.bytes_in_memory)


def _check_groups_open(save: SaveRequest) -> None:
    """Raise if the process groups were closed, before an incomplete step is committed.

    Without process groups this process would appear to be the only rank.
    """
    if get_dist_info() is not save.info:
        raise CheckpointError(
            f"{_CALLER}: the process groups were closed during the save of step {save.step}. "
            "Call save_sharded inside of `with dt.init_dist()`."
        )


def prepare_save(save: SaveRequest) -> SaveDecision:
    """Inspect the root, decide, and create the staging folder.

    Mutates: the lock on the root, which the Checkpointer keeps; files: a folder with the step's name that is no checkpoint is
    moved aside, and leftovers of killed saves of the run are removed.

    Raises:
        CheckpointError: the step belongs to another run, or the root holds steps of another scope (``scope``), or has
            no space for the step.
        OSError: a failed file operation.
    """
    root, lineages = save.root, save.lineages
    if storage.exists(root) and not storage.is_folder(root):
        raise CheckpointError(f"{_CALLER}: root must be a directory, got {root}. Name the folder for the steps.")
    run_id = lineages[0].run_id or secrets.token_hex(16)
    save.acquire_lock(run_id, resumed_steps(root, lineages[0]))
    decision = _decide(save, run_id)
    if decision.action == "write":
        if save.options.mode == "memory":
            check_free_memory(root, save.bytes_in_memory)
        else:
            check_free_space(root, save.total_bytes, caller=_CALLER)
        storage.make_folders(root)
        remove_leftovers(root)
        if decision.replaces and not storage.supports_rename(root):
            # Without rename, the step of the abandoned lineage must be removed before its name is used again.
            remove_step(root / decision.staging_folder, save.step, decision.run_id)
        storage.make_folder(root / decision.staging_folder)
    return decision


def _decide(save: SaveRequest, run_id: str) -> SaveDecision:
    """Compare the save with the steps of its root."""
    root, step, scope = save.root, save.step, save.manifest.scope
    committed = scan_root(root).committed
    check_no_other_job(root, committed, save.lineages, run_id)
    other = next((info for info in committed if info.scope != scope), None)
    if other is not None:
        raise CheckpointError(
            f"{_CALLER}: scope must be {other.scope!r} as in step {other.step} of {root}, got {scope!r}. A run is resumed from "
            "its newest step. Save into another root."
        )
    own_steps = [info for info in committed if info.run_id == run_id]
    decision = SaveDecision(
        action="write",
        root=str(root),
        run_id=run_id,
        staging_folder=layout.staging_name(step, "tmp", run_id, secrets.token_hex(4))
        if storage.supports_rename(root)
        else layout.step_name(step),
        serial=1 + max((info.serial for info in committed), default=0),
        replaces=False,
        previous=own_steps[-1].path.name if own_steps else None,
    )
    existing = next((info for info in committed if info.step == step), None)
    if existing is None:
        move_aside(root / layout.step_name(step), _CALLER)
        return decision
    if existing.run_id != run_id:
        raise CheckpointError(
            f"{_CALLER}: {existing.path} must belong to this run {run_id}, got run {existing.run_id}. Save into another root, "
            "load that checkpoint to continue its run, or remove the folder."
        )
    is_same = save.lineages[0].roots[str(root)].steps.get(step) == save.content_key
    return replace(decision, action="skip" if is_same else "write", replaces=not is_same)


def _write_and_commit(decision: SaveDecision, save: SaveRequest, task: SaveTask[SaveResult]) -> int:
    """Write every rank's files durably, and commit the step on rank 0. Return the bytes of all files."""
    report: list[Any] = []
    total_bytes = 0
    with _agree_on_failures(decision, save):
        report = _write_rank(decision, save, task)
    reports = gather_json(report, group="background", caller=_CALLER)
    _check_groups_open(save)
    with _agree_on_failures(decision, save):
        task.raise_if_cancelled()
        if reports is not None:
            steps = save.lineages[0].roots[decision.root].steps
            draft = msgspec.structs.replace(
                save.manifest,
                run_id=decision.run_id,
                # The step of this root that the run committed or loaded last.
                parent_step=next((step for step in reversed(steps) if step != save.step), None),
                serial=decision.serial,
            )
            inline = save.staged.files.get(INLINE)
            manifest = write_run_index(decision.staging, save.write_plan, inline, reports, draft)
            for lineage in save.lineages:
                # Before the commit, whose reply may be lost.
                lineage.roots[decision.root].newest = Commit(decision.serial, save.step, decision.run_id)
            commit(decision, save, manifest)
            total_bytes = manifest.bytes
    return cast(int, broadcast_json(total_bytes, group="background", caller=_CALLER))


@contextmanager
def _agree_on_failures(decision: SaveDecision, save: SaveRequest) -> Iterator[None]:
    """Raise on all ranks if one rank fails, with the cause if the folder of the save was removed during the save."""
    with raise_on_all_ranks(f"{_CALLER}: step {save.step}", group="background", advice=_ADVICE):
        try:
            yield
        except FileNotFoundError:
            if storage.exists(decision.staging):
                raise
            raise CheckpointError(
                f"{_CALLER}: step {save.step}: {decision.staging} must exist until the end of the save, but was removed. The "
                "step was not committed. Save again: the next save creates missing folders."
            ) from None


def _write_rank(decision: SaveDecision, save: SaveRequest, task: SaveTask[SaveResult]) -> list[Any]:
    """Write this rank's data files and index. Return the report of ``write_rank_index``."""
    save.staged.wait()
    staging, plan = decision.staging, save.write_plan
    blocks: list[Blocks] = []
    frozen_name = layout.data_name(plan.rank, frozen=True)
    for name, serialized in save.staged.files.items():
        if name == INLINE:
            continue
        ends = plan_blocks(plan.files[name])
        linked = None
        if decision.previous is not None and save.options.incremental and name == frozen_name:
            digested = digest_blocks(serialized, ends)
            linked = digested if link_frozen_file(staging.parent / decision.previous, staging, digested, plan.rank) else None
        blocks.append(linked or write_data_file(staging / name, serialized, ends, threads=WRITE_THREADS, on_part=task.advance))
    report = write_rank_index(staging, plan, blocks)
    storage.sync_folder(staging)
    return report


def commit(decision: SaveDecision, save: SaveRequest, manifest: Manifest) -> None:
    """Write the manifest and rename the staging folder to the step's name, durably. A failure changes nothing.

    Mutates: files.

    Raises:
        CheckpointError: the lock on the root was lost during the save.
        OSError: a failed file operation; the step is not committed.
    """
    root = storage.resolve_path(decision.root)
    # Writing may have taken longer than the lifetime of a lock without heartbeat.
    save.acquire_lock(decision.run_id, resumed_steps(root, save.lineages[0]))
    staging, final = decision.staging, root / layout.step_name(manifest.step)
    if not storage.supports_rename(root):
        # All other files of the step have been written to their final names.
        storage.create_file(final / layout.MANIFEST, layout.encode_manifest(manifest))
        return
    storage.write_file(staging / layout.MANIFEST, layout.encode_manifest(manifest))
    storage.sync_folder(staging)
    superseded = root / layout.staging_name(manifest.step, "old", decision.run_id, secrets.token_hex(4))
    undo: list[tuple[AnyPath, AnyPath]] = []
    try:
        if decision.replaces:
            storage.rename(final, superseded)
            undo.append((superseded, final))
        storage.rename(staging, final)
        undo.append((final, staging))
        storage.sync_folder(root)
    except OSError:
        for now, before in reversed(undo):
            storage.rename(now, before)
        raise


def _remove_old_steps(root: AnyPath, run_id: str, save: SaveRequest) -> None:
    """Remove steps that the commit made superfluous. The step is durable, so a failure is a warning."""
    lineage = save.lineages[0]
    history = lineage.roots[str(root)]
    is_memory = save.options.mode == "memory"
    protected = {save.step} if is_memory else {save.step, *resumed_steps(root, lineage), *history.unknown_steps}
    try:
        rules = RetentionRules(keep_last=1) if is_memory else save.options
        apply_retention(root, run_id, rules, protected=protected, newest=history.newest)
    except (OSError, CheckpointError) as error:
        warn(
            f"{_CALLER}: step {save.step} is committed, but older steps could not be removed: {error}. "
            "Check the permissions of the folder."
        )
