"""``launch.json``: what was run, where, and with which versions. The values of the environment stay out of it."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from dtrain.launch.plan import LaunchPlan
from dtrain.versions import git_commit, versions

NAME = "launch.json"


def write_record(plan: LaunchPlan, *, command: Sequence[str], variables: Iterable[str], now: datetime) -> str | None:
    """Write ``launch.json`` into the folder of the launch, whole or not at all.

    Args:
        command: this process's command line.
        variables: names in its environment. Their values may be secrets, and are not asked for.
        now: when it was started, with its time zone.

    Returns:
        A line of warning when it cannot be written: that is no reason not to train.
    """
    path = plan.run_dir / NAME if plan.layout.node_rank == 0 else plan.run_dir / f"launch-{plan.layout.node_rank}.json"
    partial = path.with_suffix(".partial")
    text = json.dumps(_record(plan, command, variables, now), indent=2)
    try:
        partial.write_text(text + "\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        return f"launch: cannot write {str(path)!r}: {error.strerror}; going on without a record of what was run"
    return None


def _record(plan: LaunchPlan, command: Sequence[str], variables: Iterable[str], now: datetime) -> dict[str, Any]:
    options = {name: value for name, value in asdict(plan).items() if name not in ("target", "layout", "run_dir", "output")}
    shown = plan.output.shown
    folder = _current_folder()
    return {
        "target": asdict(plan.target),
        "layout": asdict(plan.layout),
        "options": options | {"output": {**asdict(plan.output), "shown": None if shown is None else sorted(shown)}},
        "command": list(command),
        "started_at": now.isoformat(timespec="seconds"),
        "host": platform.node(),
        "folder": folder,
        "git_commit": git_commit(Path(folder)),
        "versions": {**versions(), "interpreter": sys.executable},
        "environment": sorted(variables),
    }


def _current_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # deleted
        return ""
