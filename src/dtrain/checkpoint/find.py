"""Which checkpoints a root holds. The truth is the manifest in each step's folder; nothing else is asked."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from dtrain import storage
from dtrain.checkpoint import closed, layout
from dtrain.errors import CheckpointError, DamagedCheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
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
    path: Path
    run_id: str
    parent_step: int | None
    serial: int
    world_size: int
    bytes: int
    only: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """A folder with a manifest that cannot be believed."""

    step: int
    path: Path
    reason: str


def has_manifest(folder: Path) -> bool:
    """Whether the folder claims to be a checkpoint."""
    return storage.exists(folder / layout.MANIFEST)


def read_manifest(folder: Path) -> layout.Manifest:
    """The manifest of a step's folder.

    Raises:
        DamagedCheckpointError: not there, or not as it was written.
        CheckpointError: of another format version.
    """
    return layout.parse_manifest(read_manifest_bytes(folder))


def read_manifest_bytes(folder: Path) -> bytes:
    """What ``manifest.json`` holds.

    Raises:
        DamagedCheckpointError: there is no such file.
    """
    path = folder / layout.MANIFEST
    if storage.file_size(path) is None:
        raise DamagedCheckpointError(f"{layout.MANIFEST}: not a file")
    return storage.read_file(path, limit=closed.MAX_JSON_BYTES)


def survey(root: Path) -> tuple[list[Committed], list[Damaged]]:
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
            committed.append(describe(root / name, step))
        except DamagedCheckpointError as error:
            damaged.append(Damaged(step=step, path=root / name, reason=str(error)))
        except CheckpointError as error:
            raise CheckpointError(f"{root / name}: {error}") from None
    return sorted(committed, key=lambda c: (c.serial, c.step)), sorted(damaged, key=lambda d: d.step)


def describe(folder: Path, step: int | None = None) -> Committed:
    """What the manifest of a folder says. ``step``, when given, must be the one it says."""
    manifest = read_manifest(folder)
    if step is not None and manifest.step != step:
        raise DamagedCheckpointError(f"{layout.MANIFEST}: is that of step {manifest.step}, in a folder of step {step}")
    return Committed(
        step=manifest.step,
        path=folder,
        run_id=manifest.run_id,
        parent_step=manifest.parent_step,
        serial=manifest.serial,
        world_size=len(manifest.ranks),
        bytes=manifest.bytes,
        only=manifest.only,
    )


def list_checkpoints(root: Path | str) -> list[Committed]:
    """The committed steps of a root, in the order in which they were committed; [] when there is none.

    A step whose manifest is damaged is left out, with a warning. Files are not verified: see ``verify_checkpoint``.

    Raises:
        CheckpointError: a root that cannot be read, or a step of another format version.
    """
    try:
        committed, damaged = survey(storage.real_path(root))
    except OSError as error:
        raise CheckpointError(f"list_checkpoints: {error}") from error
    for bad in damaged:
        warnings.warn(f"list_checkpoints: {bad.path} is damaged and left out: {bad.reason}", stacklevel=2)
    return committed


def latest_checkpoint(root: Path | str) -> Path | None:
    """The folder of the newest committed step of a root: the one committed last; None when there is none.

    After going back to an older step and saving from there, that is not the highest step.

    Raises:
        CheckpointError: as ``list_checkpoints``.
    """
    committed = list_checkpoints(root)
    return committed[-1].path if committed else None
