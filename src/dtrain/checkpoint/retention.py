"""Select and remove old steps, so that a folder with a step's name is a complete checkpoint at every moment.

A removal first renames the folder, and then removes the manifest before all other files. The rename is atomic, and an
interrupted removal leaves a staging folder that names its run. Without the rename, a folder without a manifest might also be a
failed save. On object stores, which have no rename, the manifest is removed first, and the missing manifest marks the leftover.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrain import storage
from dtrain.arguments import check_int, format_bytes, warn
from dtrain.checkpoint import layout
from dtrain.checkpoint.checkpoint_info import CheckpointInfo, has_manifest, newest_commit, read_manifest, scan_root
from dtrain.checkpoint.lock import lock_root, protected_steps
from dtrain.checkpoint.reader import read_run_index, verify_step
from dtrain.checkpoint.save_thread import save_thread
from dtrain.errors import CheckpointError, CorruptCheckpointError
from dtrain.run_context import Commit, Lineage
from dtrain.storage import AnyPath

_CALLER = "prune"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRules:
    """Rules that select the steps that remain.

    Args:
        keep_last: number of last steps to keep, at least 1; None keeps all steps.
        keep_every: multiples of this number are kept.
        keep_steps: steps that the user keeps.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_steps: Collection[int] = ()

    def check(self, caller: str) -> None:
        """Raise ConfigError unless the numbers are None or integers of at least 1, and the steps are integers."""
        for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
            if value is not None:
                check_int(caller, name, value, advice="Pass None to turn the option off.")
        for step in self.keep_steps:
            check_int(caller, "keep_steps", step, minimum=0)

    def steps_to_remove(self, steps: Sequence[int], protected: Collection[int] = ()) -> list[int]:
        """Return the steps to remove so that the last steps and all other steps to keep remain.

        Args:
            steps: committed steps, in the order of their commits.
            protected: steps in use.

        >>> RetentionRules(keep_last=1, keep_every=200).steps_to_remove(
        ...     [100, 200, 250, 300, 400], protected={100}
        ... )
        [250, 300]
        """
        if self.keep_last is None:
            return []
        kept = {*self.keep_steps, *protected}
        older = [step for step in steps[: -self.keep_last] if step not in kept]
        return [step for step in older if self.keep_every is None or step % self.keep_every != 0]


def prune(
    root: Path | str,
    *,
    keep_last: int | None,
    keep_every: int | None = None,
    keep_steps: Collection[int] = (),
    dry_run: bool = False,
) -> list[CheckpointInfo]:
    """Remove old steps of a root without a running job, and leftovers of killed saves.

    The remaining steps of each run are verified from the newest on. If none of them passes, the newest step that passes is
    kept as well. If no step passes, no step is removed.

        for info in dt.checkpoint.prune("runs/gpt/ckpt", keep_last=3, dry_run=True):
            print("would remove", info.path)
        dt.checkpoint.prune("runs/gpt/ckpt", keep_last=3, keep_every=10_000)

    Args:
        root: folder of steps.
        keep_last: number of last steps to keep per run; None removes only leftovers of killed saves.
        keep_every: multiples of this number are kept.
        keep_steps: steps to keep.
        dry_run: if True, nothing is removed.

    Returns:
        The removed steps in the order of their commits. With ``dry_run``, the steps that would be removed.

    Mutates: files. Steps with a corrupt manifest, and folders that were moved aside, are not removed.

    Raises:
        ConfigError: ``keep_last`` or ``keep_every`` is neither None nor an integer of at least 1; a step is not an integer.
        CheckpointError: a running job uses the root (pass ``keep_last`` to its saves instead), the root cannot be read or
            written, or the root is the folder of a step.
    """
    rules = RetentionRules(keep_last=keep_last, keep_every=keep_every, keep_steps=keep_steps)
    rules.check(_CALLER)
    folder = storage.resolve_path(root)
    try:
        if has_manifest(folder):
            raise CheckpointError(f"{_CALLER}: root must be a folder of steps, got the step {folder}. Pass its parent folder.")
        if dry_run or not storage.exists(folder):
            return _steps_to_remove(folder, rules)
        # A staging folder may belong to a save in progress in this process.
        save_thread().wait_for_slot(1)
        try:
            lock = lock_root(folder, _CALLER)
        except CheckpointError as error:
            raise CheckpointError(f"{_CALLER}: {error} Pass keep_last to the saves of a running job instead.") from None
        with lock:
            remove_leftovers(folder, caller=_CALLER)
            removed = _steps_to_remove(folder, rules)
            for step in removed:
                remove_step(step.path, step.step, step.run_id)
        return removed
    except OSError as error:
        raise CheckpointError(f"{_CALLER}: {error}") from error


def _steps_to_remove(root: AnyPath, rules: RetentionRules) -> list[CheckpointInfo]:
    """Return the steps to remove in the order of their commits. Each run is planned separately."""
    committed = scan_root(root).committed
    protected = protected_steps(root)
    removable = []
    for run_id in dict.fromkeys(step.run_id for step in committed):
        run = [step for step in committed if step.run_id == run_id]
        to_remove = rules.steps_to_remove([step.step for step in run], protected)
        removable += _keep_newest_sound(run, set(to_remove)) if to_remove else []
    return sorted(removable, key=committed.index)


def _keep_newest_sound(run: Sequence[CheckpointInfo], to_remove: set[int]) -> list[CheckpointInfo]:
    """Return the steps of a run to remove, without the newest valid step unless a valid step remains."""
    remaining = [step for step in run if step.step not in to_remove]
    removable = [step for step in run if step.step in to_remove]
    if any(_is_sound(step) for step in reversed(remaining)):
        return removable
    newest = next((step for step in reversed(removable) if _is_sound(step)), None)
    if newest is None:
        warn(
            f"{_CALLER}: no step of run {run[0].run_id} passes verification, so no step is removed. "
            "Run `dtrain checkpoints verify`, and keep at least one step that passes."
        )
        return []
    warn(
        f"{_CALLER}: {newest.path} is kept, because no step to keep passes verification. "
        "Run `dtrain checkpoints verify` on the newer steps."
    )
    return [step for step in removable if step is not newest]


def _is_sound(step: CheckpointInfo) -> bool:
    try:
        verify_step(step.path)
    except (CorruptCheckpointError, OSError):
        return False
    return True


def apply_retention(
    root: AnyPath, run_id: str, rules: RetentionRules, *, protected: Collection[int] = (), newest: Commit | None = None
) -> list[int]:
    """Remove older steps of the run after a commit, and leftovers of killed saves.

    Args:
        root: folder of steps.
        run_id: id of the run; steps of other runs are not removed.
        rules: rules of the run.
        protected: the step just committed, the step that this process resumed from, and steps that the run does not know.
        newest: the commit just made. If the root has a newer commit, another run or job saves into it, and nothing is removed.

    Returns:
        The removed steps.

    Mutates: files.

    Raises:
        CheckpointError: files of the run's last step are missing, or the root has a newer commit; nothing is removed.
        OSError: a failed file operation; each step is complete or removed.
    """
    remove_leftovers(root)
    if rules.keep_last is None:
        return []
    committed = scan_root(root).committed
    if newest is not None:
        check_newest(root, newest, newest_commit(committed))
    run = [step for step in committed if step.run_id == run_id]
    to_remove = rules.steps_to_remove([step.step for step in run], protected)
    if not to_remove:
        return []
    # The bytes were digested and synced by the save. Reading them again would double its cost; comparing sizes is cheap.
    sizes = storage.list_sizes(run[-1].path)
    expected = read_run_index(run[-1].path, read_manifest(run[-1].path)).sizes
    missing = [name for name, size in expected.items() if sizes.get(name) != size]
    if missing:
        raise CheckpointError(f"{run[-1].path / missing[0]} must have the size that the save wrote. Verify the step.")
    for step in run:
        if step.step in to_remove:
            remove_step(step.path, step.step, run_id)
    return to_remove


def resumed_steps(root: AnyPath, lineage: Lineage) -> set[int]:
    """Return the step of this root that the process has loaded, as a set of at most one."""
    if lineage.resumed_from is None:
        return set()
    folder = storage.resolve_path(lineage.resumed_from)
    step = layout.step_of(folder.name) if folder.parent == root else None
    return set() if step is None else {step}


def check_no_other_job(root: AnyPath, committed: Sequence[CheckpointInfo], lineages: Sequence[Lineage], run_id: str) -> None:
    """Raise if another run or job has saved into the root since the run looked at it. The first look learns the root's steps.

    Args:
        root: folder of steps.
        committed: its steps.
        lineages: lineage of each state of the save. Some of the states may have been saved without the others.
        run_id: id of the run.

    Mutates: ``lineages``.

    Raises:
        CheckpointError: as ``check_newest``.
    """
    histories, newest = [lineage.roots[str(root)] for lineage in lineages], newest_commit(committed)
    if any(history.looked for history in histories):
        commits = [history.newest for history in histories if history.newest is not None]
        check_newest(root, max(commits, key=lambda commit: commit.serial, default=None), newest)
    own_steps = {step for history in histories for step in history.steps}
    for lineage, history in zip(lineages, histories, strict=True):
        if history.looked:
            continue
        history.looked, history.newest = True, newest
        # The run saves into several roots, and has resumed from another one.
        resumed = None if lineage.resumed_from is None else layout.step_of(storage.resolve_path(lineage.resumed_from).name)
        later = {info.step for info in committed if info.run_id == run_id and info.step > (resumed or 0)}
        history.unknown_steps = frozenset(later - own_steps)


def check_newest(root: AnyPath, expected: Commit | None, newest: Commit | None) -> None:
    """Raise if a root has a newer commit than the newest one that a run has seen or made there.

    A second job of the run, started twice or left open, would train on from a step that the root has left behind, and remove
    the steps of the first job as older commits.

    Raises:
        CheckpointError: names both commits.
    """
    if newest is None or newest == expected or (expected is not None and newest.serial < expected.serial):
        return
    before = "be empty" if expected is None else f"end with step {expected.step} of run {expected.run_id}"
    raise CheckpointError(
        f"save_sharded: {root} must still {before}, got step {newest.step} of run {newest.run_id}. Another run or job has "
        f"saved there since this one loaded or saved. Load {root / layout.step_name(newest.step)} to go on from it, or save "
        "into another root."
    )


def remove_leftovers(root: AnyPath, *, caller: str = "save_sharded") -> None:
    """Remove leftovers of killed saves and removals of any run. Among running jobs, only the lock's owner writes here.

    A failed removal is a warning, because the save can continue.

    Mutates: files. The caller must hold the lock, and no save may be in progress.
    """
    in_place = not storage.supports_rename(root)
    for name in storage.list_names(root):
        # If the storage has no rename, saves write under the step's name.
        unfinished = in_place and layout.step_of(name) is not None and not has_manifest(root / name)
        if layout.is_staging_name(name) or unfinished:
            remove_or_warn(root / name, caller)


def remove_or_warn(folder: AnyPath, caller: str) -> None:
    """Remove a folder, and warn if the removal fails."""
    try:
        if storage.exists(folder):
            storage.remove_folder(folder, first=layout.MANIFEST)
    except OSError as error:
        warn(f"{caller}: could not remove {folder}: {error}. Remove the folder yourself, or change its permissions.")


def remove_step(folder: AnyPath, step: int, run_id: str) -> None:
    """Remove a step. The run's next save removes the leftover of an interrupted removal.

    The removal is not synced: after a power failure the step may be complete again, or incomplete and then refused.
    """
    if storage.supports_rename(folder):
        aside = folder.with_name(layout.staging_name(step, "old", run_id, secrets.token_hex(4)))
        storage.rename(folder, aside)
        folder = aside
    storage.remove_folder(folder, first=layout.MANIFEST)


def check_free_space(root: AnyPath, needed_bytes: int, *, caller: str) -> None:
    """Raise if ``needed_bytes`` do not fit on the storage of ``root``. If its free space is unknown, do nothing.

    Raises:
        CheckpointError: too little space, with both figures.
        OSError: a failed query of the file system.
    """
    free = storage.free_bytes(root)
    if free is not None and free < needed_bytes:
        raise CheckpointError(
            f"{caller}: free space of {root} must be at least {format_bytes(needed_bytes)}, got {format_bytes(free)}. "
            "Free space, or keep fewer steps (keep_last)."
        )


def move_aside(folder: AnyPath, caller: str) -> None:
    """Rename a folder that has a step's name and is no valid checkpoint, without destroying the folder."""
    if not storage.exists(folder):
        return
    if storage.supports_rename(folder):
        aside = folder.with_name(f"{folder.name}.aside-{secrets.token_hex(4)}")
        storage.rename(folder, aside)
        warn(
            f"{caller}: {folder} is not a valid checkpoint and was renamed to {aside.name}. "
            "Remove the renamed folder when nothing in it is needed."
        )
    elif has_manifest(folder):
        raise CheckpointError(
            f"{caller}: {folder} is not a valid checkpoint, and its storage cannot rename. Remove the folder."
        )
