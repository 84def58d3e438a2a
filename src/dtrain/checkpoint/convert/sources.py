"""Where weights come from: which format a path is of, and its tensors by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path, PurePath
from typing import Literal, get_args

from dtrain import storage
from dtrain.checkpoint import foreign, layout
from dtrain.checkpoint.find import has_manifest, read_manifest
from dtrain.checkpoint.stored import Stored, in_checkpoint
from dtrain.checkpoint.verify import choose
from dtrain.errors import CheckpointError, ConfigError
from dtrain.storage import Place

Kind = Literal["dtrain", "hf", "dcp", "pt"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PICKLES = (".pt", ".pth", ".bin", ".ckpt")
_METADATA = ".metadata"  # of a folder of torch.distributed.checkpoint
_RUNS_CODE: tuple[Kind, ...] = ("dcp", "pt")
_PROGRAM = "dtrain.checkpoint.convert.trusted"
_WHERE = "convert"


def kind_of(path: Place) -> Kind:
    """The format that a path has by its names.

    Raises:
        CheckpointError: none that is known.
    """
    if storage.file_size(path) is not None:
        suffix = PurePath(path.name).suffix
        if suffix == foreign.SUFFIX:
            return "hf"
        if suffix in PICKLES:
            return "pt"
    elif storage.is_folder(path):
        if has_manifest(path):
            return "dtrain"
        if foreign.is_model_folder(path):
            return "hf"
        if storage.exists(path / _METADATA):
            return "dcp"
        names = storage.list_names(path)
        if any(layout.step_of(name) is not None for name in (path.name, *names)):
            return "dtrain"
        pickle = next((name for name in names if PurePath(name).suffix in PICKLES), None)
        if pickle is not None:
            raise CheckpointError(f"{_WHERE}: {path} is a folder of pickles; name one, such as {pickle}, and trust (--trust)")
    else:
        raise ConfigError(f"{_WHERE}: there is no file or folder {path}; check the path")
    raise CheckpointError(
        f"{_WHERE}: {path} is no checkpoint of dtrain, no folder with {foreign.MODEL} or {foreign.INDEX}, no {foreign.SUFFIX} "
        f"file, no folder of torch.distributed.checkpoint and no {PICKLES[0]} file; name its format"
    )


def check_trust(path: Place, kind: Kind, *, trust: bool) -> None:
    """Refuse what can run code unless it is trusted.

    Raises:
        ConfigError: it is not.
    """
    if kind in _RUNS_CODE and not trust:
        what = "a pickle" if kind == "pt" else "a folder of torch.distributed.checkpoint, which holds a pickle"
        raise ConfigError(
            f"{_WHERE}: {path} is {what}: reading it runs what is in it; pass trust (--trust) if you know who wrote it"
        )
    if kind in _RUNS_CODE and not isinstance(path, Path):
        raise ConfigError(f"{_WHERE}: {path} is not on this machine; copy it here first")


def open_weights(path: Place, kind: Kind, *, scratch: Path | None, key: str | None, state: str | None) -> Stored:
    """The tensors of a model by their names in it.

    Args:
        path: of this kind.
        kind: of the path.
        scratch: a new file, for kinds that run code: a process of its own copies the tensors into it.
        key: of those kinds, the dict that the tensors are in.
        state: of several states of a step of ours, the one that is meant.

    Raises:
        CheckpointError: it cannot be read.
        DamagedCheckpointError: it is not as it was written, as far as that can be known.
    """
    if kind == "dtrain":
        return _in_step(path, state)
    if kind == "hf":
        return foreign.in_folder(path) if storage.is_folder(path) else foreign.in_file(path)
    assert scratch is not None, "of a kind that runs code"
    within = [] if key is None else [key]  # "" is the dict at the top
    command = [sys.executable, "-W", "ignore", "-m", _PROGRAM, kind, str(path), str(scratch), *within]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"the reader ended with code {done.returncode}"]
        name, _, message = lines[-1].partition(": ")
        raise ConfigError(message) if name == ConfigError.__name__ else CheckpointError(message or lines[-1])
    return foreign.in_file(scratch)


def _in_step(path: Place, state: str | None) -> Stored:
    step = choose(path, _WHERE)
    if step is None:
        raise CheckpointError(f"{_WHERE}: there is no checkpoint in {path}")
    states = read_manifest(step).states
    if states and state is None:
        raise ConfigError(f"{_WHERE}: {step} holds the states {', '.join(map(repr, states))}; name one with state (--state)")
    return in_checkpoint(step, 0, state=state)
