"""Resolve paths and URLs of the command line to roots and steps. Imports torch only inside functions."""

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
    """Return the folder at ``path``.

    Raises:
        ConfigError: the folder does not exist.
    """
    # An empty path usually comes from an unset variable, and would mean the current folder.
    if not path or not storage.is_folder(folder := storage.resolve_path(path)):
        raise ConfigError(f"checkpoints: {command}: no such folder: {path!r}. Check the path.")
    return folder


def find_root(path: str, command: str) -> AnyPath:
    """Return the folder at ``path``, which must not be the folder of one step.

    Raises:
        ConfigError: the folder does not exist, or is the folder of a step.
    """
    folder = find_folder(path, command)
    if is_step_folder(folder):
        raise ConfigError(
            f"checkpoints: {command}: {path!r} is the folder of one step. Name the folder that contains the step."
        )
    return folder


def is_step_folder(folder: AnyPath) -> bool:
    """Return True if the folder is, or was meant to be, a step."""
    from dtrain.checkpoint import layout
    from dtrain.checkpoint.checkpoint_info import has_manifest

    return has_manifest(folder) or layout.step_of(folder.name) is not None


def list_root_steps(folder: AnyPath, command: str) -> tuple[list[CheckpointInfo | CorruptStep], AnyPath | None]:
    """Return the steps of a root and the step that loading uses. For the folder of a step, return no steps and the folder.

    Raises:
        CheckpointError: the root cannot be read.
    """
    from dtrain.checkpoint.checkpoint_info import scan_root
    from dtrain.checkpoint.reader import choose_step

    try:
        committed, corrupt = scan_root(folder)
        return [*committed, *corrupt], choose_step(folder, f"checkpoints: {command}")
    except OSError as error:
        raise CheckpointError(f"checkpoints: {command}: {error}") from error


def find_step(path: str, command: str) -> AnyPath:
    """Return the step at ``path``, or the newest step of the root at ``path``.

    Raises:
        ConfigError: there is no step.
        CheckpointError: the folder cannot be read.
    """
    _, newest = list_root_steps(find_folder(path, command), command)
    if newest is None:
        raise no_checkpoints_error(path, command)
    return newest


def no_checkpoints_error(path: str, command: str) -> ConfigError:
    """Build the error for a root without steps."""
    return ConfigError(f"checkpoints: {command}: no checkpoints in {path!r}. Name a step, or the folder that contains steps.")
