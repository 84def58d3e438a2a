"""Which steps to remove: a pure function, and the removal, which takes the manifest first."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from pathlib import Path

from dtrain import storage
from dtrain.checkpoint import layout
from dtrain.errors import ConfigError


def plan_retention(steps: Sequence[int], keep_last: int | None, protected: Collection[int] = ()) -> list[int]:
    """The steps to remove so that the last ``keep_last`` remain, and all protected ones.

    Args:
        steps: the committed steps, in the order in which they were committed.
        keep_last: how many of the last ones stay, at least 1; None keeps all.
        protected: steps that stay in any case.

    >>> plan_retention([100, 200, 300, 400], 2, protected={100})
    [200]

    Raises:
        ConfigError: ``keep_last`` is neither None nor a whole number of at least 1.
    """
    if keep_last is None:
        return []
    if type(keep_last) is not int or keep_last < 1:
        raise ConfigError(f"keep_last must be a whole number of at least 1, or None to keep all, got {keep_last!r}")
    return [step for step in steps[:-keep_last] if step not in protected]


def discard(folder: Path, step: int, run_id: str) -> None:
    """Remove a step for good: first its name, in one rename, so that it is a checkpoint or is not; then its manifest.

    What an interrupted removal leaves is a side folder of the run, which its next save removes.
    """
    aside = folder.with_name(layout.side_name(step, "old", run_id, secrets.token_hex(4)))
    storage.rename(folder, aside)
    storage.remove_folder(aside, first=layout.MANIFEST)
