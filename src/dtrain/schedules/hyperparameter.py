"""Hyperparameters as functions of the clock: numbers, schedules and the units of schedules.

``hyperparameter`` checks a number or schedule once and returns a function of the clock. ``with_unit`` makes a schedule a
function of tokens, samples or seconds. The ``check_*`` functions check the arguments of the schedule factories.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dtrain.arguments import check_choice
from dtrain.clock import Clock
from dtrain.durations import UNITS
from dtrain.errors import ConfigError
from dtrain.typing import Schedule


@dataclass(frozen=True, slots=True)
class UnitSchedule:
    """A schedule as a function of a unit other than steps, for example tokens, samples or seconds. Created by ``with_unit``."""

    unit: str
    schedule: Schedule

    def __call__(self, t: float) -> float:
        return self.schedule(t)


def with_unit(unit: str, schedule: Schedule) -> UnitSchedule:
    """Return ``schedule`` as a function of the clock's count of ``unit`` instead of steps.

    A transform that takes a schedule also takes the result. For example, a learning rate can follow the number of trained
    tokens, whatever the batch size is.

    Formula: ``value = schedule(clock.count(unit))``

    Args:
        unit: ``ba`` (steps), ``ep`` (whole epochs), ``sp``, ``tok``, ``sec`` (rank 0's clock), ``dur`` (fraction of the run).
        schedule: a pure function of the count.

    Example:
        >>> import dtrain as dt
        >>> decay = dt.schedules.with_unit("tok", lambda t: 1.0 - t / 1e9)
        >>> dt.transforms.hyperparameter(decay, "example")(dt.Clock(tokens=250_000_000))
        0.75

    Raises:
        ConfigError: ``unit`` is unknown, or ``schedule`` is not a function or has another unit.

    Source: dtrain's own; a scheduler of MosaicML's Composer has the unit of its ``t_max``.
    """
    check_choice("with_unit", "unit", unit, UNITS)
    if not callable(schedule):
        raise ConfigError(f"with_unit: schedule must be a function of a number, got {schedule!r}.")
    if isinstance(schedule, UnitSchedule) and schedule.unit != unit:
        raise ConfigError(
            f"with_unit: the schedule must not have another unit, got {schedule.unit!r} and {unit=}. Give one unit."
        )
    return UnitSchedule(unit, schedule)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A condition on a number, with its text for errors: "in [0, 1)"."""

    text: str
    is_satisfied: Callable[[float], bool]


def parse_interval(text: str) -> Constraint:
    """Parse an interval in mathematical notation: ``"[0, 1)"`` includes 0 and excludes 1.

    Example:
        >>> [parse_interval("[0, 1)").is_satisfied(value) for value in (-0.1, 0.0, 1.0)]
        [False, True, False]
    """
    low, high = (float(bound) for bound in text[1:-1].split(","))
    above = operator.ge if text[0] == "[" else operator.gt
    below = operator.le if text[-1] == "]" else operator.lt
    return Constraint(f"in {text}", lambda value: bool(above(value, low) and below(value, high)))


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """A number or a schedule as a function of the clock. Created by ``hyperparameter``.

    Args:
        label: name of the method and the hyperparameter for errors: ``"ema: decay"``.
        value: the number or schedule.
        allowed: condition on every value; None allows all numbers.
    """

    label: str
    value: float | Schedule
    allowed: Constraint | None = None

    @property
    def unit(self) -> str:
        """Return the unit of the schedule: steps, or the unit given to ``with_unit``."""
        return self.value.unit if isinstance(self.value, UnitSchedule) else "ba"

    def __call__(self, clock: Clock) -> float:
        """Return the value for the next step.

        Raises:
            ConfigError: the schedule returns a value that is not allowed.
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
    """Return a number or schedule as a checked function of the clock.

    A schedule is evaluated for the next step: at the step number, or at the clock's count of the schedule's unit. ``Step.init``
    checks the schedules in ``Transform.hyperparameters`` over the whole run.

    Args:
        value: a finite number or a schedule.
        label: name of the method and the hyperparameter for errors: ``"ema: decay"``.
        allowed: interval of the allowed values, for example ``"[0, 1)"``; None allows all numbers.

    Example:
        >>> import dtrain as dt
        >>> decay = dt.transforms.hyperparameter(lambda step: 0.9 + step / 100, "mine: decay", "[0, 1)")
        >>> decay(dt.Clock(step=5))
        0.9500000000000001

    Raises:
        ConfigError: ``value`` is neither a finite number nor a function, or the number is not allowed.
    """
    condition = parse_interval(allowed) if isinstance(allowed, str) else allowed
    if not callable(value):
        if not is_number(value) or not math.isfinite(value):
            raise ConfigError(f"{label} must be a finite number or a schedule (a function of the step), got {value!r}.")
        if condition is not None and not condition.is_satisfied(value):
            raise ConfigError(f"{label} must be {condition.text}, got {value!r}.")
    return Hyperparameter(label, value, condition)


def is_number(value: object) -> bool:
    """Return True if ``value`` is an int or a float. True and False are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


STEP_UNIT = "ba"
"""The unit of a function without ``with_unit``."""


def common_unit(caller: str, *schedules: Schedule) -> str:
    """Return the unit that all ``schedules`` share.

    Raises:
        ConfigError: an argument is not a function, or the schedules have different units.
    """
    units: list[str] = []
    for schedule in schedules:
        if not callable(schedule):
            raise ConfigError(
                f"{caller}: schedule must be a function of a number, got {schedule!r}. For a number use dt.schedules.constant."
            )
        units.append(schedule.unit if isinstance(schedule, UnitSchedule) else STEP_UNIT)
    if len(distinct := dict.fromkeys(units)) > 1:
        raise ConfigError(
            f"{caller}: schedules must have one unit, got {' and '.join(distinct)}. Give each schedule that unit with "
            "dt.schedules.with_unit."
        )
    return units[0]


def attach_unit(unit: str, schedule: Schedule) -> Schedule:
    """Return ``schedule`` as a function of ``unit``. A schedule of steps is returned unchanged."""
    return schedule if unit == STEP_UNIT else UnitSchedule(unit, schedule)


def check_sequence(caller: str, name: str, values: object) -> None:
    """Raise unless ``values`` is iterable and not text.

    Raises:
        ConfigError: ``values`` is a single value.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(f"{caller}: {name} must be a list, got {name}={values!r}. Write [{values!r}] for a single value.")


def check_increasing(caller: str, name: str, times: tuple[float, ...]) -> None:
    """Raise unless ``times`` are increasing numbers, each at least 0.

    Raises:
        ConfigError: ``times`` are not such numbers.
    """
    if not all(is_number(time) and 0 <= time < math.inf for time in times) or sorted(set(times)) != list(times):
        raise ConfigError(f"{caller}: {name} must be increasing numbers of at least 0, got {list(times)!r}.")
