"""Settings of a loop as plain data: what it was started with, to be read next year.

What was run: the record of an attempt, as ``runs`` says."""

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
from dtrain.run.redact import Redactor
from dtrain.typing import Plain
from dtrain.versions import git_commit, package_versions

_MAX_DEPTH = 20
_MAX_LENGTH = 1000  # entries of a list, characters of an object's text


def settings_to_plain(settings: Any) -> dict[str, Plain] | None:
    """Settings by name; what is no plain data becomes its text.

    Raises:
        ConfigError: neither a mapping, nor a dataclass, nor what argparse makes.
    """
    if settings is None:
        return None
    if not (isinstance(settings, Mapping | Namespace) or (is_dataclass(settings) and not isinstance(settings, type))):
        raise ConfigError(
            f"open_run: settings is a mapping, a dataclass or argparse's Namespace, got {type(settings).__name__}; "
            "as in settings=vars(args)"
        )
    found = to_plain_data(settings)
    assert isinstance(found, dict), "a mapping becomes one"
    return found


def to_plain_data(value: Any, depth: int = _MAX_DEPTH) -> Plain:
    """``value`` as JSON has it. Numbers that are not finite become text, and so does all that JSON knows nothing of."""
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
    except Exception:  # noqa: BLE001 - of the user's class; what is written down must not stop training
        return f"<{type(value).__name__}>"


_GIT_S = 2.0
_DRIVER_VERSION = Path("/sys/module/nvidia/version")
_VARIABLE_PREFIXES = (
    "ACCELERATE_", "CONDA_", "CUBLAS_", "CUDA_", "CUDNN_", "DTRAIN_", "FI_", "GLOO_", "GOMP_", "HF_", "HIP_", "HSA_", "KMP_",
    "LD_", "LSB_", "MALLOC_", "MASTER_", "MKL_", "MLFLOW_", "NCCL_", "NVIDIA_", "OMP_", "OMPI_", "OPENBLAS_", "PBS_", "PMI",
    "PYTHON", "PYTORCH_", "RANK", "ROCR_", "SLURM_", "TF32_", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_", "UCX_",
    "VIRTUAL_ENV", "WANDB_", "WORLD_SIZE", "XDG_CACHE_HOME",
)  # fmt: skip
"""What the names of variables begin with that change how a run behaves."""


def attempt_metadata(
    attempt: int, started_at: float, all_ranks: Sequence[Mapping[str, Any]], settings: Plain, redactor: Redactor, info: DistInfo
) -> dict[str, Plain]:
    """The content of an attempt's file.

    Args:
        all_ranks: by rank, what each has told of its ``host`` and ``device``.
        settings: plain data without secrets.
        redactor: what to leave out of the rest.
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
        "environment": dict(redactor.redact_variables(_select_variables(os.environ))),
        "launch": _launch_info(info),
    }


def device_name(info: DistInfo) -> str:
    """The kind of this rank's device."""
    return torch.cuda.get_device_name(info.device) if info.device.type == "cuda" else info.device.type


def _ranks_by(what: str, everyone: Sequence[Mapping[str, Any]]) -> Plain:
    found: dict[str, Plain] = {}
    for rank, told in enumerate(everyone):
        ranks = found.setdefault(told[what], [])
        assert isinstance(ranks, list)
        ranks.append(rank)
    return found


def _select_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in sorted(environment.items()) if name.startswith(_VARIABLE_PREFIXES)}


def _collect_versions() -> dict[str, Plain]:
    found: dict[str, Plain] = dict(package_versions())
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.version.hip:
        found["hip"] = torch.version.hip
    with suppress(OSError, UnicodeDecodeError):
        found["driver"] = _DRIVER_VERSION.read_text(encoding="utf-8").strip()
    return found


def _launch_info(info: DistInfo) -> Plain:
    if info.run_dir is None:
        return None
    text = os.environ.get(launch_protocol.RESTART_COUNT, "")
    return {"folder": str(info.run_dir), "restarts": int(text) if text.isascii() and text.isdecimal() else 0}


def _git_info(folder: Path) -> Plain:
    commit = git_commit(folder)
    return None if commit is None else {"commit": commit, "dirty": _has_uncommitted_changes(folder)}


def _has_uncommitted_changes(folder: Path) -> bool | None:
    """Whether files that git knows were changed; None where git is missing, or slow."""
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
    except OSError:  # deleted
        return ""
