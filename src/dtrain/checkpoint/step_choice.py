"""Agree on the step to load, and read it on all ranks: the newest step of a root, or an older step if the newest is corrupt.

Rank 0 lists the root once and chooses. If another process removes or replaces the step while it is read, rank 0 looks again.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from dtrain import storage
from dtrain.arguments import warn
from dtrain.checkpoint import layout
from dtrain.checkpoint.checkpoint_info import (
    RootScan,
    StepRemovedError,
    as_step_folder,
    describe_removal,
    has_manifest,
    newest_commit,
    notice_removal,
    read_info,
    scan_root,
    skipped_steps,
)
from dtrain.checkpoint.node_memory import (
    SpreadStep,
    bring_files,
    choose_spread_step,
    find_memory_root,
    find_spread_step,
    list_holdings,
)
from dtrain.checkpoint.reader import iter_sound_steps_before
from dtrain.checkpoint.retention import remove_or_warn
from dtrain.dist.collectives import all_gather_json, broadcast_decision, raise_on_all_ranks
from dtrain.dist.init import get_dist_info
from dtrain.errors import CheckpointError, CheckpointMismatchError, ConfigError, CorruptCheckpointError
from dtrain.run_context import RootHistory
from dtrain.storage import AnyPath

if TYPE_CHECKING:
    from dtrain.checkpoint.load import LoadedCheckpoint

OnCorrupt = Literal["raise", "previous"]
_CALLER = "load_sharded"
# Times that a step may vanish while it is read, before the load gives up.
_MAX_LOOKS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChoice:
    """Step to load, as rank 0 has chosen it.

    Args:
        folder: folder of the step.
        named: if True, the caller named the folder of the step instead of a root.
        scan: listing of the root, on rank 0; None on other ranks, or if the root of a named step cannot be listed.
        disk: root on disk if the step is in memory, else None.
        disk_scan: its listing, on rank 0.
        spread: step in the memory of several nodes; None otherwise.
    """

    folder: AnyPath
    named: bool
    scan: RootScan | None = None
    disk: AnyPath | None = None
    disk_scan: RootScan | None = None
    spread: SpreadStep | None = None

    def check_listed(self, folder: AnyPath) -> None:
        """Raise CorruptCheckpointError if the listing found the manifest of the step corrupt."""
        for step in () if self.scan is None else self.scan.corrupt:
            if step.path == folder:
                raise CorruptCheckpointError(step.reason)

    def histories(self, folder: AnyPath, steps: dict[int, object]) -> dict[str, RootHistory]:
        """Return the facts about its root, and about the root on disk, for the run that continues from a step."""
        roots = {str(folder.parent): _history(self.scan, steps)}
        return roots if self.disk is None else roots | {str(self.disk): _history(self.disk_scan, {})}


def _history(scan: RootScan | None, steps: dict[int, object]) -> RootHistory:
    if scan is None:
        return RootHistory(steps=steps)
    return RootHistory(steps=steps, looked=True, newest=newest_commit(scan.committed))


def choose_on_all_ranks(path: AnyPath, *, memory: bool = True) -> StepChoice | None:
    """Choose the step that a path names on rank 0: the folder of a step, or the newest step of a root; None for an empty root.

    Args:
        path: folder of a step, or a root.
        memory: if True, a newer step of the run in memory comes before the newest step of a root.

    Collective: exchanges of JSON on the control group. On several nodes copies of small files between their leaders.
    """
    scan: RootScan | None = None
    disk_scan: RootScan | None = None
    spread = find_spread_step(path) if memory else None

    def choose() -> list[Any]:
        nonlocal scan, disk_scan
        named = as_step_folder(path, _CALLER)
        if named is not None:
            # Beside steps of another format version, the step is a copy from elsewhere.
            with suppress(CheckpointError):
                scan = scan_root(named.parent)
            return [str(named), True, False]
        scan = scan_root(path)
        kept = find_memory_root(path) if memory else None
        if spread is not None and _is_ahead(spread.step, spread.run_id, scan):
            disk_scan = scan
            return [layout.step_name(spread.step), False, True]
        if kept is not None and get_dist_info().local_world_size == get_dist_info().world_size:
            in_memory = scan_root(kept)
            whole = choose_spread_step([list_holdings(kept)])
            # The last node of a job may lack a part of the newest step, which another node was about to send.
            candidates = [info for info in in_memory.committed if whole is None or info.step == whole.step]
            if candidates and _is_ahead(candidates[-1].step, candidates[-1].run_id, scan):
                scan, disk_scan = in_memory, scan
                return [str(candidates[-1].path), False, True]
        return [str(scan.newest.path) if scan.newest else None, False, False]

    folder, named, is_memory = cast(list[Any], broadcast_decision(_CALLER, choose))
    if folder is None:
        return None
    if spread is not None and is_memory:
        return _spread_choice(path, spread, disk_scan)
    return StepChoice(
        folder=storage.resolve_path(folder),
        named=named,
        scan=scan,
        disk=path if is_memory else None,
        disk_scan=disk_scan,
    )


def _spread_choice(path: AnyPath, spread: SpreadStep, disk_scan: RootScan | None) -> StepChoice | None:
    """Bring the small files of a step to all nodes. Return the step, or the newest step on disk if memory does not suffice."""
    problem = bring_files(path, spread, spread.json_names)
    root = find_memory_root(path)
    if problem or root is None:
        return _choose_disk(path, problem)
    is_first = get_dist_info().rank == 0
    return StepChoice(
        folder=root / layout.step_name(spread.step),
        named=False,
        scan=scan_root(root) if is_first else None,
        disk=path,
        disk_scan=disk_scan,
        spread=spread,
    )


def bring_data(choice: StepChoice, path: AnyPath, names: Iterable[str]) -> StepChoice | None:
    """Bring the data files that this rank needs from the memory of other nodes. Return the choice that all ranks then read.

    Collective: exchanges of JSON on the control group, and copies between the leaders of nodes.
    """
    assert choice.spread is not None, "the step is in the memory of several nodes"
    problem = bring_files(path, choice.spread, names)
    return _choose_disk(path, problem) if problem else choice


def _choose_disk(path: AnyPath, problem: str) -> StepChoice | None:
    if get_dist_info().rank == 0:
        warn(f"{_CALLER}: a step in memory is not used: {problem}. Enlarge /dev/shm.")
    return choose_on_all_ranks(path, memory=False)


def _is_ahead(step: int, run_id: str, disk: RootScan) -> bool:
    """Return True if a step in memory is a later one of the run whose step is the newest on disk."""
    if disk.newest is None:
        return True
    return step > disk.newest.step and (not disk.committed or disk.committed[-1].run_id == run_id)


class CorruptMemoryError(CorruptCheckpointError):
    """The only step is in memory, and corrupt."""


class AgreedRead(NamedTuple):
    """Checkpoint that all ranks have read.

    Args:
        loaded: contents for this rank.
        choice: choice that the checkpoint was read from.
        skipped: reasons why newer steps were skipped; empty if the newest step was read.
        entry_digests: ``digest_stored_entries`` of each rank.
    """

    loaded: LoadedCheckpoint
    choice: StepChoice
    skipped: str
    entry_digests: Sequence[str]


def read_on_all_ranks(
    choice: StepChoice,
    path: AnyPath,
    read: Callable[[AnyPath], LoadedCheckpoint],
    options: str,
    on_corrupt: OnCorrupt,
    files: ExitStack,
) -> AgreedRead:
    """Read a checkpoint on all ranks and agree on its content. Try older steps if corrupt steps may be skipped.

    Args:
        choice: step to read first.
        path: root, or folder of a step.
        read: function that reads a step and keeps its files open in ``files``.
        options: summary of the options of this rank.
        on_corrupt: "previous" tries older steps.
        files: open files.

    Collective: exchanges of JSON on the control group.
    """
    refused: dict[str, str] = {}
    folder, looks = choice.folder, 1
    while True:
        with raise_on_all_ranks(_CALLER):
            loaded, own_report = _read_and_report(choice, folder, read, options)
        reports = [_ReadReport(*row) for row in cast(list[list[Any]], all_gather_json(list(own_report)))]
        gone = any(report.removed for report in reports)
        bad = next(
            (f"rank {rank}: {report.corruption}" for rank, report in enumerate(reports) if report.corruption is not None), None
        )
        if not gone and bad is None and len({report.digest for report in reports}) == 1:
            _check_equal_options([report.options for report in reports])
            assert loaded is not None, "no rank has reported corruption"
            reasons = {**({} if choice.scan is None else skipped_steps(choice.scan, folder)), **refused}
            skipped = "; ".join(f"skipped {name} ({reason})" for name, reason in sorted(reasons.items()))
            return AgreedRead(loaded, choice, "" if choice.named else skipped, [report.entry_digest for report in reports])
        # The memory must be free before the next step is read.
        del loaded
        files.close()
        if gone or (not choice.named and _was_replaced(choice, folder)):
            if choice.named or looks >= _MAX_LOOKS:
                raise CheckpointError(f"{_CALLER}: {describe_removal(folder)}")
            again = choose_on_all_ranks(path)
            if again is None:
                raise CheckpointError(
                    f"{_CALLER}: all steps of {path} were removed by another process during the load. Save again."
                )
            choice, folder, refused, looks = again, again.folder, {}, looks + 1
        elif bad is not None and choice.disk is not None:
            again = choose_on_all_ranks(path, memory=False)
            if get_dist_info().local_rank == 0:
                # The next attempt must not read it again.
                remove_or_warn(folder, _CALLER)
            if again is None:
                raise CorruptMemoryError(
                    f"{_CALLER}: {folder} in memory is corrupt: {bad}. {path} has no step. Save on disk, too, and start anew."
                )
            if get_dist_info().rank == 0:
                warn(f"{_CALLER}: {folder} in memory is corrupt: {bad}. Loading {again.folder} instead.")
            choice, folder = again, again.folder
        elif bad is not None:
            refused[folder.name] = f"corrupt: {bad}"
            folder = _previous_sound_step(folder, bad, on_corrupt)
        else:
            raise CheckpointError(f"{_CALLER}: ranks see different files in {folder}. All nodes must share its file system.")


class _ReadReport(NamedTuple):
    """Report of one rank about its read of a step, exchanged as JSON.

    Args:
        options: summary of the rank's options.
        digest: digest of the manifest; empty if the step was not read.
        entry_digest: ``digest_stored_entries``; empty if the step was not read.
        corruption: damage that the rank has found; None for none.
        removed: if True, the step vanished while it was read.
    """

    options: str
    digest: str = ""
    entry_digest: str = ""
    corruption: str | None = None
    removed: bool = False


def _read_and_report(
    choice: StepChoice, folder: AnyPath, read: Callable[[AnyPath], LoadedCheckpoint], options: str
) -> tuple[LoadedCheckpoint | None, _ReadReport]:
    """Read a step. A corrupt step, and one that vanishes, is reported; other errors are raised."""
    try:
        with notice_removal(folder):
            choice.check_listed(folder)
            loaded = read(folder)
        digest = hashlib.sha256(layout.encode_manifest(loaded.reader.manifest)).hexdigest()
        return loaded, _ReadReport(options, digest, loaded.entry_digest)
    except StepRemovedError:
        return None, _ReadReport(options, removed=True)
    except CorruptCheckpointError as error:
        return None, _ReadReport(options, corruption=str(error))
    except CheckpointMismatchError:  # The message names the folder already.
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{_CALLER}: {folder}: {error}") from None


def _check_equal_options(summaries: Sequence[str]) -> None:
    """Raise ConfigError if options differ, because the ranks would continue from different states."""
    for rank, summary in enumerate(summaries):
        if summary != summaries[0]:
            raise ConfigError(
                f"{_CALLER}: options must be equal on all ranks, got {summary} on rank {rank} and {summaries[0]} on rank 0. "
                "Pass the same options on all ranks."
            )


def _was_replaced(choice: StepChoice, folder: AnyPath) -> bool:
    """Return True if another step of this number has been committed since rank 0 listed the root.

    Collective: one broadcast of JSON on the control group.
    """

    def replaced() -> bool:
        listed = next((info for info in choice.scan.committed if info.path == folder), None) if choice.scan else None
        if listed is None:
            return False
        try:
            return read_info(folder) != listed
        except CorruptCheckpointError:
            return not has_manifest(folder)

    return bool(broadcast_decision(_CALLER, replaced))


def log(line: str) -> None:
    """Print a line on rank 0."""
    if get_dist_info().rank == 0:
        print(f"dtrain: {_CALLER}: {line}", file=sys.stderr, flush=True)


def _previous_sound_step(folder: AnyPath, reason: str, on_corrupt: OnCorrupt) -> AnyPath:
    """Return the step to try instead of a corrupt step, chosen by rank 0, or raise the error that names this step."""
    older = (candidate.path for candidate in iter_sound_steps_before(folder))

    path = cast(str | None, broadcast_decision(_CALLER, lambda: next(map(str, older), None)))
    if path is None:
        raise CorruptCheckpointError(f"{_CALLER}: {folder} is corrupt: {reason}. The root has no older valid step.")
    if on_corrupt == "raise":
        raise CorruptCheckpointError(
            f"{_CALLER}: {folder} is corrupt: {reason}. The newest older valid step is {path}. Load that folder, or pass "
            "on_corrupt='previous'."
        )
    if get_dist_info().rank == 0:
        warn(f"{_CALLER}: {folder} is corrupt: {reason}. Loading {path} instead.")
    return storage.resolve_path(path)
