"""Hyperparameters that are numbers or schedules, and what a schedule is a function of.

Schedules made of schedules: they are measured in the unit that all of their parts are measured in.

What every schedule checks of its arguments when it is made, so that no step has to."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dtrain.clock import Clock
from dtrain.durations import UNITS
from dtrain.errors import ConfigError
from dtrain.typing import Schedule


@dataclass(frozen=True, slots=True)
class UnitSchedule:
    """A schedule that is a function of something else than steps: of tokens, samples, seconds. Made by ``with_unit``."""

    unit: str
    schedule: Schedule

    def __call__(self, t: float) -> float:
        return self.schedule(t)


def with_unit(unit: str, schedule: Schedule) -> UnitSchedule:
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
        >>> decay = with_unit("tok", lambda t: 1.0 - t / 1e9)
        >>> hyperparameter(decay, "example")(Clock(tokens=250_000_000))
        0.75
    """
    if unit not in UNITS:
        raise ConfigError(f"with_unit: unknown unit {unit!r}; use one of {', '.join(UNITS)}")
    if not callable(schedule):
        raise ConfigError(f"with_unit: needs a schedule (a function of a number), got {schedule!r}")
    if isinstance(schedule, UnitSchedule) and schedule.unit != unit:
        raise ConfigError(f"with_unit: the schedule is measured in {schedule.unit} already, got {unit=}; measure it once")
    return UnitSchedule(unit, schedule)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A condition on a number, with its text for errors: "in [0, 1)"."""

    text: str
    is_satisfied: Callable[[float], bool]


def parse_interval(text: str) -> Constraint:
    """Read an interval as mathematics writes it: ``"[0, 1)"`` has 0 and does not have 1.

    Example:
        >>> [interval("[0, 1)").fits(value) for value in (-0.1, 0.0, 1.0)]
        [False, True, False]
    """
    low, high = (float(bound) for bound in text[1:-1].split(","))
    above = operator.ge if text[0] == "[" else operator.gt
    below = operator.le if text[-1] == "]" else operator.lt
    return Constraint(f"in {text}", lambda value: bool(above(value, low) and below(value, high)))


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """A number or a schedule, as a function of the clock. Made by ``hyperparameter``.

    Args:
        label: the name of the method and of the hyperparameter, for errors: ``"ema: decay"``.
        value: the number or schedule.
        allowed: the condition that each value must meet; None allows all numbers.
    """

    label: str
    value: float | Schedule
    allowed: Constraint | None = None

    @property
    def unit(self) -> str:
        """The unit of the schedule: steps, unless ``with_unit`` says otherwise."""
        return self.value.unit if isinstance(self.value, UnitSchedule) else "ba"

    def __call__(self, clock: Clock) -> float:
        """Return the value for the step that is about to run.

        Raises:
            ConfigError: the schedule gives a value that is not allowed.
        """
        if not callable(self.value):
            return self.value
        value = self.value(clock.count(self.unit))
        if self.allowed is not None and not self.allowed.is_satisfied(value):
            raise ConfigError(
                f"{self.label} must be {self.allowed.text}, got {value!r} from its schedule at step {clock.step}. "
                "Keep the schedule inside, for example with dt.schedules.clip(schedule, low=..., high=...)."
            )
        return value


def hyperparameter(value: float | Schedule, label: str, allowed: str | Constraint | None = None) -> Hyperparameter:
    """Return a hyperparameter, a number or a schedule, as a function of the clock.

    A schedule is read for the step that is about to run: at its number, or at the clock's count of the unit it is measured in.
    A transform that lists the result in ``Transform.hyperparameters`` has its schedule checked ahead by ``Step.init``.

    Args:
        value: a finite number, or a schedule.
        label: the name of the method and of the hyperparameter, for errors: ``"ema: decay"``.
        allowed: the interval of allowed values, such as ``"[0, 1)"``; None allows all numbers.

    Raises:
        ConfigError: neither a finite number nor a function, or a number that is not allowed.

    Example:
        >>> decay = hyperparameter(lambda step: 0.9 + step / 100, "mine: decay", "[0, 1)")
        >>> decay(Clock(step=5))
        0.9500000000000001
    """
    condition = parse_interval(allowed) if isinstance(allowed, str) else allowed
    if not callable(value):
        if not is_number(value) or not math.isfinite(value):
            raise ConfigError(f"{label}: needs a finite number or a schedule (a function of the step), got {value!r}")
        if condition is not None and not condition.is_satisfied(value):
            raise ConfigError(f"{label} must be {condition.text}, got {value!r}.")
    return Hyperparameter(label, value, condition)


def is_number(value: object) -> bool:
    """Whether it is an int or a float; True and False are neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


STEP_UNIT = "ba"
"""The unit of a plain function."""


def common_unit(caller: str, *schedules: Schedule) -> str:
    """The unit that all of ``schedules`` are measured in: steps, unless ``with_unit`` said otherwise.

    Raises:
        ConfigError: one of them is no function, or they are measured in different units.
    """
    units: list[str] = []
    for schedule in schedules:
        if not callable(schedule):
            raise ConfigError(f"{caller}: needs a schedule (a function of a number), got {schedule!r}; constant(...) makes one")
        units.append(schedule.unit if isinstance(schedule, UnitSchedule) else STEP_UNIT)
    if len(found := dict.fromkeys(units)) > 1:
        raise ConfigError(f"{caller}: schedules are measured in {' and '.join(found)}; give each of them with_unit(one unit)")
    return units[0]


def attach_unit(unit: str, schedule: Schedule) -> Schedule:
    """``schedule`` as a function of what ``unit`` counts; as it is where that is steps."""
    return schedule if unit == STEP_UNIT else UnitSchedule(unit, schedule)


def check_finite(caller: str, **values: float) -> None:
    """Return when all ``values`` are finite numbers.

    Raises:
        ConfigError: one is not.
    """
    for name, value in values.items():
        if not is_number(value) or not math.isfinite(value):
            raise ConfigError(f"{caller}: {name} must be a finite number, got {value!r}")


def check_positive(caller: str, advice: str, **values: float) -> None:
    """Return when all ``values`` are finite numbers above 0. ``advice`` says what they are for.

    Raises:
        ConfigError: one is not.
    """
    for name, value in values.items():
        if not is_number(value) or not 0 < value < math.inf:
            raise ConfigError(f"{caller}: {name} must be a positive number, got {name}={value!r}; {advice}")


def check_sequence(caller: str, name: str, values: object) -> None:
    """Return when ``values`` are several, and not one alone.

    Raises:
        ConfigError: they are not.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(f"{caller}: {name} must be a list, got {name}={values!r}; write [{values!r}] for one alone")


def check_increasing(caller: str, name: str, times: tuple[float, ...]) -> None:
    """Return when ``times`` are numbers of at least 0, each larger than the one before.

    Raises:
        ConfigError: they are not.
    """
    if not all(is_number(time) and 0 <= time < math.inf for time in times) or sorted(set(times)) != list(times):
        raise ConfigError(f"{caller}: {name} must be numbers of at least 0 that increase, got {list(times)!r}")
