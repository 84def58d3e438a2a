"""Plot schedules over a run as a matplotlib figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dtrain.arguments import check_int
from dtrain.errors import ConfigError
from dtrain.packages import missing_extra_error
from dtrain.schedules.durations import UNITS
from dtrain.schedules.hyperparameters import STEP_UNIT, common_unit, is_number
from dtrain.typing import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# More points than a screen has columns, so that no jump looks like a slope.
_MAX_POINTS = 2000


def plot(schedules: Schedule | Mapping[str, Schedule], steps: int, *, points: int = _MAX_POINTS) -> Figure:
    """Return a matplotlib figure of the values at the steps 0, 1, ..., ``steps - 1``.

    The function needs no display and changes no global state of matplotlib. ``figure.savefig("lr.png")`` writes the figure. A
    notebook shows the figure.

    Formula: ``(t, schedule(t))`` for ``t`` in ``sample_times(steps, points)``

    Args:
        schedules: one schedule, or schedules by their names in the legend; all with the same unit.
        steps: length of the run in the unit of the schedules.
        points: largest number of values; longer runs are sampled evenly, including the first and last step.

    Example:
        >>> import dtrain as dt
        >>> figure = dt.schedules.plot(dt.schedules.linear(1.0, 0.0, 4), 4)
        >>> line = figure.axes[0].lines[0]
        >>> [(int(t), float(value)) for t, value in zip(*line.get_data())]
        [(0, 1.0), (1, 0.75), (2, 0.5), (3, 0.25)]

    Raises:
        ConfigError: no schedule is given, the schedules have different units, ``steps`` or ``points`` is not an int or too
            small, a value is not a finite number, or matplotlib is not installed.

    Source: as the figures in the papers of the schedules: value over step.
    """
    curves = dict(schedules) if isinstance(schedules, Mapping) else {"": schedules}
    if not curves:
        raise ConfigError("plot: schedules must not be empty, got {}. Give {'lr': dt.schedules.linear(1.0, 0.0, 1000)}.")
    label = axis_label("plot", *curves.values())
    times = sample_times(steps, points)
    lines = {name: evaluate_at(f"plot: {name!r}" if name else "plot", schedule, times) for name, schedule in curves.items()}
    # Do not use pyplot: pyplot keeps a global list of figures and may need a display.
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra_error("plot: needs the package matplotlib", "plot") from None
    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, values in lines.items():
        axes.plot(times, values, label=name or None)
    axes.set_xlabel(label)
    axes.grid(visible=True, alpha=0.3)
    if any(curves):
        axes.legend()
    return figure


def axis_label(caller: str, *schedules: Schedule) -> str:
    """Return the axis label: the unit of ``schedules`` in words.

    Raises:
        ConfigError: no schedules, or schedules with different units.
    """
    unit = common_unit(caller, *schedules)
    return "steps" if unit == STEP_UNIT else UNITS[unit]


def sample_times(steps: int, points: int) -> list[int]:
    """Return all steps, or ``points`` evenly spaced steps including the first and last step.

    Raises:
        ConfigError: ``steps`` or ``points`` is not an int, ``steps`` is below 1, or ``points`` is below 2.
    """
    check_int("plot", "steps", steps)
    check_int("plot", "points", points, minimum=2)
    if steps <= points:
        return list(range(steps))
    return [index * (steps - 1) // (points - 1) for index in range(points)]


def evaluate_at(caller: str, schedule: Schedule, times: list[int]) -> list[float]:
    """Return the values of ``schedule`` at ``times``.

    Raises:
        ConfigError: a value is not a finite number.
    """
    values = [schedule(t) for t in times]
    for t, value in zip(times, values, strict=True):
        if not is_number(value) or not math.isfinite(value):
            raise ConfigError(f"{caller}: the schedule must return a finite number, got {value!r} at {t}. Fix the schedule.")
    return values
