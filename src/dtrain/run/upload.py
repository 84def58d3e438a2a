"""Copy the folder of a run to the root of its checkpoints (``upload_run``)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain import run_layout, spans, storage
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.storage import AnyPath

if TYPE_CHECKING:
    from dtrain.run.run_dir import Run

_TARGET_FOLDER = "run"
_EXCLUDED_FOLDER = "checkpoints"


def upload_run(run: Run, root: str | Path) -> int:
    """Copy the changed files of the run's folder to ``run/`` below ``root``, and return the number of copied files.

    Rank 0 copies everything except ``checkpoints/``; every rank copies its own ledger. Rank 0 also copies ledgers of earlier
    attempts with more ranks. On a new machine, restore the files of earlier attempts first; else they are replaced.

    Call this function after a checkpoint, or let ``open_run(upload=...)`` do so at the end. A failure causes one warning and
    an event in the ledger.

    Args:
        run: result of ``open_run``.
        root: root of the checkpoints, a folder or a URL.

    Mutates: files below ``root``; ``run.uploaded``.
    Collective: none.

    Example:
        import dtrain as dt

        run = dt.open_run("runs/gpt")
        if state.crossed("1000ba"):
            dt.save_sharded("s3://bucket/gpt", state)
            dt.run.upload_run(run, "s3://bucket/gpt")

    Raises:
        ConfigError: ``root`` is not a valid target.
    """
    root_path = storage.resolve_path(root)
    target = root_path / _TARGET_FOLDER
    if isinstance(target, Path) and (target == run.path or target in run.path.parents):
        raise ConfigError(f"upload_run: root must be outside of the run's folder, got {run.path} as target. Pass another root.")
    sent, created, count = run._uploaded.setdefault(str(root_path), {}), set[AnyPath](), 0
    try:
        for path in _iter_files(run):
            name = path.relative_to(run.path).as_posix()
            try:
                status = path.stat()
                state = (status.st_size, status.st_mtime_ns)
                if sent.get(name) == state:
                    continue
                content = path.read_bytes()[: status.st_size]
            # The thread of a logger may remove or rename files.
            except FileNotFoundError:
                continue
            destination = target / name
            if destination.parent not in created:
                storage.make_folders(destination.parent)
                created.add(destination.parent)
            storage.replace_file(destination, content)
            sent[name] = state
            count += 1
    except Exception as error:  # noqa: BLE001 - any error of a server's library must not stop training
        spans.record_event("dropped", logger="upload", error=str(error)[:500])
        warnings.warn(
            f"upload_run: cannot copy {run.path} to {target}: {error}. Training continues.", RuntimeWarning, stacklevel=2
        )
    return count


def _iter_files(run: Run) -> Iterator[Path]:
    """Yield the files that this rank copies, without copies inside the folder itself."""
    ledger = run.path / run_layout.LEDGER
    excluded = {ledger, run.path / _EXCLUDED_FOLDER, *(Path(root) / _TARGET_FOLDER for root in run._uploaded)}
    if run.rank == 0:
        for folder, subfolders, names in os.walk(run.path):
            parent = Path(folder)
            subfolders[:] = sorted(each for each in subfolders if parent / each not in excluded)
            yield from (parent / name for name in sorted(names) if (parent / name).is_file())
    own_ledger = ledger / run_layout.ledger_name(run.rank)
    if own_ledger.is_file():
        yield own_ledger
    if run.rank == 0:
        ranks = get_dist_info().world_size
        yield from (path for path in sorted(ledger.iterdir()) if (run_layout.parse_rank(path.name) or 0) >= ranks)
