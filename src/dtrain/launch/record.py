"""``launch.json``: what was run, where, and with which versions. The values of the environment stay out of it."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from dtrain import __version__
from dtrain.launch.plan import LaunchPlan

NAME = "launch.json"
_HASH = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


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


def versions() -> dict[str, str]:
    """dtrain's, Python's and torch's version; torch's is "none" where it is not installed. Imports nothing for it."""
    return {"dtrain": __version__, "python": platform.python_version(), "torch": _torch_version() or "none"}


def git_commit(folder: Path) -> str | None:
    """The commit that is checked out in ``folder``, or None where that cannot be told. Reads files, and runs nothing."""
    try:
        git = next((path / ".git" for path in (folder, *folder.parents) if (path / ".git").exists()), None)
        if git is None:
            return None
        if git.is_file():  # a work tree or a submodule: its files are elsewhere
            git = git.parent / _text(git).removeprefix("gitdir:").strip()
        head = _text(git / "HEAD")
        name = head.removeprefix("ref:").strip()
        commit = _resolve(git, name) if head.startswith("ref:") else head
    except (OSError, UnicodeDecodeError):
        return None
    return commit if commit is not None and _HASH.fullmatch(commit) else None


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


def _torch_version() -> str | None:
    """From torch's own file: the packages' metadata take a library that costs more than the rest of the launcher's start."""
    spec = PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    match = re.search(r"^__version__ = ['\"](.+?)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _resolve(git: Path, name: str) -> str | None:
    """The commit that a reference stands for: a file of its own, or a line in the file of packed ones."""
    common = git / _text(git / "commondir") if (git / "commondir").is_file() else git
    for folder in (git, common):
        if (folder / name).is_file():
            return _text(folder / name)
    lines = _text(common / "packed-refs").splitlines()
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip()
