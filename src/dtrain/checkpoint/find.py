"""Which checkpoints a root holds. The truth is the manifest in each step's folder; nothing else is asked."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from dtrain import storage
from dtrain.checkpoint import layout
from dtrain.errors import CheckpointError, DamagedCheckpointError
from dtrain.storage import Place


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
    path: Place
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
    path: Place
    reason: str


def has_manifest(folder: Place) -> bool:
    """Whether the folder claims to be a checkpoint."""
    return storage.exists(folder / layout.MANIFEST)


def read_manifest(folder: Place) -> layout.Manifest:
    """The manifest of a step's folder.

    Raises:
        DamagedCheckpointError: not there, or not as it was written.
        CheckpointError: of another format version.
    """
    return layout.parse_manifest(read_manifest_bytes(folder))


def read_manifest_bytes(folder: Place) -> bytes:
    """What ``manifest.json`` holds.

    Raises:
        DamagedCheckpointError: there is no such file.
    """
    path = folder / layout.MANIFEST
    if storage.file_size(path) is None:
        raise DamagedCheckpointError(f"{layout.MANIFEST}: not a file")
    return storage.read_file(path, limit=layout.MAX_MANIFEST_BYTES)


def survey(root: Place) -> tuple[list[Committed], list[Damaged]]:
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


def describe(folder: Place, step: int | None = None) -> Committed:
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
        committed, damaged = survey(storage.place(root))
    except OSError as error:
        raise CheckpointError(f"list_checkpoints: {error}") from error
    for bad in damaged:
        warnings.warn(f"list_checkpoints: {bad.path} is damaged and left out: {bad.reason}", stacklevel=2)
    return committed


def latest_checkpoint(root: Path | str) -> Place | None:
    """The folder of the newest committed step of a root: the one committed last; None when there is none.

    After going back to an older step and saving from there, that is not the highest step. The folder of a step stands for
    itself.

    Raises:
        CheckpointError: as ``list_checkpoints``; or the folder of a step whose save was not completed.
        DamagedCheckpointError: the folder of a step whose manifest is damaged.
    """
    try:
        step = step_itself(storage.place(root), "latest_checkpoint")
        if step is not None:
            describe(step, layout.step_of(step.name))
            return step
    except OSError as error:
        raise CheckpointError(f"latest_checkpoint: {error}") from error
    except CheckpointError as error:
        raise type(error)(f"latest_checkpoint: {root}: {error}") from None
    committed = list_checkpoints(root)
    return committed[-1].path if committed else None


def step_itself(path: Place, where: str) -> Place | None:
    """``path`` if it is the folder of a step, None if it is a root, or nothing.

    Raises:
        CheckpointError: a step's folder without a manifest.
    """
    if has_manifest(path):
        return path
    if layout.step_of(path.name) is not None and storage.is_folder(path):
        raise CheckpointError(f"{where}: {path} has no {layout.MANIFEST}: the save was not completed; load another step")
    return None


def passed_over(root: Place, folder: Place) -> dict[str, str]:
    """Why the folders of a root that look newer than ``folder``, the step to be taken, are not taken; by name."""
    step = layout.step_of(folder.name)
    committed, damaged = survey(root)
    reasons = {c.path.name: "committed before; the run has gone back since" for c in committed if c.path != folder}
    reasons |= {d.path.name: f"damaged: {d.reason}" for d in damaged}
    found = {}
    for name in storage.list_names(root):
        theirs = layout.step_of(name.partition(".tmp-")[0])
        if theirs is not None and name != folder.name and (step is None or theirs > step):
            found[name] = reasons.get(name, "its save was not completed")
    return found
