"""What was run: the record of an attempt, as ``runs`` says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dtrain import runs, wire
from dtrain.dist.init import DistInfo
from dtrain.observe.run.secrets import Redaction
from dtrain.types import Plain
from dtrain.versions import git_commit, versions

_GIT_S = 2.0
_DRIVER = Path("/sys/module/nvidia/version")
_VARIABLES = (
    "ACCELERATE_", "CONDA_", "CUBLAS_", "CUDA_", "CUDNN_", "DTRAIN_", "FI_", "GLOO_", "GOMP_", "HF_", "HIP_", "HSA_", "KMP_",
    "LD_", "LSB_", "MALLOC_", "MASTER_", "MKL_", "MLFLOW_", "NCCL_", "NVIDIA_", "OMP_", "OMPI_", "OPENBLAS_", "PBS_", "PMI",
    "PYTHON", "PYTORCH_", "RANK", "ROCR_", "SLURM_", "TF32_", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_", "UCX_",
    "VIRTUAL_ENV", "WANDB_", "WORLD_SIZE", "XDG_CACHE_HOME",
)  # fmt: skip
"""What the names of variables begin with that change how a run behaves."""


def about(
    attempt: int, started_at: float, everyone: Sequence[Mapping[str, Any]], settings: Plain, secret: Redaction, info: DistInfo
) -> dict[str, Plain]:
    """The content of an attempt's file.

    Args:
        everyone: by rank, what each has told of its ``host`` and ``device``.
        settings: plain data without secrets.
        secret: what to leave out of the rest.
    """
    folder = _folder()
    return {
        "format": runs.FORMAT,
        "attempt": attempt,
        "started_at": started_at,
        "world_size": len(everyone),
        "hosts": _ranks_by("host", everyone),
        "devices": _ranks_by("device", everyone),
        "command": list(secret.command(sys.argv)),
        "python": sys.executable,
        "folder": folder,
        "settings": settings,
        "git": _git(_script_folder() or Path(folder)),
        "versions": _versions(),
        "environment": dict(secret.variables(_chosen(os.environ))),
        "launch": _launch(info),
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


def _chosen(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in sorted(environment.items()) if name.startswith(_VARIABLES)}


def _versions() -> dict[str, Plain]:
    found: dict[str, Plain] = dict(versions())
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.version.hip:
        found["hip"] = torch.version.hip
    with suppress(OSError, UnicodeDecodeError):
        found["driver"] = _DRIVER.read_text(encoding="utf-8").strip()
    return found


def _launch(info: DistInfo) -> Plain:
    if info.run_dir is None:
        return None
    text = os.environ.get(wire.RESTART_COUNT, "")
    return {"folder": str(info.run_dir), "restarts": int(text) if text.isascii() and text.isdecimal() else 0}


def _git(folder: Path) -> Plain:
    commit = git_commit(folder)
    return None if commit is None else {"commit": commit, "dirty": _dirty(folder)}


def _dirty(folder: Path) -> bool | None:
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


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # deleted
        return ""
