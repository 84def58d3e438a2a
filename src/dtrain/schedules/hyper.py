"""Hyperparameters that are numbers or schedules, and what a schedule is a function of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dtrain.clock import Clock
from dtrain.durations import UNITS
from dtrain.errors import ConfigError
from dtrain.types import Schedule


@dataclass(frozen=True, slots=True)
class Measured:
    """A schedule that is a function of something else than steps: of tokens, samples, seconds. Made by ``measured_in``."""

    unit: str
    schedule: Schedule

    def __call__(self, t: float) -> float:
        return self.schedule(t)


def measured_in(unit: str, schedule: Schedule) -> Measured:
    """``schedule`` as a function of what ``unit`` counts in place of steps, wherever a transform takes a schedule.

    So a rate may follow the tokens that were trained on, whatever the batch size was.

    Formula: ``value = schedule(clock.count(unit))``

    Args:
        unit: ``ba`` (steps), ``ep`` (whole epochs), ``sp``, ``tok``, ``sec`` (rank 0's clock), ``dur`` (the share of the run).
        schedule: a pure function of that count.

    Raises:
        ConfigError: an unknown unit, no function, or one that is measured in another unit already.

    Source: dtrain's own; a scheduler of MosaicML's Composer is measured in the unit of its ``t_max``.

    Example:
        >>> decay = measured_in("tok", lambda t: 1.0 - t / 1e9)
        >>> hyperparameter(decay, "example")(Clock(tokens=250_000_000))
        0.75
    """
    if unit not in UNITS:
        raise ConfigError(f"measured_in: unknown unit {unit!r}; use one of {', '.join(UNITS)}")
    if not callable(schedule):
        raise ConfigError(f"measured_in: needs a schedule (a function of a number), got {schedule!r}")
    if isinstance(schedule, Measured) and schedule.unit != unit:
        raise ConfigError(f"measured_in: the schedule is measured in {schedule.unit} already, got {unit=}; measure it once")
    return Measured(unit, schedule)


def hyperparameter(value: float | Schedule, where: str) -> Callable[[Clock], float]:
    """A hyperparameter that may be a number or a schedule, as a function of the clock. ``where`` names it in the error.

    A schedule is read for the step that is about to run: at its number, or at the clock's count of the unit it is measured in.

    Raises:
        ConfigError: neither a finite number nor a function.
    """
    if isinstance(value, Measured):
        unit, schedule = value.unit, value.schedule
        return lambda clock: schedule(clock.count(unit))
    if callable(value):
        return lambda clock: value(clock.step)
    if not is_number(value) or not math.isfinite(value):
        raise ConfigError(f"{where}: needs a finite number or a schedule (a function of the step), got {value!r}")
    return lambda clock: value


def is_number(value: object) -> bool:
    """Whether it is an int or a float; True and False are neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)
