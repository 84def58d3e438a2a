"""Hyperparameters that are numbers or schedules, and what a schedule is a function of."""

from __future__ import annotations

import math
import operator
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


@dataclass(frozen=True, slots=True)
class Allowed:
    """A condition on a number, with its text for errors: "in [0, 1)"."""

    text: str
    fits: Callable[[float], bool]


def interval(text: str) -> Allowed:
    """Read an interval as mathematics writes it: ``"[0, 1)"`` has 0 and does not have 1.

    Example:
        >>> [interval("[0, 1)").fits(value) for value in (-0.1, 0.0, 1.0)]
        [False, True, False]
    """
    low, high = (float(bound) for bound in text[1:-1].split(","))
    above = operator.ge if text[0] == "[" else operator.gt
    below = operator.le if text[-1] == "]" else operator.lt
    return Allowed(f"in {text}", lambda value: bool(above(value, low) and below(value, high)))


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """A number or a schedule, as a function of the clock. Made by ``hyperparameter``.

    Args:
        where: the name of the method and of the hyperparameter, for errors: ``"ema: decay"``.
        value: the number or schedule.
        allowed: the condition that each value must meet; None allows all numbers.
    """

    where: str
    value: float | Schedule
    allowed: Allowed | None = None

    @property
    def unit(self) -> str:
        """The unit of the schedule: steps, unless ``measured_in`` says otherwise."""
        return self.value.unit if isinstance(self.value, Measured) else "ba"

    def __call__(self, clock: Clock) -> float:
        """Return the value for the step that is about to run.

        Raises:
            ConfigError: the schedule gives a value that is not allowed.
        """
        if not callable(self.value):
            return self.value
        value = self.value(clock.count(self.unit))
        if self.allowed is not None and not self.allowed.fits(value):
            raise ConfigError(
                f"{self.where} must be {self.allowed.text}, got {value!r} from its schedule at step {clock.step}. "
                "Keep the schedule inside, for example with dt.clamp(schedule, low=..., high=...)."
            )
        return value


def hyperparameter(value: float | Schedule, where: str, allowed: str | Allowed | None = None) -> Hyperparameter:
    """Return a hyperparameter, a number or a schedule, as a function of the clock.

    A schedule is read for the step that is about to run: at its number, or at the clock's count of the unit it is measured in.
    A transform that lists the result in ``Transform.hyperparameters`` has its schedule checked ahead by ``Step.init``.

    Args:
        value: a finite number, or a schedule.
        where: the name of the method and of the hyperparameter, for errors: ``"ema: decay"``.
        allowed: the interval of allowed values, such as ``"[0, 1)"``; None allows all numbers.

    Raises:
        ConfigError: neither a finite number nor a function, or a number that is not allowed.

    Example:
        >>> decay = hyperparameter(lambda step: 0.9 + step / 100, "mine: decay", "[0, 1)")
        >>> decay(Clock(step=5))
        0.9500000000000001
    """
    condition = interval(allowed) if isinstance(allowed, str) else allowed
    if not callable(value):
        if not is_number(value) or not math.isfinite(value):
            raise ConfigError(f"{where}: needs a finite number or a schedule (a function of the step), got {value!r}")
        if condition is not None and not condition.fits(value):
            raise ConfigError(f"{where} must be {condition.text}, got {value!r}.")
    return Hyperparameter(where, value, condition)


def is_number(value: object) -> bool:
    """Whether it is an int or a float; True and False are neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)
