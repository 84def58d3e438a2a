"""Rank 0's part of a save: what is to be done about the step, and what makes it a checkpoint.

On a file system that is a rename. Until then nothing under a step's name has changed, so whatever fails before it leaves the
earlier steps as they were, and what a killed save leaves behind is a side folder that no one reads and the run's next save
removes. An object store renames nothing: there it is the manifest, which is put last, and only if there is none.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dtrain import storage
from dtrain.checkpoint import layout
from dtrain.checkpoint.checkpoint_info import has_manifest, scan_root
from dtrain.checkpoint.layout import Manifest
from dtrain.checkpoint.lock import Lock, lock_root
from dtrain.checkpoint.retention import remove_leftovers, remove_step
from dtrain.errors import CheckpointError
from dtrain.run_context import RunContext
from dtrain.storage import AnyPath

Action = Literal["write", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDecision:
    """What rank 0 has decided about a save.

    Args:
        action: write the step, or leave it: this process has committed or loaded it.
        root: where, as rank 0 calls it.
        run_id: of the run.
        staging_folder: the folder to write into: one beside the step's, or where nothing can be renamed the step's own.
        serial: of the commit.
        replaces: whether the run has a step of this number, of a lineage that it has left, or that holds something else.
        previous: the name of the run's newest step, whose files may serve again; None without one.
    """

    action: Action
    root: str
    run_id: str
    staging_folder: str
    serial: int
    replaces: bool
    previous: str | None


def prepare_save(
    root: AnyPath, run: Sequence[RunContext], step: int, only: tuple[str, ...], content_key: object, where: str
) -> SaveDecision:
    """Look at the root, decide, and make the side folder.

    Args:
        root: as ``storage.real_path`` gives it.
        run: the run's place among checkpoints, once for each of its states.
        step: to be saved.
        only: what the save is limited to.
        content_key: what the step will hold; see ``contents.identity``.
        where: begins messages.

    Mutates: ``run`` (the lock on the root is kept there); files: moves aside what has the step's name and is no checkpoint,
    removes what killed saves of the run left.

    Raises:
        CheckpointError: the step belongs to another run, or the root holds steps of the other kind (whole or limited).
        OSError: the file system refuses.
    """
    if storage.exists(root) and not storage.is_folder(root):
        raise CheckpointError(f"{where}: {root} is not a directory; name the folder that steps are to be in")
    run_id = run[0].run_id or secrets.token_hex(16)
    acquire_lock(root, run, run_id, where)
    order = _decide(root, run, run_id, step, only, content_key, where)
    if order.action == "write":
        storage.make_folders(root)
        remove_leftovers(root)
        if order.replaces and not storage.supports_rename(root):
            remove_step(root / order.staging_folder, step, order.run_id)  # it is of a lineage that the run has left
        storage.make_folder(root / order.staging_folder)
    return order


def acquire_lock(root: AnyPath, run: Sequence[RunContext], run_id: str, where: str) -> None:
    """Hold the root for this run, or raise because somebody else does."""
    try:
        lock = run[0].locks.get(str(root))
        if not isinstance(lock, Lock):
            lock = run[0].locks[str(root)] = lock_root(root, run_id, protected=resumed_steps(root, run))
        lock.check()
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None


def resumed_steps(root: AnyPath, run: Sequence[RunContext]) -> set[int]:
    """The step of this root that the process has loaded, if any."""
    if run[0].resumed_from is None:
        return set()
    folder = storage.resolve_path(run[0].resumed_from)
    step = layout.step_of(folder.name) if folder.parent == root else None
    return set() if step is None else {step}


def _decide(
    root: AnyPath, run: Sequence[RunContext], run_id: str, step: int, only: tuple[str, ...], holds: object, where: str
) -> SaveDecision:
    committed, _ = scan_root(root)
    other = next((c for c in committed if c.only != only), None)
    if other is not None:
        held = f"saves with only={other.only}" if other.only else "whole states"
        raise CheckpointError(
            f"{where}: {root} holds {held} (step {other.step}), this save has only={only or None}; a run is resumed from its "
            "newest step, so save into another root"
        )
    mine = [c for c in committed if c.run_id == run_id]
    order = SaveDecision(
        action="write",
        root=str(root),
        run_id=run_id,
        staging_folder=layout.staging_name(step, "tmp", run_id, secrets.token_hex(4))
        if storage.supports_rename(root)
        else layout.step_name(step),
        serial=1 + max((c.serial for c in committed), default=0),
        replaces=False,
        previous=mine[-1].path.name if mine else None,
    )
    there = next((c for c in committed if c.step == step), None)
    if there is None:
        _move_aside(root / layout.step_name(step), where)
        return order
    if there.run_id != run_id:
        raise CheckpointError(
            f"{where}: {there.path} belongs to run {there.run_id}, this run is {run_id}; save into another root, load that "
            "checkpoint to continue its run, or remove the folder"
        )
    ours = run[0].committed_steps.get(str(root), {}).get(step) == holds
    return replace(order, action="skip" if ours else "write", replaces=not ours)


def _move_aside(folder: AnyPath, where: str) -> None:
    """Free a step's name from something that is no valid checkpoint, without destroying it."""
    if storage.exists(folder) and not storage.supports_rename(folder):
        if has_manifest(folder):
            raise CheckpointError(f"{where}: {folder} is not a valid checkpoint, and cannot be moved aside there; remove it")
    elif storage.exists(folder):
        aside = folder.with_name(f"{folder.name}.aside-{secrets.token_hex(4)}")
        storage.rename(folder, aside)
        warnings.warn(f"{where}: {folder} is not a valid checkpoint; it is now {aside.name}", stacklevel=2)


def commit(order: SaveDecision, run: Sequence[RunContext], manifest: Manifest, where: str) -> None:
    """Write the manifest and give the side folder the step's name, durably, or leave things as they were.

    Mutates: files.

    Raises:
        CheckpointError: the lock on the root was lost meanwhile.
        OSError: the file system refuses; nothing is published then.
    """
    root = storage.resolve_path(order.root)
    acquire_lock(root, run, order.run_id, where)  # writing may have taken longer than a lock lives without its holder
    side, final = root / order.staging_folder, root / layout.step_name(manifest.step)
    if not storage.supports_rename(root):
        storage.create_file(final / layout.MANIFEST, layout.encode_manifest(manifest))  # all else is there already
        return
    storage.write_file(side / layout.MANIFEST, layout.encode_manifest(manifest))
    storage.sync_folder(side)
    superseded = root / layout.staging_name(manifest.step, "old", order.run_id, secrets.token_hex(4))
    undo: list[tuple[AnyPath, AnyPath]] = []
    try:
        if order.replaces:
            storage.rename(final, superseded)
            undo.append((superseded, final))
        storage.rename(side, final)
        undo.append((final, side))
        storage.sync_folder(root)
    except OSError:
        for now, before in reversed(undo):
            storage.rename(now, before)
        raise


def remove_or_warn(folder: AnyPath, where: str) -> None:
    """Remove a folder where possible; failing to is a warning."""
    try:
        if storage.exists(folder):
            storage.remove_folder(folder, first=layout.MANIFEST)
    except OSError as error:
        warnings.warn(f"{where}: could not remove {folder}: {error}", stacklevel=2)
