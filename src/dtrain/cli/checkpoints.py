"""``dtrain checkpoints``: what a root of checkpoints holds, and whether its bytes are those that were written."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain import storage
from dtrain.errors import CheckpointError, ConfigError, DamagedCheckpointError

# dtrain.checkpoint imports torch: it is imported by the commands that need it, so that no other one waits for it.
if TYPE_CHECKING:
    from dtrain.checkpoint.find import Committed, Damaged

_DAMAGED = 1
_COLUMNS = ("", "step", "committed at", "size", "ranks", "run", "parent", "manifest")

app = typer.Typer()


@app.callback(invoke_without_command=True)
def checkpoints(context: typer.Context) -> int:
    """List and verify checkpoints; changes nothing."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    return 0


@app.command("list")
def list_steps(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="Folder that save_sharded was given.", show_default=False)],
) -> int:
    """List the committed steps of a root.

    They come in the order of their commits, damaged ones last; * marks the one that loading takes. Of each step only the
    manifest is read: see `dtrain checkpoints verify`.

    Exit codes: 0 listed, whatever is damaged; 1 the root cannot be read; 2 bad usage.
    """
    folder = _existing(root, "list")
    if _is_step(folder):
        raise ConfigError(f"checkpoints: list: {root!r} is the folder of one step; name the folder that it is in")
    steps, newest = _steps(folder, "list")
    if not steps:
        typer.echo(f"no checkpoints in {root}")
        return 0
    rows = [_COLUMNS, *(_row(step, latest=step.path == newest) for step in steps)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(_COLUMNS))]
    for row in rows:
        typer.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


@app.command("verify")
def verify(
    path: Annotated[str, typer.Argument(metavar="ROOT_OR_STEP", help="A step's folder, or a root: its newest step.")],
    every: Annotated[bool, typer.Option("--all", help="Every step of the root, not only the newest.")] = False,
) -> int:
    """Compare every byte of a step with its digests.

    One line per step. Steps without a manifest are saves that were not completed, and are left out; a step that a run removes
    meanwhile is no error.

    Exit codes: 0 all is as it was written; 1 a step is damaged or cannot be read; 2 bad usage, or nothing to verify.
    """
    good = True
    for folder in _chosen(path, every=every):
        problem, text = _verified(folder)
        typer.echo(f"{folder.name}: {text}")
        good = good and not problem
    return 0 if good else _DAMAGED


def _verified(folder: Path) -> tuple[bool, str]:
    """Whether a step has a problem, and what there is to say about it in one line."""
    from dtrain.checkpoint.find import describe
    from dtrain.checkpoint.verify import verify_deeply

    try:
        verify_deeply(folder)
        step = describe(folder)
    except (CheckpointError, OSError) as error:
        if not storage.exists(folder):  # a step is removed by renaming it first
            return False, "removed while it was read"
        what = "damaged" if isinstance(error, DamagedCheckpointError) else "cannot be read"
        return True, f"{what}: {_one_line(error)}"
    return False, f"ok, {_size(step.bytes)} of {step.world_size} rank{'s' * (step.world_size != 1)}"


def _chosen(path: str, *, every: bool) -> list[Path]:
    """The folders to verify, at least one, in the order of their steps."""
    folder = _existing(path, "verify")
    if every and _is_step(folder):
        raise ConfigError(f"checkpoints: verify: {path!r} is the folder of one step; leave out --all")
    steps, newest = _steps(folder, "verify")
    if newest is None:
        raise ConfigError(f"checkpoints: verify: no checkpoints in {path!r}; name a step, or the folder that steps are in")
    return [step.path for step in sorted(steps, key=lambda step: step.step)] if every else [newest]


def _steps(folder: Path, command: str) -> tuple[list[Committed | Damaged], Path | None]:
    """The steps of a root, and the one that loading takes; of a step's own folder no steps, and itself."""
    from dtrain.checkpoint.find import survey
    from dtrain.checkpoint.verify import choose

    try:
        committed, damaged = survey(folder)
        return [*committed, *damaged], choose(folder, f"checkpoints: {command}")
    except OSError as error:
        raise CheckpointError(f"checkpoints: {command}: {error}") from error


def _existing(path: str, command: str) -> Path:
    # An empty path would be the current folder: it comes from a variable that is not set.
    if not path or not storage.is_folder(folder := storage.real_path(path)):
        raise ConfigError(f"checkpoints: {command}: no such folder: {path!r}; check the path")
    return folder


def _is_step(folder: Path) -> bool:
    from dtrain.checkpoint import layout
    from dtrain.checkpoint.find import has_manifest

    return has_manifest(folder) or layout.step_of(folder.name) is not None


def _row(step: Committed | Damaged, *, latest: bool) -> tuple[str, ...]:
    from dtrain.checkpoint.find import Damaged
    from dtrain.checkpoint.layout import MANIFEST

    try:  # the manifest is the last file of a step that is written
        when = f"{datetime.fromtimestamp((step.path / MANIFEST).lstat().st_mtime):%Y-%m-%d %H:%M:%S}"
    except FileNotFoundError:  # a run has just removed the step
        when = "-"
    mark, number = "*" * latest, str(step.step)
    if isinstance(step, Damaged):
        return mark, number, when, "-", "-", "-", "-", f"damaged: {step.reason}"
    parent = "-" if step.parent_step is None else str(step.parent_step)
    return mark, number, when, _size(step.bytes), str(step.world_size), step.run_id[:8], parent, "valid"


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
