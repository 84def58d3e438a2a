"""List the checkpoints of a root from the manifests in its step folders. No other file is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from dtrain import storage
from dtrain.arguments import warn
from dtrain.checkpoint import layout
from dtrain.errors import CheckpointError, CorruptCheckpointError
from dtrain.run_context import Commit
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
        scope: scope of the save: "all", "weights" or "trainable".
    """

    step: int
    path: AnyPath
    run_id: str
    parent_step: int | None
    serial: int
    world_size: int
    bytes: int
    scope: layout.SaveScope = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptStep:
    """Folder with a corrupt manifest."""

    step: int
    path: AnyPath
    reason: str


class StepRemovedError(CheckpointError):
    """A step vanished while it was read, because another process removed it. The step was not corrupt."""


def has_manifest(folder: AnyPath) -> bool:
    """Return True if the folder has a manifest."""
    return storage.exists(folder / layout.MANIFEST)


@contextmanager
def notice_removal(folder: AnyPath) -> Iterator[None]:
    """Raise ``StepRemovedError`` instead of an error about a step that another process has removed meanwhile.

    A removal takes the manifest before all other files. The error of a read that uses the files of a step that has gone would
    call the step corrupt.
    """
    try:
        yield
    except (CheckpointError, OSError):
        if has_manifest(folder):
            raise
        raise StepRemovedError(describe_removal(folder)) from None


def describe_removal(folder: AnyPath) -> str:
    """Describe a step that another process removed during a read, and the remedy."""
    return (
        f"{folder} was removed by another process while it was read. Load another step, or let the job that saves there "
        "keep more steps (keep_last)."
    )


def read_manifest(folder: AnyPath) -> layout.Manifest:
    """Read the manifest of a step's folder.

    Raises:
        CorruptCheckpointError: a manifest that is missing, was changed, or is of another step than the folder's name.
        CheckpointError: a manifest of another format version.
    """
    path = folder / layout.MANIFEST
    try:
        data = storage.read_file(path, limit=layout.MAX_MANIFEST_BYTES)
    except OSError:
        if storage.file_size(path) is None:
            raise CorruptCheckpointError(f"{layout.MANIFEST}: must be a file") from None
        raise
    manifest, step = layout.parse_manifest(data), layout.step_of(folder.name)
    if step is not None and manifest.step != step:
        raise CorruptCheckpointError(f"{layout.MANIFEST}: step must be {step} as in the folder's name, got {manifest.step}")
    return manifest


class RootScan(NamedTuple):
    """Steps of a root, as one listing has found them.

    Args:
        committed: steps with a valid manifest, in the order of their commits.
        corrupt: steps with a corrupt manifest, by step.
        incomplete: names of folders of saves that were not completed.
    """

    committed: list[CheckpointInfo]
    corrupt: list[CorruptStep]
    incomplete: list[str]

    @property
    def newest(self) -> CheckpointInfo | CorruptStep | None:
        """Step that was committed last. A step with a corrupt manifest may be the newest, and verification refuses it then."""
        newest = self.committed[-1] if self.committed else None
        if self.corrupt and (newest is None or self.corrupt[-1].step > newest.step):
            return self.corrupt[-1]
        return newest


# Times that a listing is repeated because a step vanished in the middle of it.
_MAX_SCANS = 20


def scan_root(root: AnyPath) -> RootScan:
    """List all steps of a root. A missing root has no steps.

    A job removes a step after the commit of a newer one. So if a listed step vanishes before its manifest is read, the root is
    listed again, and the newer step is found.

    Raises:
        CheckpointError: a step of another format version.
        OSError: an unreadable root.
    """
    for _ in range(_MAX_SCANS):
        committed, corrupt, incomplete, vanished = [], [], [], False
        try:
            names = storage.list_names(root)
        except FileNotFoundError:
            names = []
        for name in names:
            step = layout.step_of(name)
            if step is None:
                incomplete += [name] if layout.step_of(name.partition(".tmp-")[0]) is not None else []
                continue
            try:
                committed.append(read_info(root / name))
            except CorruptCheckpointError as error:
                if has_manifest(root / name):
                    corrupt.append(CorruptStep(step=step, path=root / name, reason=str(error)))
                # A folder without a manifest is an incomplete save.
                elif storage.exists(root / name):
                    incomplete.append(name)
                else:
                    vanished = True
            except CheckpointError as error:
                raise CheckpointError(f"{root / name}: {error}") from None
        if not vanished:
            break
    committed.sort(key=lambda info: (info.serial, info.step))
    return RootScan(committed, sorted(corrupt, key=lambda info: info.step), incomplete)


def newest_commit(committed: Sequence[CheckpointInfo]) -> Commit | None:
    """Return the newest of the commits of a root; None without a commit."""
    return Commit(committed[-1].serial, committed[-1].step, committed[-1].run_id) if committed else None


def read_info(folder: AnyPath) -> CheckpointInfo:
    """Read the manifest of a step's folder. Raises as ``read_manifest``."""
    manifest = read_manifest(folder)
    facts = {info.name: getattr(manifest, info.name) for info in fields(CheckpointInfo) if info.name != "path"}
    return CheckpointInfo(path=folder, **facts)


def list_steps(root: Path | str) -> list[CheckpointInfo]:
    """List the committed steps of a root in the order of their commits. The list is empty if there are none.

    Steps with a corrupt manifest are skipped with a warning. Files are not verified; see ``verify``.

        for info in dt.checkpoint.list_steps("runs/gpt/ckpt"):
            print(info.step, info.path, info.bytes)

    Raises:
        CheckpointError: a root that cannot be read, or a step of another format version.
    """
    try:
        scan = scan_root(storage.resolve_path(root))
    except OSError as error:
        raise CheckpointError(f"list_steps: {error}") from error
    for bad in scan.corrupt:
        warn(
            f"list_steps: {bad.path} is corrupt and skipped: {bad.reason}. "
            "Run `dtrain checkpoints verify` on its folder, then restore or remove this step."
        )
    return scan.committed


def latest_checkpoint(root: Path | str) -> AnyPath | None:
    """Return the folder of the step of a root that was committed last, or None if there is none.

    After a run went back to an older step, this is not the highest step. For the folder of a step, its path is returned.

        path = dt.latest_checkpoint("runs/gpt/ckpt")
        if path is not None:
            state = dt.load_sharded(path, state)

    Raises:
        CheckpointError: as ``list_steps``; or the folder of a step whose save was not completed.
        CorruptCheckpointError: the folder of a step with a corrupt manifest.
    """
    try:
        step = as_step_folder(storage.resolve_path(root), "latest_checkpoint")
        if step is not None:
            read_info(step)
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

    Raises:
        CheckpointError: a step's folder without a manifest.
    """
    step = as_step_folder(path, caller)
    if step is not None:
        return step
    newest = scan_root(path).newest
    return newest.path if newest else None


def skipped_steps(scan: RootScan, folder: AnyPath) -> dict[str, str]:
    """Return the reasons why folders that look newer than ``folder`` are not loaded, by folder name."""
    reasons = {info.path.name: "committed earlier, before the run went back" for info in scan.committed}
    reasons |= {corrupt.path.name: f"corrupt: {corrupt.reason}" for corrupt in scan.corrupt}
    reasons |= dict.fromkeys(scan.incomplete, "its save was not completed")
    step = layout.step_of(folder.name)
    # All these folders have the name of a step, or of the staging folder of one.
    steps = {name: layout.step_of(name.partition(".tmp-")[0]) or 0 for name in reasons if name != folder.name}
    return {name: reasons[name] for name, other_step in steps.items() if step is None or other_step > step}
