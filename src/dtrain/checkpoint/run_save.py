"""What the background thread of every rank does for a save: agree on an order, write, agree again, commit, clean up."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from dtrain import heartbeats, spans, storage
from dtrain.checkpoint import layout, rank_index
from dtrain.checkpoint.checkpoint_info import read_manifest_bytes
from dtrain.checkpoint.commit import SaveDecision, commit, prepare_save, remove_or_warn, resumed_steps
from dtrain.checkpoint.data_file import SerializedFile, VerifiedReader, chunk_digests, write_data_file
from dtrain.checkpoint.layout import Manifest, MeshLayout, RankFiles
from dtrain.checkpoint.retention import apply_retention, check_free_space
from dtrain.checkpoint.save_thread import SaveTask
from dtrain.checkpoint.write_plan import RankWritePlan, build_rank_index
from dtrain.dist import preemption
from dtrain.dist.collectives import all_gather_json
from dtrain.dist.init import DistInfo, get_dist_info
from dtrain.dist.rank_errors import RaiseOnAllRanks, broadcast_decision
from dtrain.errors import CheckpointError
from dtrain.run_context import RunContext
from dtrain.storage import AnyPath

WRITE_THREADS = 2  # that digest and write, on each rank: they wait for the disk most of the time, and more of them gain nothing
_ADVICE = "; nothing was published and earlier steps are untouched: free space or repair the file system, then save again"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """A committed step.

    Args:
        step: of the state.
        path: its folder.
        bytes: written by all ranks; 0 when the step was there already.
        written: False when this process had committed (or loaded) the step before, and nothing was done.
    """

    step: int
    path: AnyPath
    bytes: int
    written: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SaveRequest:
    """What the thread needs to know of a save; nothing of it changes while training goes on."""

    where: str
    root: AnyPath
    run: Sequence[RunContext]  # the place among checkpoints of each of the states
    step: int
    layout: MeshLayout
    only: tuple[str, ...]
    state_names: tuple[str, ...]
    write_plan: RankWritePlan
    files: Mapping[str, SerializedFile]
    total_bytes: int
    content_key: object
    info: DistInfo
    copy_events: Sequence[torch.cuda.Event]
    release_buffers: Callable[[], None]
    after_stop_agreed: bool
    incremental: bool
    keep_last: int | None
    keep_every: int | None
    keep_steps: Collection[int]
    started_at: float  # ``time.monotonic()`` when ``save_sharded`` was called


def run_save(save: SaveRequest, task: SaveTask[SaveResult]) -> SaveResult:
    """The save, in the background thread of every rank."""
    try:
        return _run(save, task)
    finally:
        save.release_buffers()


def _run(save: SaveRequest, task: SaveTask[SaveResult]) -> SaveResult:
    _check_groups_open(save)
    order = _decide_on_rank_0(save)
    for shared in save.run:
        shared.run_id = order.run_id
    root = storage.resolve_path(order.root)
    final = root / layout.step_name(save.step)
    if order.action == "skip":
        preemption.record_save(after_agreement=_is_resumable(save))
        return SaveResult(step=save.step, path=final, bytes=0, written=False)
    try:
        files = _write_on_all_ranks(order, save, task)
        manifest = _commit_on_all_ranks(order, save, files, task)
    except Exception:
        if save.info.rank == 0:
            remove_or_warn(root / order.staging_folder, save.where)
        raise
    for shared in save.run:
        shared.committed_steps.setdefault(order.root, {})[save.step] = save.content_key
    preemption.record_save(after_agreement=_is_resumable(save))
    if save.info.rank == 0:
        heartbeats.report(heartbeats.ProgressKind.COMMITTED, save.step)
        spans.record_event("committed", step=save.step, seconds=time.monotonic() - save.started_at, bytes=manifest.bytes)
        _clean_up(root, order.run_id, save)
    return SaveResult(step=save.step, path=final, bytes=manifest.bytes, written=True)


def _is_resumable(save: SaveRequest) -> bool:
    """Whether a run that was asked to stop can be resumed from this step."""
    return save.after_stop_agreed and not save.only


def _check_groups_open(save: SaveRequest) -> None:
    """Stop before a phase that would publish what is not whole.

    Without the groups this process seems to be the only rank, and would agree with itself.
    """
    if get_dist_info() is not save.info:
        raise CheckpointError(f"{save.where}: the process groups were closed while step {save.step} was being written")


def _decide_on_rank_0(save: SaveRequest) -> SaveDecision:
    """Rank 0 looks at the root, decides, and makes the side folder; every rank gets the decision."""

    def decide() -> dict[str, Any]:
        check_free_space(save.root, save.total_bytes)
        return asdict(prepare_save(save.root, save.run, save.step, save.only, save.content_key, save.where))

    decided = broadcast_decision(save.where, decide, group="background", advice=_ADVICE)
    return SaveDecision(**cast(dict[str, Any], decided))


def _write_on_all_ranks(order: SaveDecision, save: SaveRequest, task: SaveTask[SaveResult]) -> list[RankFiles]:
    """Every rank's files in the side folder, durable; what each wrote, by rank."""
    mine: RankFiles | None = None
    with RaiseOnAllRanks(f"{save.where}: step {save.step}", group="background", advice=_ADVICE):
        mine = _write_rank(order, save, task)
    everyone = all_gather_json(cast(Any, asdict(mine)), group="background")
    _check_groups_open(save)
    return [layout.parse_rank_files(files) for files in everyone]


def _write_rank(order: SaveDecision, save: SaveRequest, task: SaveTask[SaveResult]) -> RankFiles:
    """This rank's data files and index."""
    for event in save.copy_events:
        event.synchronize()
    root = storage.resolve_path(order.root)
    side, share = root / order.staging_folder, save.write_plan
    chunks = []
    for name, image in save.files.items():
        digests = chunk_digests(image) if _can_link(name, order, save) else None
        if digests is None or not _try_link(root / cast(str, order.previous), side, name, image.size, digests, share.rank):
            digests = write_data_file(side / name, image, threads=WRITE_THREADS, on_part=task.advance)
        chunks.append(digests)
    index = rank_index.encode_index(build_rank_index(share, chunks))
    storage.write_file(side / layout.index_name(share.rank), index)
    storage.sync_folder(side)
    return RankFiles(
        index=layout.index_name(share.rank),
        index_bytes=len(index),
        index_sha256=hashlib.sha256(index).hexdigest(),
        data=tuple(layout.DataFile(name=name, bytes=image.size) for name, image in save.files.items()),
    )


def _can_link(name: str, order: SaveDecision, save: SaveRequest) -> bool:
    return save.incremental and order.previous is not None and name == layout.data_name(save.write_plan.rank, frozen=True)


def _try_link(previous: AnyPath, side: AnyPath, name: str, size: int, digests: tuple[str, ...], rank: int) -> bool:
    """Link a file of an earlier step into this one where it has the very content; whether that was so, and possible.

    A step that is being removed, or a file system without links, is no reason not to save.
    """
    try:
        manifest = layout.parse_manifest(read_manifest_bytes(previous))
        files = manifest.ranks[rank] if rank < len(manifest.ranks) else None
        sizes = [] if files is None else [file.bytes for file in files.data]
        names = [] if files is None else [file.name for file in files.data]
        if files is None or name not in names or sizes[names.index(name)] != size:
            return False
        index = rank_index.parse_index(storage.read_file(previous / files.index, limit=files.index_bytes), rank, sizes)
        if index.chunks[names.index(name)] != digests:
            return False
        # What is linked is read once: else the damage of one file would be handed on from step to step.
        with storage.FileReader(previous / name) as file:
            if file.size != size:
                return False
            VerifiedReader(file, name, digests).verify(range(len(digests)))
        storage.link_file(previous / name, side / name)
    except (OSError, CheckpointError):
        return False
    return True


def _commit_on_all_ranks(
    order: SaveDecision, save: SaveRequest, files: list[RankFiles], task: SaveTask[SaveResult]
) -> Manifest:
    """Rank 0 publishes the step; every rank returns when it is durable."""
    manifest = Manifest(
        run_id=order.run_id,
        step=save.step,
        parent_step=_parent_step(order, save),
        serial=order.serial,
        layout=save.layout,
        only=save.only,
        states=save.state_names,
        ranks=tuple(files),
    )
    with RaiseOnAllRanks(f"{save.where}: step {save.step}", group="background", advice=_ADVICE):
        task.raise_if_cancelled()
        if save.info.rank == 0:
            commit(order, save.run, manifest, save.where)
    return manifest


def _parent_step(order: SaveDecision, save: SaveRequest) -> int | None:
    """The step of this root that the run committed or loaded last."""
    return next((step for step in reversed(save.run[0].committed_steps.get(order.root, {})) if step != save.step), None)


def _clean_up(root: AnyPath, run_id: str, save: SaveRequest) -> None:
    """Remove what the commit made superfluous. The step is durable: failing here is a warning."""
    protected = {save.step, *resumed_steps(root, save.run)}
    try:
        apply_retention(
            root, run_id, keep_last=save.keep_last, keep_every=save.keep_every, keep_steps=save.keep_steps, protected=protected
        )  # fmt: skip
    except (OSError, CheckpointError) as error:
        warnings.warn(
            f"{save.where}: step {save.step} is committed, but older ones could not be removed: {error}", stacklevel=2
        )
