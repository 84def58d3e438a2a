"""``upload_run``: the folder of a run, copied to where its checkpoints are."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from dtrain import runs, spans, storage
from dtrain.dist.init import current
from dtrain.errors import ConfigError
from dtrain.observe.run.opened import Run
from dtrain.storage import Place

_FOLDER = "run"
_NOT_OURS = "checkpoints"


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
    place = storage.place(root)
    target = place / _FOLDER
    if isinstance(target, Path) and (target == run.folder or target in run.folder.parents):
        raise ConfigError(f"upload_run: {run.folder} is what would be written; give another root")
    sent, made, count = run.uploaded.setdefault(str(place), {}), set[Place](), 0
    try:
        for path in _files(run):
            name = path.relative_to(run.folder).as_posix()
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
        spans.event("dropped", sink="upload", error=str(error)[:500])
        warnings.warn(
            f"upload_run: cannot copy {run.folder} to {target} ({error}); training goes on", RuntimeWarning, stacklevel=2
        )
    return count


def _files(run: Run) -> Iterator[Path]:
    """What this rank sends; no copy that lies in the folder itself."""
    ledger = run.folder / runs.LEDGER
    left_out = {ledger, run.folder / _NOT_OURS, *(Path(place) / _FOLDER for place in run.uploaded)}
    if run.rank == 0:
        for folder, below, names in os.walk(run.folder):
            here = Path(folder)
            below[:] = sorted(each for each in below if here / each not in left_out)
            yield from (here / name for name in sorted(names) if (here / name).is_file())
    mine = ledger / runs.ledger_name(run.rank)
    if mine.is_file():
        yield mine
    if run.rank == 0:
        ranks = current().world_size
        yield from (path for path in sorted(ledger.iterdir()) if (runs.rank_of(path.name) or 0) >= ranks)
