"""List the checkpoints of a root from the manifests in its step folders. No other file is read."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from dtrain import storage
from dtrain.checkpoint import layout
from dtrain.errors import CheckpointError, CorruptCheckpointError
from dtrain.storage import AnyPath


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """Committed step, as its manifest describes the step.

    Args:
        step: step of the state.
        path: folder of the step.
        run_id: id of the run that wrote the step.
        parent_step: step that the run had loaded or committed before; None for the first step of the run.
        serial: number of the commit in its root.
        world_size: number of ranks that wrote the step.
        bytes: total size of the ranks' files in bytes.
        what: scope of the save: "all", "weights" or "trainable".
    """

    step: int
    path: AnyPath
    run_id: str
    parent_step: int | None
    serial: int
    world_size: int
    bytes: int
    what: layout.SaveScope = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptStep:
    """Folder with a corrupt manifest."""

    step: int
    path: AnyPath
    reason: str


def has_manifest(folder: AnyPath) -> bool:
    """Return True if the folder has a manifest."""
    return storage.exists(folder / layout.MANIFEST)


def read_manifest(folder: AnyPath) -> layout.Manifest:
    """Read the manifest of a step's folder.

    Raises:
        CorruptCheckpointError: a manifest that is missing or was changed.
        CheckpointError: a manifest of another format version.
    """
    return layout.parse_manifest(read_manifest_bytes(folder))


def read_manifest_bytes(folder: AnyPath) -> bytes:
    """Read the bytes of ``manifest.json``.

    Raises:
        CorruptCheckpointError: a missing file.
    """
    path = folder / layout.MANIFEST
    try:
        return storage.read_file(path, limit=layout.MAX_MANIFEST_BYTES)
    except OSError:
        if storage.file_size(path) is None:
            raise CorruptCheckpointError(f"{layout.MANIFEST}: must be a file") from None
        raise


def scan_root(root: AnyPath) -> tuple[list[CheckpointInfo], list[CorruptStep]]:
    """Return all steps with a valid manifest, in the order of their commits, and all steps with a corrupt manifest, by step.

    Raises:
        CheckpointError: a step of another format version.
        OSError: an unreadable root. A missing root has no steps.
    """
    committed, corrupt = [], []
    try:
        names = storage.list_names(root)
    except FileNotFoundError:
        names = []
    for name in names:
        step = layout.step_of(name)
        if step is None:
            continue
        try:
            committed.append(read_info(root / name, step))
        except CorruptCheckpointError as error:
            # A folder without a manifest is an incomplete save.
            if not has_manifest(root / name):
                continue
            corrupt.append(CorruptStep(step=step, path=root / name, reason=str(error)))
        except CheckpointError as error:
            raise CheckpointError(f"{root / name}: {error}") from None
    return sorted(committed, key=lambda c: (c.serial, c.step)), sorted(corrupt, key=lambda d: d.step)


def read_info(folder: AnyPath, step: int | None = None) -> CheckpointInfo:
    """Read the manifest of a folder, and check that its step is ``step`` unless None."""
    manifest = read_manifest(folder)
    if step is not None and manifest.step != step:
        raise CorruptCheckpointError(f"{layout.MANIFEST}: step must be {step} as in the folder's name, got {manifest.step}")
    return CheckpointInfo(
        step=manifest.step,
        path=folder,
        run_id=manifest.run_id,
        parent_step=manifest.parent_step,
        serial=manifest.serial,
        world_size=manifest.world_size,
        bytes=manifest.bytes,
        what=manifest.what,
    )


def list_steps(root: Path | str) -> list[CheckpointInfo]:
    """List the committed steps of a root in the order of their commits. The list is empty if there are none.

    Steps with a corrupt manifest are skipped with a warning. Files are not verified; see ``verify``.

        for info in dt.checkpoint.list_steps("runs/gpt/ckpt"):
            print(info.step, info.path, info.bytes)

    Raises:
        CheckpointError: a root that cannot be read, or a step of another format version.
    """
    try:
        committed, corrupt = scan_root(storage.resolve_path(root))
    except OSError as error:
        raise CheckpointError(f"list_steps: {error}") from error
    for bad in corrupt:
        warnings.warn(
            f"list_steps: {bad.path} is corrupt and skipped: {bad.reason}. "
            "Run `dtrain checkpoints verify` on its folder, then restore or remove this step.",
            stacklevel=2,
        )
    return committed


def latest_checkpoint(root: Path | str) -> AnyPath | None:
    """Return the folder of the step of a root that was committed last, or None if there is none.

    After a run went back to an older step, this is not the highest step. For the folder of a step, its path is returned.

        path = dt.latest_checkpoint("runs/gpt/ckpt")
        if path is not None:
            state = dt.load_sharded(path, state, extra={"loader": loader}).state

    Raises:
        CheckpointError: as ``list_steps``; or the folder of a step whose save was not completed.
        CorruptCheckpointError: the folder of a step with a corrupt manifest.
    """
    try:
        step = as_step_folder(storage.resolve_path(root), "latest_checkpoint")
        if step is not None:
            read_info(step, layout.step_of(step.name))
            return step
    except OSError as error:
        raise CheckpointError(f"latest_checkpoint: {error}") from error
    except CheckpointError as error:
        raise type(error)(f"latest_checkpoint: {root}: {error}") from None
    committed = list_steps(root)
    return committed[-1].path if committed else None


def as_step_folder(path: AnyPath, caller: str) -> AnyPath | None:
    """Return ``path`` if the path is the folder of a step, or None for a root or a missing folder.

    Raises:
        CheckpointError: a step's folder without a manifest.
    """
    if has_manifest(path):
        return path
    if layout.step_of(path.name) is not None and storage.is_folder(path):
        raise CheckpointError(
            f"{caller}: {path} has no {layout.MANIFEST}, because its save was not completed. Load another step."
        )
    return None


def choose_step(path: AnyPath, caller: str) -> AnyPath | None:
    """Return the step that a path names: the folder of a step, or the newest step of a root; None for an empty root.

    A step with a corrupt manifest may be the newest and is then returned, so that verification refuses the step.

    Raises:
        CheckpointError: a step's folder without a manifest.
    """
    step = as_step_folder(path, caller)
    if step is not None:
        return step
    committed, corrupt = scan_root(path)
    newest: CheckpointInfo | CorruptStep | None = committed[-1] if committed else None
    if corrupt and (newest is None or corrupt[-1].step > newest.step):
        newest = corrupt[-1]
    return newest.path if newest else None


def skipped_steps(root: AnyPath, folder: AnyPath) -> dict[str, str]:
    """Return the reasons why folders that look newer than ``folder`` are not loaded, by folder name."""
    step = layout.step_of(folder.name)
    newer = []
    for name in storage.list_names(root):
        other_step = layout.step_of(name.partition(".tmp-")[0])
        if other_step is not None and name != folder.name and (step is None or other_step > step):
            newer.append(name)
    if not newer:
        return {}
    committed, corrupt = scan_root(root)
    reasons = {c.path.name: "committed earlier, before the run went back" for c in committed if c.path != folder}
    reasons |= {d.path.name: f"corrupt: {d.reason}" for d in corrupt}
    return {name: reasons.get(name, "its save was not completed") for name in newer}
