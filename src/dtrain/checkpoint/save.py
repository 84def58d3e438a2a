"""``save_sharded``: all ranks write into a side folder, agree, and rank 0 commits it by one rename.

Until the rename nothing under a step's name has changed, so whatever fails before it leaves the earlier steps as they were,
and what a killed save leaves behind is a side folder that no one reads and the run's next save removes.

What this process knows of its own commits is in ``state.shared``.
"""

from __future__ import annotations

import hashlib
import secrets
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, cast

from dtrain import pulse, storage
from dtrain.checkpoint import layout
from dtrain.checkpoint.agree import Agreed, decided_by_rank_0
from dtrain.checkpoint.contents import Contents, check_equal_on_ranks, collect
from dtrain.checkpoint.data_file import Box, place, write_data_file
from dtrain.checkpoint.find import Committed, survey
from dtrain.checkpoint.layout import Entry, Layout, Manifest, RankFiles, RankIndex
from dtrain.checkpoint.plan import choose_writers
from dtrain.checkpoint.retention import discard, plan_retention
from dtrain.dist import stopping
from dtrain.dist.collectives import all_gather_json
from dtrain.dist.init import current
from dtrain.errors import CheckpointError
from dtrain.state import TrainState
from dtrain.tensors import Extent, extent, is_distributed, local

_WHERE = "save_sharded"
_ADVICE = "; nothing was published and earlier steps are untouched: free space or repair the file system, then save again"
Action = Literal["write", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveHandle:
    """A committed step.

    Args:
        step: of the state.
        path: its folder.
        bytes: written by all ranks; 0 when the step was there already.
        written: False when this process had committed (or loaded) the step before, and nothing was done.
    """

    step: int
    path: Path
    bytes: int
    written: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What rank 0 has decided about a save."""

    action: Action
    root: str
    run_id: str
    side: str
    serial: int
    replaces: bool


def save_sharded(
    root: Path | str, state: TrainState, *, extra: Mapping[str, Any] | None = None, keep_last: int | None = None
) -> SaveHandle:
    """Save ``state`` as one step under ``root``. When it returns, the step is durable and verifiable on every rank.

    Args:
        root: a folder on a file system that all ranks share; made if missing.
        state: the newest state of the run.
        extra: by name, objects with ``state_dict()``, or plain data; tensors are allowed inside, sharded ones are not. The
            same on all ranks.
        keep_last: after the commit, remove all but this many of the run's last steps. The step that this process resumed
            from stays as well. None keeps all.

    Returns:
        The step, its folder, and how much was written. A step that this process has committed or loaded already is not
        written again.

    Mutates: ``state.shared`` (the run's place among checkpoints); files. A step of the same run that this process did not
    write (after going back to an older one) is replaced; a folder at this step that is no valid checkpoint is moved aside
    with a warning.
    Collective: exchanges of JSON on the control and the background group; every rank must call it. Every rank writes its
    own shards; of what several ranks hold, each writes a part.
    Host sync: tensors that are not on the CPU are copied, one at a time.

    Raises:
        ConfigError: something that is neither a tensor nor plain data (by its path), or that differs between ranks; before
            any file is touched.
        CheckpointError: the step exists and belongs to another run, or a file operation failed; nothing is published then.
        StaleStateError: ``state`` was stepped already.
        PeerError: another rank failed.
    """
    # In the middle of a step the ranks have agreed already, but the state is that before the step.
    since_agreed = stopping.agreed() and state.tally is None
    with Agreed(_WHERE):
        state.check_fresh(_WHERE)
        plan_retention([], keep_last)
        contents = collect(state, extra or {})
    check_equal_on_ranks(contents)
    order = _agree_on_order(root, state)
    state.shared.run_id = order.run_id
    folder = Path(order.root)
    final = folder / layout.step_name(state.step)
    if order.action == "skip":
        stopping.committed(since_agreed=since_agreed)
        return SaveHandle(step=state.step, path=final, bytes=0, written=False)
    try:
        files = _write_together(folder / order.side, contents, state.step)
        manifest = _commit_together(folder, order, state, files)
    except Exception:
        if current().rank == 0:
            _try_to_remove(folder / order.side)
        raise
    state.shared.committed.setdefault(order.root, set()).add(state.step)
    state.shared.parent_step = state.step
    stopping.committed(since_agreed=since_agreed)
    if current().rank == 0:
        pulse.report(pulse.Kind.COMMITTED, state.step)
        _clean_up(folder, state, keep_last)
    return SaveHandle(step=state.step, path=final, bytes=manifest.bytes, written=True)


def _agree_on_order(root: Path | str, state: TrainState) -> _Order:
    """Rank 0 looks at the root, decides, and makes the side folder; every rank gets the decision."""

    def prepare() -> dict[str, Any]:
        order = _decide(storage.real_path(root), state)
        if order.action == "write":
            storage.make_folders(Path(order.root))
            _remove_leftovers(Path(order.root), order.run_id)
            storage.make_folder(Path(order.root) / order.side)
        return asdict(order)

    return _Order(**cast(dict[str, Any], decided_by_rank_0(_WHERE, prepare, advice=_ADVICE)))


def _decide(root: Path, state: TrainState) -> _Order:
    """What to do about the step, given what the root holds. Moves aside what is in the way and no checkpoint."""
    committed, _ = survey(root)
    run_id = state.shared.run_id or secrets.token_hex(16)
    order = _Order(
        action="write",
        root=str(root),
        run_id=run_id,
        side=layout.side_name(state.step, "tmp", run_id, secrets.token_hex(4)),
        serial=1 + max((c.serial for c in committed), default=0),
        replaces=False,
    )
    there = next((c for c in committed if c.step == state.step), None)
    if there is None:
        _move_aside(root / layout.step_name(state.step))
        return order
    if there.run_id != run_id:
        raise CheckpointError(
            f"{_WHERE}: {there.path} belongs to run {there.run_id}, this run is {run_id}; save into another root, load that "
            "checkpoint to continue its run, or remove the folder"
        )
    ours = state.step in state.shared.committed.get(str(root), ())
    return replace(order, action="skip" if ours else "write", replaces=not ours)


def _move_aside(folder: Path) -> None:
    """Free a step's name from something that is no valid checkpoint, without destroying it."""
    if storage.exists(folder):
        aside = folder.with_name(f"{folder.name}.aside-{secrets.token_hex(4)}")
        storage.rename(folder, aside)
        warnings.warn(f"{_WHERE}: {folder} is not a valid checkpoint; it is now {aside.name}", stacklevel=5)


def _remove_leftovers(root: Path, run_id: str) -> None:
    """Remove what killed saves of this run left. Failing to is no reason not to save."""
    for name in storage.list_names(root):
        if layout.is_leftover(name, run_id):
            _try_to_remove(root / name)


def _try_to_remove(folder: Path) -> None:
    try:
        if storage.exists(folder):
            storage.remove_folder(folder, first=layout.MANIFEST)
    except OSError as error:
        warnings.warn(f"{_WHERE}: could not remove {folder}: {error}", stacklevel=4)


def _write_together(side: Path, contents: Contents, step: int) -> list[RankFiles]:
    """Every rank's files in the side folder, durable; what each wrote, by rank."""
    mine: RankFiles | None = None
    with Agreed(f"{_WHERE}: step {step}", group="background", advice=_ADVICE):
        mine = _write_rank(side, contents)
    everyone = all_gather_json(cast(Any, asdict(mine)), group="background")
    return [RankFiles(**cast(dict[str, Any], files)) for files in everyone]


def _write_rank(side: Path, contents: Contents) -> RankFiles:
    """This rank's data file and index."""
    info = current()
    data_path, index_path = side / layout.data_name(info.rank), side / layout.index_name(info.rank)
    boxes = _my_boxes(contents, info.rank, info.world_size)
    own = {key: extent(tensor) for key, tensor in contents.own.items()}
    tensors = {**{key: local(contents.tensors[key]) for key in boxes}, **contents.own}
    extents = {**boxes, **own}
    placed = place(Box(key=k, dtype=layout.DTYPE_NAMES[tensors[k].dtype], size=e.size) for k, e in extents.items())
    data_bytes, chunks = write_data_file(data_path, placed, tensors)
    entries = {box.key: _entry(box, extents[box.key], *placed.ranges[box.key]) for box in placed.boxes}
    index = RankIndex(
        rank=info.rank,
        boxes=tuple(entry for key, entry in entries.items() if key in boxes),
        own=tuple(entry for key, entry in entries.items() if key in own),
        chunks=chunks,
        values=contents.values,
        shared=contents.shared if info.rank == 0 else None,
    )
    data = layout.encode_index(index)
    storage.write_file(index_path, data)
    storage.sync_folder(side)
    return RankFiles(
        index=index_path.name,
        index_bytes=len(data),
        index_sha256=hashlib.sha256(data).hexdigest(),
        data=data_path.name,
        data_bytes=data_bytes,
    )


def _my_boxes(contents: Contents, rank: int, world_size: int) -> dict[str, Extent]:
    """The boxes that this rank stores: of each box that several ranks hold, one of them does; empty ones nobody."""
    extents = {}
    for key, tensor in contents.tensors.items():
        box = extent(tensor)
        # Of a plain tensor all ranks hold all.
        extents[key] = box if is_distributed(tensor) else replace(box, copy=rank, copies=world_size)
    sizes = {key: prod(box.shape) * contents.tensors[key].itemsize for key, box in extents.items()}
    writers = choose_writers((key, sizes[key], box.copies) for key, box in extents.items())
    return {key: box for key, box in extents.items() if writers[key] == box.copy and 0 not in box.size}


def _entry(box: Box, where: Extent, begin: int, end: int) -> Entry:
    return Entry(key=box.key, dtype=box.dtype, shape=where.shape, offset=where.offset, size=where.size, begin=begin, end=end)


def _commit_together(folder: Path, order: _Order, state: TrainState, files: list[RankFiles]) -> Manifest:
    """Rank 0 publishes the step; every rank returns when it is durable."""
    manifest = Manifest(
        run_id=order.run_id,
        step=state.step,
        parent_step=state.shared.parent_step,
        serial=order.serial,
        layout=_layout(state),
        ranks=tuple(files),
    )
    with Agreed(f"{_WHERE}: step {state.step}", group="background", advice=_ADVICE):
        if current().rank == 0:
            storage.write_file(folder / order.side / layout.MANIFEST, layout.encode_manifest(manifest))
            storage.sync_folder(folder / order.side)
            _publish(folder, order, state.step)
    return manifest


def _layout(state: TrainState) -> Layout:
    mesh = state.spec.mesh
    if mesh is None:
        return Layout(strategy=state.spec.strategy, axes=(), shape=())
    return Layout(strategy=state.spec.strategy, axes=tuple(mesh.mesh_dim_names or ()), shape=tuple(mesh.shape))


def _publish(folder: Path, order: _Order, step: int) -> None:
    """Give the side folder the step's name, durably, or leave things as they were."""
    side, final = folder / order.side, folder / layout.step_name(step)
    superseded = folder / layout.side_name(step, "old", order.run_id, secrets.token_hex(4))
    undo: list[tuple[Path, Path]] = []
    try:
        if order.replaces:
            storage.rename(final, superseded)
            undo.append((superseded, final))
        storage.rename(side, final)
        undo.append((final, side))
        storage.sync_folder(folder)
    except OSError:
        for now, before in reversed(undo):
            storage.rename(now, before)
        raise


def _clean_up(folder: Path, state: TrainState, keep_last: int | None) -> None:
    """Remove what the commit made superfluous. The step is durable: failing here is a warning."""
    run_id = state.shared.run_id
    assert run_id is not None, "a commit has a run id"
    try:
        _remove_leftovers(folder, run_id)
        committed = [c for c in survey(folder)[0] if c.run_id == run_id]
        for step in plan_retention([c.step for c in committed], keep_last, _protected(committed, state)):
            discard(folder / layout.step_name(step), step, run_id)
    except (OSError, CheckpointError) as error:
        warnings.warn(f"{_WHERE}: step {state.step} is committed, but older ones could not be removed: {error}", stacklevel=3)


def _protected(committed: list[Committed], state: TrainState) -> set[int]:
    """The step that this process resumed from, and the one just committed."""
    return {c.step for c in committed if c.step == state.step or str(c.path) == state.shared.resumed_from}
