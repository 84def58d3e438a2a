"""The folder of one launch: where the ranks leave their failure records."""

from __future__ import annotations

import os
from datetime import datetime
from itertools import count
from pathlib import Path

from dtrain.errors import ConfigError


def create_run_dir(asked: str | None, *, now: datetime) -> Path:
    """Make the folder of a launch and return its absolute path.

    ``asked`` may exist already: records of an earlier launch in it are removed, nothing else is touched. By default it
    is ``runs/<date and time>`` in the current folder, which is always a new one.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    if asked is not None and not asked.strip():
        raise ConfigError("launch: --run-dir is empty; name a folder, or leave the option out")
    wanted = Path(asked) if asked is not None else Path("runs") / now.strftime("%Y-%m-%dT%H-%M-%S")
    try:
        run_dir = _make(wanted.absolute(), reuse=asked is not None)
        failures = run_dir / "failures"
        failures.mkdir(exist_ok=True)
        for stale in (*failures.glob("rank-*.json"), *failures.glob("rank-*.partial")):
            stale.unlink()
        if not os.access(failures, os.W_OK | os.X_OK):
            raise PermissionError(0, "not writable")
    except OSError as error:
        raise ConfigError(
            f"launch: cannot use {str(wanted)!r} as the run folder: {error.strerror}; choose one with --run-dir"
        ) from None
    return run_dir


def _make(wanted: Path, *, reuse: bool) -> Path:
    if reuse:
        wanted.mkdir(parents=True, exist_ok=True)
        return wanted
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for attempt in count(1):  # another launch may have begun in the same second
        candidate = wanted if attempt == 1 else wanted.with_name(f"{wanted.name}-{attempt}")
        try:
            candidate.mkdir()
        except FileExistsError:
            continue
        return candidate
    raise AssertionError("unreachable: count() has no end")
