"""What the background thread of every rank does for a save: agree on an order, write, agree again, commit, clean up."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from dtrain import pulse, spans, storage
from dtrain.checkpoint import layout, rank_index
from dtrain.checkpoint.agree import Agreed, decided_by_rank_0
from dtrain.checkpoint.background import Task
from dtrain.checkpoint.commit import Order, prepare, publish, resumed_from, try_to_remove
from dtrain.checkpoint.data_file import Image, digests_of, write_data_file
from dtrain.checkpoint.digest import VerifiedReader
from dtrain.checkpoint.find import read_manifest_bytes
from dtrain.checkpoint.layout import Layout, Manifest, RankFiles
from dtrain.checkpoint.retention import check_free, retain
from dtrain.checkpoint.share import Share, index_of
from dtrain.dist import stopping
from dtrain.dist.collectives import all_gather_json
from dtrain.dist.init import DistInfo, current
from dtrain.errors import CheckpointError
from dtrain.shared import Shared
from dtrain.storage import Place

THREADS = 2  # that digest and write, on each rank: they wait for the disk most of the time, and more of them gain nothing
_ADVICE = "; nothing was published and earlier steps are untouched: free space or repair the file system, then save again"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """A committed step.

    Args:
        step: of the state.
        path: its folder.
        bytes: written by all ranks; 0 when the step was there already.
        written: False when this process had committed (or loaded) the step before, and nothing was done.
    """

    step: int
    path: Place
    bytes: int
    written: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Save:
    """What the thread needs to know of a save; nothing of it changes while training goes on."""

    where: str
    root: Place
    run: Sequence[Shared]  # the place among checkpoints of each of the states
    step: int
    layout: Layout
    only: tuple[str, ...]
    names: tuple[str, ...]
    share: Share
    images: Mapping[str, Image]
    total_bytes: int
    holds: object
    info: DistInfo
    copied: Sequence[torch.cuda.Event]
    release: Callable[[], None]
    since_agreed: bool
    incremental: bool
    keep_last: int | None
    keep_every: int | None
    pinned: Collection[int]
    begun: float  # ``time.monotonic()`` when ``save_sharded`` was called


def carry_out(save: Save, task: Task[SavedStep]) -> SavedStep:
    """The save, in the background thread of every rank."""
    try:
        return _saved(save, task)
    finally:
        save.release()


def _saved(save: Save, task: Task[SavedStep]) -> SavedStep:
    _check_groups(save)
    order = _agree_on_order(save)
    for shared in save.run:
        shared.run_id = order.run_id
    root = storage.place(order.root)
    final = root / layout.step_name(save.step)
    if order.action == "skip":
        stopping.committed(since_agreed=_counts(save))
        return SavedStep(step=save.step, path=final, bytes=0, written=False)
    try:
        files = _write_together(order, save, task)
        manifest = _commit_together(order, save, files, task)
    except Exception:
        if save.info.rank == 0:
            try_to_remove(root / order.side, save.where)
        raise
    for shared in save.run:
        shared.committed.setdefault(order.root, {})[save.step] = save.holds
    stopping.committed(since_agreed=_counts(save))
    if save.info.rank == 0:
        pulse.report(pulse.Kind.COMMITTED, save.step)
        spans.event("committed", step=save.step, seconds=time.monotonic() - save.begun, bytes=manifest.bytes)
        _clean_up(root, order.run_id, save)
    return SavedStep(step=save.step, path=final, bytes=manifest.bytes, written=True)


def _counts(save: Save) -> bool:
    """Whether a run that was asked to stop can be resumed from this step."""
    return save.since_agreed and not save.only


def _check_groups(save: Save) -> None:
    """Stop before a phase that would publish what is not whole.

    Without the groups this process seems to be the only rank, and would agree with itself.
    """
    if current() is not save.info:
        raise CheckpointError(f"{save.where}: the process groups were closed while step {save.step} was being written")


def _agree_on_order(save: Save) -> Order:
    """Rank 0 looks at the root, decides, and makes the side folder; every rank gets the decision."""

    def decide() -> dict[str, Any]:
        check_free(save.root, save.total_bytes)
        return asdict(prepare(save.root, save.run, save.step, save.only, save.holds, save.where))

    decided = decided_by_rank_0(save.where, decide, group="background", advice=_ADVICE)
    return Order(**cast(dict[str, Any], decided))


def _write_together(order: Order, save: Save, task: Task[SavedStep]) -> list[RankFiles]:
    """Every rank's files in the side folder, durable; what each wrote, by rank."""
    mine: RankFiles | None = None
    with Agreed(f"{save.where}: step {save.step}", group="background", advice=_ADVICE):
        mine = _write_rank(order, save, task)
    everyone = all_gather_json(cast(Any, asdict(mine)), group="background")
    _check_groups(save)
    return [layout.rank_files(files) for files in everyone]


def _write_rank(order: Order, save: Save, task: Task[SavedStep]) -> RankFiles:
    """This rank's data files and index."""
    for event in save.copied:
        event.synchronize()
    root = storage.place(order.root)
    side, share = root / order.side, save.share
    chunks = []
    for name, image in save.images.items():
        digests = digests_of(image) if _may_be_linked(name, order, save) else None
        if digests is None or not _linked(root / cast(str, order.previous), side, name, image.size, digests, share.rank):
            digests = write_data_file(side / name, image, threads=THREADS, on_part=task.advance)
        chunks.append(digests)
    index = rank_index.encode_index(index_of(share, chunks))
    storage.write_file(side / layout.index_name(share.rank), index)
    storage.sync_folder(side)
    return RankFiles(
        index=layout.index_name(share.rank),
        index_bytes=len(index),
        index_sha256=hashlib.sha256(index).hexdigest(),
        data=tuple(layout.DataFile(name=name, bytes=image.size) for name, image in save.images.items()),
    )


def _may_be_linked(name: str, order: Order, save: Save) -> bool:
    return save.incremental and order.previous is not None and name == layout.data_name(save.share.rank, frozen=True)


def _linked(previous: Place, side: Place, name: str, size: int, digests: tuple[str, ...], rank: int) -> bool:
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


def _commit_together(order: Order, save: Save, files: list[RankFiles], task: Task[SavedStep]) -> Manifest:
    """Rank 0 publishes the step; every rank returns when it is durable."""
    manifest = Manifest(
        run_id=order.run_id,
        step=save.step,
        parent_step=_parent(order, save),
        serial=order.serial,
        layout=save.layout,
        only=save.only,
        states=save.names,
        ranks=tuple(files),
    )
    with Agreed(f"{save.where}: step {save.step}", group="background", advice=_ADVICE):
        task.check()
        if save.info.rank == 0:
            publish(order, save.run, manifest, save.where)
    return manifest


def _parent(order: Order, save: Save) -> int | None:
    """The step of this root that the run committed or loaded last."""
    return next((step for step in reversed(save.run[0].committed.get(order.root, {})) if step != save.step), None)


def _clean_up(root: Place, run_id: str, save: Save) -> None:
    """Remove what the commit made superfluous. The step is durable: failing here is a warning."""
    protected = {save.step, *resumed_from(root, save.run)}
    try:
        retain(
            root, run_id, keep_last=save.keep_last, keep_every=save.keep_every, pinned=save.pinned, protected=protected
        )  # fmt: skip
    except (OSError, CheckpointError) as error:
        warnings.warn(
            f"{save.where}: step {save.step} is committed, but older ones could not be removed: {error}", stacklevel=2
        )
