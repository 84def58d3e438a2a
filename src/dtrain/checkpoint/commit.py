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
from dtrain.checkpoint.find import has_manifest, survey
from dtrain.checkpoint.layout import Manifest
from dtrain.checkpoint.lock import Lock, hold
from dtrain.checkpoint.retention import discard, remove_leftovers
from dtrain.errors import CheckpointError
from dtrain.shared import Shared
from dtrain.storage import Place

Action = Literal["write", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What rank 0 has decided about a save.

    Args:
        action: write the step, or leave it: this process has committed or loaded it.
        root: where, as rank 0 calls it.
        run_id: of the run.
        side: the folder to write into: one beside the step's, or where nothing can be renamed the step's own.
        serial: of the commit.
        replaces: whether the run has a step of this number, of a lineage that it has left, or that holds something else.
        previous: the name of the run's newest step, whose files may serve again; None without one.
    """

    action: Action
    root: str
    run_id: str
    side: str
    serial: int
    replaces: bool
    previous: str | None


def prepare(root: Place, run: Sequence[Shared], step: int, only: tuple[str, ...], holds: object, where: str) -> Order:
    """Look at the root, decide, and make the side folder.

    Args:
        root: as ``storage.real_path`` gives it.
        run: the run's place among checkpoints, once for each of its states.
        step: to be saved.
        only: what the save is limited to.
        holds: what the step will hold; see ``contents.identity``.
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
    keep_others_out(root, run, run_id, where)
    order = _decide(root, run, run_id, step, only, holds, where)
    if order.action == "write":
        storage.make_folders(root)
        remove_leftovers(root)
        if order.replaces and not storage.renames(root):
            discard(root / order.side, step, order.run_id)  # it is of a lineage that the run has left
        storage.make_folder(root / order.side)
    return order


def keep_others_out(root: Place, run: Sequence[Shared], run_id: str, where: str) -> None:
    """Hold the root for this run, or raise because somebody else does."""
    try:
        lock = run[0].locks.get(str(root))
        if not isinstance(lock, Lock):
            lock = run[0].locks[str(root)] = hold(root, run_id, protected=resumed_from(root, run))
        lock.check()
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None


def resumed_from(root: Place, run: Sequence[Shared]) -> set[int]:
    """The step of this root that the process has loaded, if any."""
    if run[0].resumed_from is None:
        return set()
    folder = storage.place(run[0].resumed_from)
    step = layout.step_of(folder.name) if folder.parent == root else None
    return set() if step is None else {step}


def _decide(
    root: Place, run: Sequence[Shared], run_id: str, step: int, only: tuple[str, ...], holds: object, where: str
) -> Order:
    committed, _ = survey(root)
    other = next((c for c in committed if c.only != only), None)
    if other is not None:
        held = f"saves with only={other.only}" if other.only else "whole states"
        raise CheckpointError(
            f"{where}: {root} holds {held} (step {other.step}), this save has only={only or None}; a run is resumed from its "
            "newest step, so save into another root"
        )
    mine = [c for c in committed if c.run_id == run_id]
    order = Order(
        action="write",
        root=str(root),
        run_id=run_id,
        side=layout.side_name(step, "tmp", run_id, secrets.token_hex(4)) if storage.renames(root) else layout.step_name(step),
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
    ours = run[0].committed.get(str(root), {}).get(step) == holds
    return replace(order, action="skip" if ours else "write", replaces=not ours)


def _move_aside(folder: Place, where: str) -> None:
    """Free a step's name from something that is no valid checkpoint, without destroying it."""
    if storage.exists(folder) and not storage.renames(folder):
        if has_manifest(folder):
            raise CheckpointError(f"{where}: {folder} is not a valid checkpoint, and cannot be moved aside there; remove it")
    elif storage.exists(folder):
        aside = folder.with_name(f"{folder.name}.aside-{secrets.token_hex(4)}")
        storage.rename(folder, aside)
        warnings.warn(f"{where}: {folder} is not a valid checkpoint; it is now {aside.name}", stacklevel=2)


def publish(order: Order, run: Sequence[Shared], manifest: Manifest, where: str) -> None:
    """Write the manifest and give the side folder the step's name, durably, or leave things as they were.

    Mutates: files.

    Raises:
        CheckpointError: the lock on the root was lost meanwhile.
        OSError: the file system refuses; nothing is published then.
    """
    root = storage.place(order.root)
    keep_others_out(root, run, order.run_id, where)  # writing may have taken longer than a lock lives without its holder
    side, final = root / order.side, root / layout.step_name(manifest.step)
    if not storage.renames(root):
        storage.create_file(final / layout.MANIFEST, layout.encode_manifest(manifest))  # all else is there already
        return
    storage.write_file(side / layout.MANIFEST, layout.encode_manifest(manifest))
    storage.sync_folder(side)
    superseded = root / layout.side_name(manifest.step, "old", order.run_id, secrets.token_hex(4))
    undo: list[tuple[Place, Place]] = []
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


def try_to_remove(folder: Place, where: str) -> None:
    """Remove a folder where possible; failing to is a warning."""
    try:
        if storage.exists(folder):
            storage.remove_folder(folder, first=layout.MANIFEST)
    except OSError as error:
        warnings.warn(f"{where}: could not remove {folder}: {error}", stacklevel=2)
