"""Which steps are removed, and how: what has a step's name is a checkpoint at every moment, and litter can be told from it.

A removal first renames the folder, and then removes the manifest before all else. The rename is one operation: the name stands
for a whole checkpoint before it and for nothing after it, and an interrupted removal leaves a side folder that says whose it
was. Without it, a folder without a manifest would lie under the step's name, and nobody could tell it from a broken save.
Object stores rename nothing: the manifest goes first there, and what is left of the step is found by the lack of one.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path

from dtrain import storage
from dtrain.checkpoint import layout, save_thread
from dtrain.checkpoint.checkpoint_info import CheckpointInfo, has_manifest, read_manifest, scan_root
from dtrain.checkpoint.lock import Lock, lock_root, protected_steps
from dtrain.checkpoint.reader import verify_step
from dtrain.errors import CheckpointError, ConfigError, CorruptCheckpointError
from dtrain.storage import AnyPath

_WHERE = "prune"


def plan_retention(
    steps: Sequence[int],
    keep_last: int | None,
    *,
    keep_every: int | None = None,
    keep_steps: Collection[int] = (),
    protected: Collection[int] = (),
) -> list[int]:
    """The steps to remove so that the last ``keep_last`` remain, and all others that there is a reason to keep.

    Args:
        steps: the committed steps, in the order in which they were committed.
        keep_last: how many of the last ones stay, at least 1; None keeps all.
        keep_every: steps that are multiples of it stay.
        keep_steps: steps that the user wants to keep.
        protected: steps that are needed.

    >>> plan_retention([100, 200, 250, 300, 400], 1, keep_every=200, protected={100})
    [250, 300]

    Raises:
        ConfigError: ``keep_last`` or ``keep_every`` is neither None nor a whole number of at least 1, or a pin is no step.
    """
    for name, value, none in (("keep_last", keep_last, "keep all"), ("keep_every", keep_every, "keep none for its number")):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name} must be a whole number of at least 1, or None to {none}, got {value!r}")
    strange = [step for step in keep_steps if type(step) is not int]
    if strange:
        raise ConfigError(f"pinned must be steps, which are whole numbers, got {strange[0]!r}")
    if keep_last is None:
        return []
    kept = {*keep_steps, *protected}
    return [step for step in steps[:-keep_last] if step not in kept and (keep_every is None or step % keep_every != 0)]


def prune(
    root: Path | str,
    *,
    keep_last: int | None,
    keep_every: int | None = None,
    keep_steps: Collection[int] = (),
    dry_run: bool = False,
) -> list[CheckpointInfo]:
    """Remove steps of a root where no job is running, and what killed saves left there.

    The last step that can be relied on is never removed: what is kept is read and verified from the newest on, and where none
    of it passes, the newest step that does is kept as well. If there is no such step, nothing is removed.

    Args:
        root: a folder of steps.
        keep_last: how many of the last steps of each run stay; None removes only what killed saves left.
        keep_every: steps that are multiples of it stay.
        keep_steps: these steps stay.
        dry_run: remove nothing.

    Returns:
        The steps that were removed, or would be, in the order of their commits.

    Mutates: files. Steps with a damaged manifest, and folders that were moved aside, stay.

    Raises:
        ConfigError: as ``plan_retention``.
        CheckpointError: a live job uses the root (give ``keep_last`` to its saves instead), it cannot be read or written, or
            it is the folder of a step.
    """
    plan_retention([], keep_last, keep_every=keep_every, keep_steps=keep_steps)
    folder = storage.resolve_path(root)
    try:
        if has_manifest(folder):
            raise CheckpointError(f"{_WHERE}: {folder} is one step; give the folder that it lies in")
        if dry_run or not storage.exists(folder):
            return _steps_to_remove(folder, keep_last, keep_every, keep_steps)
        save_thread.wait_for_slot(1)  # a side folder may be that of a save under way in this process
        with _lock_for_pruning(folder):
            remove_leftovers(folder, where=_WHERE)
            removed = _steps_to_remove(folder, keep_last, keep_every, keep_steps)
            for step in removed:
                remove_step(step.path, step.step, step.run_id)
        return removed
    except OSError as error:
        raise CheckpointError(f"{_WHERE}: {error}") from error


def _lock_for_pruning(root: AnyPath) -> Lock:
    try:
        return lock_root(root, _WHERE)
    except CheckpointError as error:
        raise CheckpointError(f"{_WHERE}: {error}; a job that runs removes its own steps with keep_last") from None


def _steps_to_remove(
    root: AnyPath, keep_last: int | None, keep_every: int | None, pinned: Collection[int]
) -> list[CheckpointInfo]:
    """The steps to remove, run by run, in the order of their commits."""
    committed, _ = scan_root(root)
    needed = protected_steps(root)
    found = []
    for run_id in dict.fromkeys(step.run_id for step in committed):
        run = [step for step in committed if step.run_id == run_id]
        going = plan_retention([c.step for c in run], keep_last, keep_every=keep_every, keep_steps=pinned, protected=needed)
        found += _keep_newest_sound(run, set(going)) if going else []
    return sorted(found, key=committed.index)


def _keep_newest_sound(run: Sequence[CheckpointInfo], going: set[int]) -> list[CheckpointInfo]:
    """The steps of a run that may go: not the newest sound one, unless a sound one stays."""
    kept = [step for step in run if step.step not in going]
    leaving = [step for step in run if step.step in going]
    if any(_is_sound(step) for step in reversed(kept)):
        return leaving
    last = next((step for step in reversed(leaving) if _is_sound(step)), None)
    if last is None:
        warnings.warn(f"{_WHERE}: no step of run {run[0].run_id} passes verification, so none is removed", stacklevel=4)
        return []
    warnings.warn(f"{_WHERE}: {last.path} is kept: no step that was to stay passes verification", stacklevel=4)
    return [step for step in leaving if step is not last]


def _is_sound(step: CheckpointInfo) -> bool:
    try:
        verify_step(step.path)
    except (CorruptCheckpointError, OSError):
        return False
    return True


def apply_retention(
    root: AnyPath,
    run_id: str,
    *,
    keep_last: int | None,
    keep_every: int | None = None,
    keep_steps: Collection[int] = (),
    protected: Collection[int] = (),
) -> list[int]:
    """Remove what a commit of this process has made superfluous: older steps of the run, and what its killed saves left.

    Args:
        root: where.
        run_id: of the run; steps of others are left alone.
        keep_last: as for ``plan_retention``.
        keep_every: likewise.
        keep_steps: likewise.
        protected: the step just committed, and the one that this process resumed from.

    Returns:
        The steps that were removed.

    Mutates: files.

    Raises:
        CheckpointError: the run's last step is not all there; nothing is removed then.
        OSError: a file operation failed; each step is whole or gone.
    """
    remove_leftovers(root)
    if keep_last is None:
        return []
    run = [step for step in scan_root(root)[0] if step.run_id == run_id]
    going = plan_retention(
        [step.step for step in run], keep_last, keep_every=keep_every, keep_steps=keep_steps, protected=protected
    )
    if not going:
        return []
    # Its bytes were digested on their way out and synced. Reading them again would double the cost of a save; this does not.
    missing = [
        name for name, size in read_manifest(run[-1].path).sizes.items() if storage.file_size(run[-1].path / name) != size
    ]
    if missing:
        raise CheckpointError(f"{run[-1].path / missing[0]}: is not as it was written")
    for step in run:
        if step.step in going:
            remove_step(step.path, step.step, run_id)
    return going


def remove_leftovers(root: AnyPath, *, where: str = "save_sharded") -> None:
    """Remove what killed saves and removals left, of any run: of the live jobs only the one that holds the lock writes here.

    Failing to is no reason not to save: it is a warning.

    Mutates: files. The lock must be held, and nothing may be on its way when this is called.
    """
    for name in storage.list_names(root):
        if _is_leftover(root, name):
            try:
                storage.remove_folder(root / name, first=layout.MANIFEST)
            except OSError as error:
                warnings.warn(f"{where}: could not remove {root / name}: {error}", stacklevel=3)


def _is_leftover(root: AnyPath, name: str) -> bool:
    if layout.is_staging_name(name):
        return True
    # Where nothing is renamed, saves write under the step's name.
    return layout.step_of(name) is not None and not storage.supports_rename(root) and not has_manifest(root / name)


def remove_step(folder: AnyPath, step: int, run_id: str) -> None:
    """Remove a step for good. What an interrupted removal leaves is litter of the run, which its next save removes.

    Nothing is synced: what a power failure brings back is the whole step, or a part of it, which is refused.
    """
    if storage.supports_rename(folder):
        aside = folder.with_name(layout.staging_name(step, "old", run_id, secrets.token_hex(4)))
        storage.rename(folder, aside)
        folder = aside
    storage.remove_folder(folder, first=layout.MANIFEST)


def check_free_space(root: AnyPath, needed_bytes: int, *, where: str = "save_sharded") -> None:
    """Raise if so many bytes do not fit where ``root`` is, or will be. Where that is not known they do.

    Raises:
        CheckpointError: with both figures.
        OSError: the file system does not answer.
    """
    free = storage.free_bytes(root)
    if free is not None and free < needed_bytes:
        raise CheckpointError(
            f"{where}: {root} has {_format_bytes(free)} free, this save needs {_format_bytes(needed_bytes)}; free space, or keep fewer steps "
            "(keep_last)"
        )


def _format_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:,.2f} GiB"
