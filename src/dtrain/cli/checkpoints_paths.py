"""What paths and URLs on the command line stand for. dtrain.checkpoint imports torch, so it is imported where it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dtrain import storage
from dtrain.errors import CheckpointError, ConfigError
from dtrain.storage import AnyPath

if TYPE_CHECKING:
    from dtrain.checkpoint.checkpoint_info import CheckpointInfo, CorruptStep

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


def find_folder(path: str, command: str) -> AnyPath:
    """The folder of this path.

    Raises:
        ConfigError: there is none.
    """
    # An empty path would be the current folder: it comes from a variable that is not set.
    if not path or not storage.is_folder(folder := storage.resolve_path(path)):
        raise ConfigError(f"checkpoints: {command}: no such folder: {path!r}; check the path")
    return folder


def find_root(path: str, command: str) -> AnyPath:
    """The folder of this path, which must not be that of one step.

    Raises:
        ConfigError: there is none, or it is.
    """
    folder = find_folder(path, command)
    if is_step_folder(folder):
        raise ConfigError(f"checkpoints: {command}: {path!r} is the folder of one step; name the folder that it is in")
    return folder


def is_step_folder(folder: AnyPath) -> bool:
    """Whether the folder is, or was to be, that of a step."""
    from dtrain.checkpoint import layout
    from dtrain.checkpoint.checkpoint_info import has_manifest

    return has_manifest(folder) or layout.step_of(folder.name) is not None


def list_root_steps(folder: AnyPath, command: str) -> tuple[list[CheckpointInfo | CorruptStep], AnyPath | None]:
    """The steps of a root, and the one that loading takes; of a step's own folder no steps, and itself.

    Raises:
        CheckpointError: it cannot be read.
    """
    from dtrain.checkpoint.checkpoint_info import scan_root
    from dtrain.checkpoint.reader import choose_step

    try:
        committed, damaged = scan_root(folder)
        return [*committed, *damaged], choose_step(folder, f"checkpoints: {command}")
    except OSError as error:
        raise CheckpointError(f"checkpoints: {command}: {error}") from error


def find_step(path: str, command: str) -> AnyPath:
    """The step that a path stands for: itself, or the newest of a root.

    Raises:
        ConfigError: there is none.
        CheckpointError: it cannot be read.
    """
    _, newest = list_root_steps(find_folder(path, command), command)
    if newest is None:
        raise no_checkpoints_error(path, command)
    return newest


def no_checkpoints_error(path: str, command: str) -> ConfigError:
    """The error of a root without steps."""
    return ConfigError(f"checkpoints: {command}: no checkpoints in {path!r}; name a step, or the folder that steps are in")
