"""What paths and URLs on the command line stand for. dtrain.checkpoint imports torch, so it is imported where it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dtrain import storage
from dtrain.errors import CheckpointError, ConfigError
from dtrain.storage import Place

if TYPE_CHECKING:
    from dtrain.checkpoint.find import Committed, Damaged

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]


def existing(path: str, command: str) -> Place:
    """The folder of this path.

    Raises:
        ConfigError: there is none.
    """
    # An empty path would be the current folder: it comes from a variable that is not set.
    if not path or not storage.is_folder(folder := storage.place(path)):
        raise ConfigError(f"checkpoints: {command}: no such folder: {path!r}; check the path")
    return folder


def root_of(path: str, command: str) -> Place:
    """The folder of this path, which must not be that of one step.

    Raises:
        ConfigError: there is none, or it is.
    """
    folder = existing(path, command)
    if is_step(folder):
        raise ConfigError(f"checkpoints: {command}: {path!r} is the folder of one step; name the folder that it is in")
    return folder


def is_step(folder: Place) -> bool:
    """Whether the folder is, or was to be, that of a step."""
    from dtrain.checkpoint import layout
    from dtrain.checkpoint.find import has_manifest

    return has_manifest(folder) or layout.step_of(folder.name) is not None


def steps_of(folder: Place, command: str) -> tuple[list[Committed | Damaged], Place | None]:
    """The steps of a root, and the one that loading takes; of a step's own folder no steps, and itself.

    Raises:
        CheckpointError: it cannot be read.
    """
    from dtrain.checkpoint.find import survey
    from dtrain.checkpoint.verify import choose

    try:
        committed, damaged = survey(folder)
        return [*committed, *damaged], choose(folder, f"checkpoints: {command}")
    except OSError as error:
        raise CheckpointError(f"checkpoints: {command}: {error}") from error


def step_in(path: str, command: str) -> Place:
    """The step that a path stands for: itself, or the newest of a root.

    Raises:
        ConfigError: there is none.
        CheckpointError: it cannot be read.
    """
    _, newest = steps_of(existing(path, command), command)
    if newest is None:
        raise nothing_in(path, command)
    return newest


def nothing_in(path: str, command: str) -> ConfigError:
    """The error of a root without steps."""
    return ConfigError(f"checkpoints: {command}: no checkpoints in {path!r}; name a step, or the folder that steps are in")
