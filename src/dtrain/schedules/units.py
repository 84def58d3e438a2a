"""Schedules made of schedules: they are measured in the unit that all of their parts are measured in."""

from __future__ import annotations

from dtrain.errors import ConfigError
from dtrain.schedules.hyper import Measured
from dtrain.types import Schedule

STEPS = "ba"
"""The unit of a plain function."""


def shared_unit(where: str, *schedules: Schedule) -> str:
    """The unit that all of ``schedules`` are measured in: steps, unless ``measured_in`` said otherwise.

    Raises:
        ConfigError: one of them is no function, or they are measured in different units.
    """
    units: list[str] = []
    for schedule in schedules:
        if not callable(schedule):
            raise ConfigError(f"{where}: needs a schedule (a function of a number), got {schedule!r}; constant(...) makes one")
        units.append(schedule.unit if isinstance(schedule, Measured) else STEPS)
    if len(found := dict.fromkeys(units)) > 1:
        raise ConfigError(f"{where}: schedules are measured in {' and '.join(found)}; give each of them measured_in(one unit)")
    return units[0]


def in_unit(unit: str, schedule: Schedule) -> Schedule:
    """``schedule`` as a function of what ``unit`` counts; as it is where that is steps."""
    return schedule if unit == STEPS else Measured(unit, schedule)
