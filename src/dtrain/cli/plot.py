"""Define ``dtrain plot``: draw schedules as text in the terminal, or as a picture."""

from __future__ import annotations

import inspect
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.arguments import check_int
from dtrain.cli.parameters import OTHER_HEADING, command_group, option
from dtrain.errors import ConfigError, StepError, escape_unprintable

if TYPE_CHECKING:
    from dtrain.planning.workload import ImportedTarget
    from dtrain.typing import Schedule


_TICKS = 4
_MIN_COLUMNS = 8


def draw_text_plot(times: Sequence[float], values: Sequence[float], *, width: int, height: int) -> str:
    """Draw ``values`` over ``times`` as lines of text, without a line end.

    >>> print(draw_text_plot([0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0], width=11, height=4))
    3 |      **
    2 |    **
    1 |  **
    0 |**
      +--------
       0      3

    Args:
        times: increasing times, at least one.
        values: one value per time; if there are more values than columns, some values are drawn, including the first and the
            last.
        width: columns of a line; the curve has at least 8 columns.
        height: lines of the curve, at least 2.
    """
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    labeled = {0} if high == low else {*range(0, height, max(height // _TICKS, 1)), height - 1}
    labels = {line: f"{high - span * line / (height - 1):.4g}" for line in labeled}
    margin = max(len(label) for label in labels.values())
    columns = max(width - margin - 2, _MIN_COLUMNS)
    rows = [[" "] * columns for _ in range(height)]
    for column in range(columns):
        # Few values get equal widths; of many values the first and the last are shown.
        few, count = len(values) <= columns, len(values)
        value = values[column * count // columns if few else column * (count - 1) // (columns - 1)]
        rows[round((high - value) / span * (height - 1))][column] = "*"
    lines = [f"{labels.get(line, ''):>{margin}} |{''.join(row)}".rstrip() for line, row in enumerate(rows)]
    if high == low:
        lines = lines[:1]
    first, last = f"{times[0]:g}", f"{times[-1]:.15g}"
    return "\n".join([*lines, f"{'':>{margin}} +{'-' * columns}", f"{'':>{margin}}  {first}{last:>{columns - len(first)}}"])


_COMMAND = "plot schedule"
_TARGET_EXAMPLE = "as in train.py:schedule or package.recipe:schedule"
_WIDEST, _HEIGHT = 80, 16


def parse_steps(command: str, name: str, text: str) -> int:
    """Parse a number of steps, such as ``10_000`` or ``1e6``. A type of ``option``.

    Raises:
        ConfigError: the text is not a positive integer.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    return check_int(command, name, int(number) if number.is_integer() else text, advice="Use 1000, for example.")


def schedule(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="file.py:name or module:name of a schedule, of several by name, or of a factory."
        ),
    ],
    steps: Annotated[
        int, option(_COMMAND, OTHER_HEADING, "--steps N", "Length of the run, in the schedule's unit.", parse_steps)
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

    Examples:
        dtrain plot schedule train.py:schedule --steps 10_000                  a sketch in the terminal
        dtrain plot schedule train.py:schedule --steps 10_000 --output lr.png  a picture
        dtrain plot schedule package.recipe:make_schedules --steps 1e6
    """
    picture = None if output is None else Path(output)
    if picture is not None and picture.suffix not in (".png", ".pdf", ".svg"):
        raise ConfigError(f"{_COMMAND}: --output must end with .png, .pdf or .svg, got {output!r}. Use lr.png, for example.")
    if picture is not None and not picture.parent.is_dir():
        raise ConfigError(
            f"{_COMMAND}: --output must be in an existing folder, got {output!r}. Create the folder, or choose another."
        )
    # These modules import torch.
    from dtrain.planning.workload import import_target, summarize_user_errors
    from dtrain.schedules.curves import axis_label, evaluate_at, plot, sample_times

    with import_target(_COMMAND, target, "schedule", _TARGET_EXAMPLE) as imported:
        schedules = _find_schedules(imported)
        with summarize_user_errors(f"{_COMMAND}: {target!r} failed", StepError):
            times = sample_times(steps, _WIDEST)
            curves = {name: evaluate_at(f"{_COMMAND}: {name!r}", function, times) for name, function in schedules.items()}
            if picture is not None:
                plot(schedules, steps).savefig(picture)
                return 0
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    for name, values in curves.items():
        typer.echo(f"{escape_unprintable(name)}, {axis_label(_COMMAND, schedules[name])} 0 to {steps - 1}:")
        typer.echo(draw_text_plot(times, values, width=width, height=_HEIGHT))
    return 0


def _find_schedules(imported: ImportedTarget) -> dict[str, Schedule]:
    """Return the schedules of the target: a schedule, schedules by name, or the result of a function without arguments."""
    from dtrain.planning.workload import summarize_user_errors

    value = imported.value
    if not hasattr(imported.module, imported.name):
        raise ConfigError(
            f"{_COMMAND}: no {imported.name!r} in {imported.source!r}. Choose from its functions {imported.function_names()}."
        )
    if callable(value) and not _accepts(value, 0) and _accepts(value):
        with summarize_user_errors(f"{_COMMAND}: {imported.name!r} in {imported.source!r} failed", ConfigError):
            value = value()
    schedules = (
        {str(name): function for name, function in value.items()} if isinstance(value, Mapping) else {imported.name: value}
    )
    if not schedules:
        raise ConfigError(
            f"{_COMMAND}: {imported.name!r} in {imported.source!r} has no schedules. Add a schedule, as in {{'lr': schedule}}."
        )
    for name, function in schedules.items():
        if not (callable(function) and _accepts(function, 0)):
            raise ConfigError(
                f"{_COMMAND}: {name!r} in {imported.source!r} must be a schedule, a function of a number, "
                f"got {type(function).__name__}. Choose from its functions {imported.function_names()}."
            )
    return schedules


def _accepts(function: Any, *arguments: float) -> bool:
    """Return True if ``function`` can be called with ``arguments``."""
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


app = command_group("Draw schedules without running the loop.", schedule=schedule)
