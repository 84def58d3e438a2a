"""A picture of schedules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dtrain.durations import UNITS
from dtrain.errors import ConfigError
from dtrain.optional_dependencies import missing_extra_error
from dtrain.schedules.hyperparameter import STEP_UNIT, common_unit, is_number
from dtrain.typing import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_POINTS = 2000  # more than a screen has columns, so that no jump looks like a slope


def plot(schedules: Schedule | Mapping[str, Schedule], steps: int, *, points: int = _MAX_POINTS) -> Figure:
    """A matplotlib figure of what a run of ``steps`` would use: the values at 0, 1, ..., ``steps - 1``.

    Nothing outside of the figure is changed, and no display is needed; ``figure.savefig("lr.png")`` writes it, and a notebook
    shows it.

    Formula: ``(t, schedule(t))`` for ``t`` in ``sample_times(steps, points)``

    Args:
        schedules: one, or several by the name that the legend gives them; all measured in one unit.
        steps: length of the run, in the unit that the schedules are measured in.
        points: how many values are drawn at most; of a longer run every so-many-th, the first and the last among them.

    Raises:
        ConfigError: no schedule, schedules in different units, a length that is no whole number of at least 1, a value that is
            no finite number, or matplotlib is not installed.

    Source: as the pictures in the papers of the schedules, which show the value over the step.

    Example:
        >>> from dtrain.schedules.curves import linear
        >>> line = plot(linear(1.0, 0.0, 4), 4).axes[0].lines[0]
        >>> [(int(t), float(value)) for t, value in zip(*line.get_data())]
        [(0, 1.0), (1, 0.75), (2, 0.5), (3, 0.25)]
    """
    curves = dict(schedules) if isinstance(schedules, Mapping) else {"": schedules}
    if not curves:
        raise ConfigError("plot: needs at least one schedule, got none; as in {'lr': linear(1.0, 0.0, 1000)}")
    label = axis_label("plot", *curves.values())
    times = sample_times(steps, points)
    drawn = {name: evaluate_at(f"plot: {name!r}" if name else "plot", schedule, times) for name, schedule in curves.items()}
    figure = _new_figure()
    axes = figure.subplots()
    for name, values in drawn.items():
        axes.plot(times, values, label=name or None)
    axes.set_xlabel(label)
    axes.grid(visible=True, alpha=0.3)
    if any(curves):
        axes.legend()
    return figure


def axis_label(caller: str, *schedules: Schedule) -> str:
    """What all of them are a function of, in words.

    Raises:
        ConfigError: no schedules, or in different units.
    """
    unit = common_unit(caller, *schedules)
    return "steps" if unit == STEP_UNIT else UNITS[unit]


def sample_times(steps: int, points: int) -> list[int]:
    """The steps that are drawn: all of them, or ``points`` that are evenly spread, the first and the last among them.

    Raises:
        ConfigError: not whole numbers, or below 1 and 2.
    """
    for name, value, least in (("steps", steps, 1), ("points", points, 2)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"plot: {name} must be a whole number of at least {least}, got {value!r}")
    if steps <= points:
        return list(range(steps))
    return [number * (steps - 1) // (points - 1) for number in range(points)]


def evaluate_at(caller: str, schedule: Schedule, times: list[int]) -> list[float]:
    """The values at these times.

    Raises:
        ConfigError: one is no finite number.
    """
    values = [schedule(t) for t in times]
    for t, value in zip(times, values, strict=True):
        if not is_number(value) or not math.isfinite(value):
            raise ConfigError(f"{caller}: the schedule must be a finite number everywhere, got {value!r} at {t}; mend it there")
    return values


def _new_figure() -> Figure:
    # Made without pyplot, which would keep it in a list of its own and may look for a display.
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra_error("plot: needs the package matplotlib", "plot") from None
    return Figure(figsize=(8.0, 4.5), layout="constrained")
