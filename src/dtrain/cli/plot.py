"""``dtrain plot``: pictures of what a run will use, without running it."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.cli.help import GroupedCommand
from dtrain.cli.text_plot import text_plot
from dtrain.errors import ConfigError, StepError, printable

if TYPE_CHECKING:
    from dtrain.planning.loaded import Loaded
    from dtrain.types import Schedule

EXAMPLES = """
dtrain plot schedule train.py:schedule --steps 10_000                  a sketch in the terminal
dtrain plot schedule train.py:schedule --steps 10_000 --output lr.png  a picture
dtrain plot schedule package.recipe:make_schedules --steps 1e6
"""

_WHERE = "plot schedule"
_EXAMPLE = "as in train.py:schedule or package.recipe:schedule"
_WIDEST, _HEIGHT = 80, 16

app = typer.Typer()


@app.callback(invoke_without_command=True)
def plot(context: typer.Context) -> int:
    """Draw what a run will use, without running it."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    return 0


@app.command(cls=GroupedCommand, epilog=EXAMPLES)
def schedule(
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="file.py:name or module:name: a schedule, several by name, or what makes them."),
    ],
    steps: Annotated[
        str, typer.Option("--steps", metavar="N", help="Length of the run, in what the schedule counts.", show_default=False)
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output", metavar="FILE", help="Write a picture (.png, .pdf, .svg) with matplotlib.", show_default=False
        ),
    ] = None,
) -> int:
    """Draw a schedule over the steps of a run.

    The file is imported, so a training loop in it belongs under `if __name__ == "__main__":`.

    Exit codes: 0 drawn; 1 the schedule failed; 2 bad usage.
    """
    length = _whole(steps)
    picture = None if output is None else _picture(output)
    # Inside: these import torch.
    from dtrain.planning.loaded import loaded, told
    from dtrain.schedules.plot import axis_of, plot_schedule, times_of, values_at

    with loaded(_WHERE, target, "schedule", _EXAMPLE) as found:
        schedules = _schedules(found)
        with told(f"{_WHERE}: {target!r} failed", StepError):
            times = times_of(length, _WIDEST)
            drawn = {name: values_at(f"{_WHERE}: {name!r}", each, times) for name, each in schedules.items()}
            if picture is not None:
                plot_schedule(schedules, length).savefig(picture)
                return 0
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    for name, values in drawn.items():
        typer.echo(f"{printable(name)}, {axis_of(_WHERE, schedules[name])} 0 to {length - 1}:")
        typer.echo(text_plot(times, values, width=width, height=_HEIGHT))
    return 0


def _schedules(found: Loaded) -> dict[str, Schedule]:
    """What the target names: a schedule, schedules by name, or a function without arguments that returns either."""
    from dtrain.planning.loaded import told

    value = found.value
    if not hasattr(found.module, found.name):
        raise ConfigError(f"{_WHERE}: {found.name!r} is not there in {found.place!r}; its functions are {found.functions()}")
    if callable(value) and not _takes(value, 0) and _takes(value):
        with told(f"{_WHERE}: {found.name!r} in {found.place!r} failed", ConfigError):
            value = value()
    schedules = {str(name): each for name, each in value.items()} if isinstance(value, Mapping) else {found.name: value}
    if not schedules:
        raise ConfigError(f"{_WHERE}: {found.name!r} in {found.place!r} has no schedules in it; as in {{'lr': schedule}}")
    for name, each in schedules.items():
        if not (callable(each) and _takes(each, 0)):
            raise ConfigError(
                f"{_WHERE}: {name!r} in {found.place!r} is no schedule, got {type(each).__name__}; a schedule is a function of "
                f"a number, and the functions there are {found.functions()}"
            )
    return schedules


def _takes(function: Any, *arguments: float) -> bool:
    """Whether it can be called with these."""
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


def _whole(text: str) -> int:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (number.is_integer() and 1 <= number < 1e15):
        raise ConfigError(f"{_WHERE}: --steps must be a whole number of at least 1, got {text!r}; 1000 is one")
    return int(number)


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"{_WHERE}: --output must be a file that ends with .png, .pdf or .svg, got {text!r}; as in lr.png")
    if not path.parent.is_dir():
        raise ConfigError(
            f"{_WHERE}: --output is in a folder that is not there, got {text!r}; make the folder, or choose another"
        )
    return path
