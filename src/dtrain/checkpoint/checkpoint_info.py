"""Which checkpoints a root holds. The truth is the manifest in each step's folder; nothing else is asked."""

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
    """A committed step, as its manifest describes it.

    Args:
        step: of the state.
        path: its folder.
        run_id: of the run that wrote it.
        parent_step: the step that the run had continued from or committed before, None for its first.
        serial: place in the order of commits of its root.
        world_size: ranks that wrote it.
        bytes: size of their files.
        only: what the save was limited to, () for all of a state.
    """

    step: int
    path: AnyPath
    run_id: str
    parent_step: int | None
    serial: int
    world_size: int
    bytes: int
    only: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptStep:
    """A folder with a manifest that cannot be believed."""

    step: int
    path: AnyPath
    reason: str


def has_manifest(folder: AnyPath) -> bool:
    """Whether the folder claims to be a checkpoint."""
    return storage.exists(folder / layout.MANIFEST)


def read_manifest(folder: AnyPath) -> layout.Manifest:
    """The manifest of a step's folder.

    Raises:
        CorruptCheckpointError: not there, or not as it was written.
        CheckpointError: of another format version.
    """
    return layout.parse_manifest(read_manifest_bytes(folder))


def read_manifest_bytes(folder: AnyPath) -> bytes:
    """What ``manifest.json`` holds.

    Raises:
        CorruptCheckpointError: there is no such file.
    """
    path = folder / layout.MANIFEST
    if storage.file_size(path) is None:
        raise CorruptCheckpointError(f"{layout.MANIFEST}: not a file")
    return storage.read_file(path, limit=layout.MAX_MANIFEST_BYTES)


def scan_root(root: AnyPath) -> tuple[list[CheckpointInfo], list[CorruptStep]]:
    """All steps with a valid manifest, in the order of their commits, and all with a damaged one, by step.

    Raises:
        CheckpointError: a step of another format version.
        OSError: the root cannot be read; a root that does not exist holds nothing.
    """
    committed, damaged = [], []
    for name in storage.list_names(root) if storage.exists(root) else []:
        step = layout.step_of(name)
        if step is None or not has_manifest(root / name):
            continue
        try:
            committed.append(read_info(root / name, step))
        except CorruptCheckpointError as error:
            damaged.append(CorruptStep(step=step, path=root / name, reason=str(error)))
        except CheckpointError as error:
            raise CheckpointError(f"{root / name}: {error}") from None
    return sorted(committed, key=lambda c: (c.serial, c.step)), sorted(damaged, key=lambda d: d.step)


def read_info(folder: AnyPath, step: int | None = None) -> CheckpointInfo:
    """What the manifest of a folder says. ``step``, when given, must be the one it says."""
    manifest = read_manifest(folder)
    if step is not None and manifest.step != step:
        raise CorruptCheckpointError(f"{layout.MANIFEST}: is that of step {manifest.step}, in a folder of step {step}")
    return CheckpointInfo(
        step=manifest.step,
        path=folder,
        run_id=manifest.run_id,
        parent_step=manifest.parent_step,
        serial=manifest.serial,
        world_size=len(manifest.ranks),
        bytes=manifest.bytes,
        only=manifest.only,
    )


def list_steps(root: Path | str) -> list[CheckpointInfo]:
    """The committed steps of a root, in the order in which they were committed; [] when there is none.

    A step whose manifest is damaged is left out, with a warning. Files are not verified: see ``verify``.

    Raises:
        CheckpointError: a root that cannot be read, or a step of another format version.
    """
    try:
        committed, damaged = scan_root(storage.resolve_path(root))
    except OSError as error:
        raise CheckpointError(f"list_steps: {error}") from error
    for bad in damaged:
        warnings.warn(f"list_steps: {bad.path} is damaged and left out: {bad.reason}", stacklevel=2)
    return committed


def latest_checkpoint(root: Path | str) -> AnyPath | None:
    """The folder of the newest committed step of a root: the one committed last; None when there is none.

    After going back to an older step and saving from there, that is not the highest step. The folder of a step stands for
    itself.

    Raises:
        CheckpointError: as ``list_steps``; or the folder of a step whose save was not completed.
        CorruptCheckpointError: the folder of a step whose manifest is damaged.
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


def as_step_folder(path: AnyPath, where: str) -> AnyPath | None:
    """``path`` if it is the folder of a step, None if it is a root, or nothing.

    Raises:
        CheckpointError: a step's folder without a manifest.
    """
    if has_manifest(path):
        return path
    if layout.step_of(path.name) is not None and storage.is_folder(path):
        raise CheckpointError(f"{where}: {path} has no {layout.MANIFEST}: the save was not completed; load another step")
    return None


def skipped_steps(root: AnyPath, folder: AnyPath) -> dict[str, str]:
    """Why the folders of a root that look newer than ``folder``, the step to be taken, are not taken; by name."""
    step = layout.step_of(folder.name)
    committed, damaged = scan_root(root)
    reasons = {c.path.name: "committed before; the run has gone back since" for c in committed if c.path != folder}
    reasons |= {d.path.name: f"damaged: {d.reason}" for d in damaged}
    found = {}
    for name in storage.list_names(root):
        theirs = layout.step_of(name.partition(".tmp-")[0])
        if theirs is not None and name != folder.name and (step is None or theirs > step):
            found[name] = reasons.get(name, "its save was not completed")
    return found
