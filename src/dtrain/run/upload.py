"""``upload_run``: the folder of a run, copied to where its checkpoints are."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from dtrain import run_layout, spans, storage
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.run.run_dir import Run
from dtrain.storage import AnyPath

_TARGET_FOLDER = "run"
_EXCLUDED_FOLDER = "checkpoints"


def upload_run(run: Run, root: str | Path) -> int:
    """Copy the run's folder to ``run/`` below ``root``, and return how many files were sent: those that changed since.

    Rank 0 sends what is in the folder but for ``checkpoints/``, every rank its own ledger; those of earlier attempts with more
    ranks are rank 0's. A machine without the earlier attempts' files must get them back first, or they are replaced.

    Call it where checkpoints are written, or let ``open_run(upload=...)`` do so at the end. A failure is one warning, and an
    event in the ledger.

    Args:
        run: from ``open_run``.
        root: the checkpoints' root, a folder or a URL.

    Mutates: files below ``root``; ``run.uploaded``.
    Collective: none.

    Raises:
        ConfigError: a root that is no place to keep files.
    """
    place = storage.resolve_path(root)
    target = place / _TARGET_FOLDER
    if isinstance(target, Path) and (target == run.path or target in run.path.parents):
        raise ConfigError(f"upload_run: {run.path} is what would be written; give another root")
    sent, made, count = run.uploaded.setdefault(str(place), {}), set[AnyPath](), 0
    try:
        for path in _iter_files(run):
            name = path.relative_to(run.path).as_posix()
            try:
                status = path.stat()
                state = (status.st_size, status.st_mtime_ns)
                if sent.get(name) == state:
                    continue
                content = path.read_bytes()[: status.st_size]
            except FileNotFoundError:  # a sink's thread has taken it away, or given it another name
                continue
            there = target / name
            if there.parent not in made:
                storage.make_folders(there.parent)
                made.add(there.parent)
            storage.replace_file(there, content)
            sent[name] = state
            count += 1
    except Exception as error:  # noqa: BLE001 - a server's library raises what it likes; a copy must not stop training
        spans.record_event("dropped", sink="upload", error=str(error)[:500])
        warnings.warn(
            f"upload_run: cannot copy {run.path} to {target} ({error}); training goes on", RuntimeWarning, stacklevel=2
        )
    return count


def _iter_files(run: Run) -> Iterator[Path]:
    """What this rank sends; no copy that lies in the folder itself."""
    ledger = run.path / run_layout.LEDGER
    left_out = {ledger, run.path / _EXCLUDED_FOLDER, *(Path(place) / _TARGET_FOLDER for place in run.uploaded)}
    if run.rank == 0:
        for folder, below, names in os.walk(run.path):
            here = Path(folder)
            below[:] = sorted(each for each in below if here / each not in left_out)
            yield from (here / name for name in sorted(names) if (here / name).is_file())
    mine = ledger / run_layout.ledger_name(run.rank)
    if mine.is_file():
        yield mine
    if run.rank == 0:
        ranks = get_dist_info().world_size
        yield from (path for path in sorted(ledger.iterdir()) if (run_layout.parse_rank(path.name) or 0) >= ranks)
