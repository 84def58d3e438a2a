"""Collect the metadata of an attempt: settings as plain data, command, versions, devices and environment."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from dtrain import launch_protocol, run_layout
from dtrain.dist.init import DistInfo
from dtrain.errors import ConfigError
from dtrain.machine import recorded_variables
from dtrain.packages import git_commit, package_versions
from dtrain.run.redact import Redactor
from dtrain.typing import Plain

_MAX_DEPTH = 20
# entries of a list, characters of a text
_MAX_LENGTH = 1000


def settings_to_plain(settings: Any) -> dict[str, Plain] | None:
    """Convert settings to plain data by name. Other values become text.

    Raises:
        ConfigError: ``settings`` is neither a mapping, a dataclass nor an ``argparse.Namespace``.
    """
    if settings is None:
        return None
    if not (isinstance(settings, Mapping | Namespace) or (is_dataclass(settings) and not isinstance(settings, type))):
        raise ConfigError(
            f"open_run: settings must be a mapping, a dataclass or an argparse.Namespace, got {type(settings).__name__}. "
            "Pass settings=vars(args), for example."
        )
    plain = to_plain_data(settings)
    assert isinstance(plain, dict), "a mapping becomes a dict"
    return plain


def to_plain_data(value: Any, depth: int = _MAX_DEPTH) -> Plain:
    """Convert a value to plain JSON data. Non-finite numbers and objects without a JSON form become text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | int) and not isinstance(value, Enum):
        return str(value) if isinstance(value, str) else int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, Enum):
        return value.name
    if depth and isinstance(value, Mapping | Namespace):
        pairs = value.items() if isinstance(value, Mapping) else vars(value).items()
        return {str(key): to_plain_data(each, depth - 1) for key, each in pairs}
    if depth and is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain_data(getattr(value, field.name, None), depth - 1) for field in fields(value)}
    if depth and isinstance(value, list | tuple | Set):
        return [to_plain_data(each, depth - 1) for each in list(value)[:_MAX_LENGTH]]
    return _to_text(value)


def _to_text(value: Any) -> str:
    try:
        return str(value)[:_MAX_LENGTH]
    except Exception:  # noqa: BLE001 - an error in the user's class must not stop training
        return f"<{type(value).__name__}>"


_GIT_S = 2.0
_DRIVER_VERSION = Path("/sys/module/nvidia/version")


def attempt_metadata(
    attempt: int, started_at: float, all_ranks: Sequence[Mapping[str, Any]], settings: Plain, redactor: Redactor, info: DistInfo
) -> dict[str, Plain]:
    """Return the content of the file of an attempt.

    Args:
        all_ranks: ``host`` and ``device`` of each rank, in order.
        settings: plain data without secrets.
        redactor: redactor for the remaining entries.
    """
    folder = _working_dir()
    return {
        "format": run_layout.FORMAT,
        "attempt": attempt,
        "started_at": started_at,
        "world_size": len(all_ranks),
        "hosts": _ranks_by("host", all_ranks),
        "devices": _ranks_by("device", all_ranks),
        "command": list(redactor.redact_command(sys.argv)),
        "python": sys.executable,
        "folder": folder,
        "settings": settings,
        "git": _git_info(_script_folder() or Path(folder)),
        "versions": _collect_versions(),
        "environment": dict(redactor.redact_variables(recorded_variables(os.environ))),
        "launch": _launch_info(info),
    }


def _ranks_by(key: str, all_ranks: Sequence[Mapping[str, Any]]) -> Plain:
    ranks_by_value: dict[str, Plain] = {}
    for rank, facts in enumerate(all_ranks):
        ranks = ranks_by_value.setdefault(facts[key], [])
        assert isinstance(ranks, list)
        ranks.append(rank)
    return ranks_by_value


def _collect_versions() -> dict[str, Plain]:
    versions: dict[str, Plain] = dict(package_versions())
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    if torch.version.hip:
        versions["hip"] = torch.version.hip
    with suppress(OSError, UnicodeDecodeError):
        versions["driver"] = _DRIVER_VERSION.read_text(encoding="utf-8").strip()
    return versions


def _launch_info(info: DistInfo) -> Plain:
    if info.run_dir is None:
        return None
    text = os.environ.get(launch_protocol.RESTART_COUNT, "")
    return {"folder": str(info.run_dir), "restarts": int(text) if text.isascii() and text.isdecimal() else 0}


def _git_info(folder: Path) -> Plain:
    commit = git_commit(folder)
    return None if commit is None else {"commit": commit, "dirty": _has_uncommitted_changes(folder)}


def _has_uncommitted_changes(folder: Path) -> bool | None:
    """Return True if tracked files have changes; None if git is missing or slow."""
    command = ["git", "--no-optional-locks", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return bool(done.stdout.strip()) if done.returncode == 0 else None


def _script_folder() -> Path | None:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(script).absolute().parent if script else None


def _working_dir() -> str:
    try:
        return os.getcwd()
    # The folder was deleted.
    except OSError:
        return ""
