"""Prepare and commit a save on rank 0.

On a file system the commit is a rename. Until the rename nothing under the step's name has changed, so a failure leaves the
earlier steps unchanged. A killed save leaves a staging folder, which is never read and which the run's next save removes. An
object store has no rename: there the commit is the manifest, written last and only if there is none.
"""

from __future__ import annotations

import secrets
import warnings
from dataclasses import dataclass, replace
from typing import Literal

from dtrain import storage
from dtrain.checkpoint import layout
from dtrain.checkpoint.checkpoint_info import has_manifest, scan_root
from dtrain.checkpoint.checkpointer import Checkpointer
from dtrain.checkpoint.layout import Manifest, SaveScope
from dtrain.checkpoint.retention import remove_leftovers, remove_step
from dtrain.errors import CheckpointError
from dtrain.run_context import Lineage
from dtrain.storage import AnyPath

Action = Literal["write", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDecision:
    """Decision of rank 0 about a save.

    Args:
        action: "skip" if this process has committed or loaded the step already, else "write".
        root: root, as rank 0 names it.
        run_id: id of the run.
        staging_folder: folder to write into: a staging folder, or the step's folder if the storage has no rename.
        serial: number of the commit.
        replaces: if True, the run has a step of this number from an abandoned lineage or with other contents.
        previous: name of the run's newest step, whose files may be linked; None without one.
    """

    action: Action
    root: str
    run_id: str
    staging_folder: str
    serial: int
    replaces: bool
    previous: str | None


def prepare_save(
    checkpointer: Checkpointer, lineage: Lineage, step: int, what: SaveScope, content_key: object, caller: str
) -> SaveDecision:
    """Inspect the root, decide, and create the staging folder.

    Args:
        checkpointer: Checkpointer of the root.
        lineage: lineage of the run.
        step: step to save.
        what: scope of the save.
        content_key: key of the contents; see ``state_dict.content_key``.
        caller: prefix of messages.

    Mutates: ``checkpointer``, which keeps the lock on the root; files: a folder with the step's name that is no checkpoint is
    moved aside, and leftovers of killed saves of the run are removed.

    Raises:
        CheckpointError: the step belongs to another run, or the root holds steps of another scope (``what``).
        OSError: a failed file operation.
    """
    root = checkpointer.root
    if storage.exists(root) and not storage.is_folder(root):
        raise CheckpointError(f"{caller}: root must be a directory, got {root}. Name the folder for the steps.")
    run_id = lineage.run_id or secrets.token_hex(16)
    checkpointer.acquire_lock(run_id, resumed_steps(root, lineage), caller)
    decision = _decide(root, lineage, run_id, step, what, content_key, caller)
    if decision.action == "write":
        storage.make_folders(root)
        remove_leftovers(root)
        if decision.replaces and not storage.supports_rename(root):
            # Without rename, the step of the abandoned lineage must be removed before its name is used again.
            remove_step(root / decision.staging_folder, step, decision.run_id)
        storage.make_folder(root / decision.staging_folder)
    return decision


def resumed_steps(root: AnyPath, lineage: Lineage) -> set[int]:
    """Return the step of this root that the process has loaded, as a set of at most one."""
    if lineage.resumed_from is None:
        return set()
    folder = storage.resolve_path(lineage.resumed_from)
    step = layout.step_of(folder.name) if folder.parent == root else None
    return set() if step is None else {step}


def _decide(
    root: AnyPath, lineage: Lineage, run_id: str, step: int, what: SaveScope, content_key: object, caller: str
) -> SaveDecision:
    committed, _ = scan_root(root)
    other = next((c for c in committed if c.what != what), None)
    if other is not None:
        raise CheckpointError(
            f"{caller}: what must be {other.what!r} as in step {other.step} of {root}, got {what!r}. A run is resumed from its "
            "newest step. Save into another root."
        )
    own_steps = [c for c in committed if c.run_id == run_id]
    decision = SaveDecision(
        action="write",
        root=str(root),
        run_id=run_id,
        staging_folder=layout.staging_name(step, "tmp", run_id, secrets.token_hex(4))
        if storage.supports_rename(root)
        else layout.step_name(step),
        serial=1 + max((c.serial for c in committed), default=0),
        replaces=False,
        previous=own_steps[-1].path.name if own_steps else None,
    )
    existing = next((c for c in committed if c.step == step), None)
    if existing is None:
        _move_aside(root / layout.step_name(step), caller)
        return decision
    if existing.run_id != run_id:
        raise CheckpointError(
            f"{caller}: {existing.path} must belong to this run {run_id}, got run {existing.run_id}. Save into another root, "
            "load that checkpoint to continue its run, or remove the folder."
        )
    is_same = lineage.steps.get(str(root), {}).get(step) == content_key
    return replace(decision, action="skip" if is_same else "write", replaces=not is_same)


def _move_aside(folder: AnyPath, caller: str) -> None:
    """Rename a folder that has a step's name and is no valid checkpoint, without destroying the folder."""
    if storage.exists(folder) and not storage.supports_rename(folder):
        if has_manifest(folder):
            raise CheckpointError(
                f"{caller}: {folder} is not a valid checkpoint, and its storage cannot rename. Remove the folder."
            )
    elif storage.exists(folder):
        aside = folder.with_name(f"{folder.name}.aside-{secrets.token_hex(4)}")
        storage.rename(folder, aside)
        warnings.warn(f"{caller}: {folder} is not a valid checkpoint and was renamed to {aside.name}", stacklevel=2)


def commit(decision: SaveDecision, checkpointer: Checkpointer, lineage: Lineage, manifest: Manifest, caller: str) -> None:
    """Write the manifest and rename the staging folder to the step's name, durably. A failure changes nothing.

    Mutates: files.

    Raises:
        CheckpointError: the lock on the root was lost during the save.
        OSError: a failed file operation; the step is not committed.
    """
    root = storage.resolve_path(decision.root)
    # Writing may have taken longer than the lifetime of a lock without heartbeat.
    checkpointer.acquire_lock(decision.run_id, resumed_steps(root, lineage), caller)
    staging, final = root / decision.staging_folder, root / layout.step_name(manifest.step)
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


def remove_or_warn(folder: AnyPath, caller: str) -> None:
    """Remove a folder, and warn if the removal fails."""
    try:
        if storage.exists(folder):
            storage.remove_folder(folder, first=layout.MANIFEST)
    except OSError as error:
        warnings.warn(f"{caller}: could not remove {folder}: {error}", stacklevel=2)
