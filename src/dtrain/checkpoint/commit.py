"""Rank 0's part of a save: what is to be done about the step, and the rename that makes it a checkpoint.

Until the rename nothing under a step's name has changed, so whatever fails before it leaves the earlier steps as they were,
and what a killed save leaves behind is a side folder that no one reads and the run's next save removes.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dtrain import storage
from dtrain.checkpoint import layout
from dtrain.checkpoint.find import survey
from dtrain.checkpoint.layout import Manifest
from dtrain.checkpoint.retention import remove_leftovers
from dtrain.errors import CheckpointError
from dtrain.state import Shared

Action = Literal["write", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What rank 0 has decided about a save.

    Args:
        action: write the step, or leave it: this process has committed or loaded it.
        root: where, as rank 0 calls it.
        run_id: of the run.
        side: the folder to write into, beside the step's.
        serial: of the commit.
        replaces: whether the run has a step of this number, of a lineage that it has left.
        previous: the name of the run's newest step, whose files may serve again; None without one.
    """

    action: Action
    root: str
    run_id: str
    side: str
    serial: int
    replaces: bool
    previous: str | None


def prepare(root: Path, run: Sequence[Shared], step: int, only: tuple[str, ...], where: str) -> Order:
    """Look at the root, decide, and make the side folder.

    Args:
        root: as ``storage.real_path`` gives it.
        run: the run's place among checkpoints, once for each of its states.
        step: to be saved.
        only: what the save is limited to.
        where: begins messages.

    Mutates: files: moves aside what has the step's name and is no checkpoint, removes what killed saves of the run left.

    Raises:
        CheckpointError: the step belongs to another run, or the root holds steps of the other kind (whole or limited).
        OSError: the file system refuses.
    """
    order = _decide(root, run, step, only, where)
    if order.action == "write":
        storage.make_folders(root)
        remove_leftovers(root, order.run_id)
        storage.make_folder(root / order.side)
    return order


def _decide(root: Path, run: Sequence[Shared], step: int, only: tuple[str, ...], where: str) -> Order:
    committed, _ = survey(root)
    other = next((c for c in committed if c.only != only), None)
    if other is not None:
        held = f"saves with only={other.only}" if other.only else "whole states"
        raise CheckpointError(
            f"{where}: {root} holds {held} (step {other.step}), this save has only={only or None}; a run is resumed from its "
            "newest step, so save into another root"
        )
    run_id = run[0].run_id or secrets.token_hex(16)
    mine = [c for c in committed if c.run_id == run_id]
    order = Order(
        action="write",
        root=str(root),
        run_id=run_id,
        side=layout.side_name(step, "tmp", run_id, secrets.token_hex(4)),
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
    ours = step in run[0].committed.get(str(root), ())
    return replace(order, action="skip" if ours else "write", replaces=not ours)


def _move_aside(folder: Path, where: str) -> None:
    """Free a step's name from something that is no valid checkpoint, without destroying it."""
    if storage.exists(folder):
        aside = folder.with_name(f"{folder.name}.aside-{secrets.token_hex(4)}")
        storage.rename(folder, aside)
        warnings.warn(f"{where}: {folder} is not a valid checkpoint; it is now {aside.name}", stacklevel=2)


def publish(order: Order, manifest: Manifest) -> None:
    """Write the manifest and give the side folder the step's name, durably, or leave things as they were.

    Mutates: files.

    Raises:
        OSError: the file system refuses; nothing is published then.
    """
    root = Path(order.root)
    side, final = root / order.side, root / layout.step_name(manifest.step)
    storage.write_file(side / layout.MANIFEST, layout.encode_manifest(manifest))
    storage.sync_folder(side)
    superseded = root / layout.side_name(manifest.step, "old", order.run_id, secrets.token_hex(4))
    undo: list[tuple[Path, Path]] = []
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


def try_to_remove(folder: Path, where: str) -> None:
    """Remove a folder where possible; failing to is a warning."""
    try:
        if storage.exists(folder):
            storage.remove_folder(folder, first=layout.MANIFEST)
    except OSError as error:
        warnings.warn(f"{where}: could not remove {folder}: {error}", stacklevel=2)
