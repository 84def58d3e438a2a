"""Constant, linear and cosine, and a warm-up in front of any schedule.

Each factory checks its arguments once and returns a pure function ``t -> float`` that also takes fractions.
"""

from __future__ import annotations

import math

from dtrain.errors import ConfigError
from dtrain.types import Schedule


def constant(value: float) -> Schedule:
    """``value`` at every ``t``.

    >>> constant(0.5)(0), constant(0.5)(1e9)
    (0.5, 0.5)

    Raises:
        ConfigError: ``value`` is not a finite number.
    """
    if not _is_number(value) or not math.isfinite(value):
        raise ConfigError(f"constant: value must be a finite number, got {value!r}")
    return lambda t: value


def as_schedule(value: float | Schedule, where: str) -> Schedule:
    """A hyperparameter that may be a number or a schedule, as a schedule. ``where`` names it in the error.

    Raises:
        ConfigError: neither.
    """
    if callable(value):
        return value
    if not _is_number(value):
        raise ConfigError(f"{where}: needs a number or a schedule (a function of the step), got {value!r}")
    return lambda t: value


def linear(start: float, end: float, steps: float) -> Schedule:
    """``start + (end - start) * t / steps``, and ``end`` from ``t = steps`` on.

    Ten steps from 1 to 0 use 1.0, 0.9, ..., 0.1: the value is that of the step about to run.

    >>> [round(linear(1.0, 0.0, 10)(t), 3) for t in (0, 1, 9, 10, 11)]
    [1.0, 0.9, 0.1, 0.0, 0.0]

    Raises:
        ConfigError: ``steps`` is not positive.
    """
    _positive("linear", steps)

    def at(t: float) -> float:
        share = min(max(t / steps, 0.0), 1.0)
        return start + (end - start) * share if share < 1.0 else end

    return at


def cosine(start: float, end: float, steps: float) -> Schedule:
    """``end + (start - end) * (1 + cos(pi * t / steps)) / 2``, and ``end`` from ``t = steps`` on.

    >>> [round(cosine(1.0, 0.1, 100)(t), 3) for t in (0, 50, 100, 200)]
    [1.0, 0.55, 0.1, 0.1]

    Raises:
        ConfigError: ``steps`` is not positive.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5 without restarts.
    """
    _positive("cosine", steps)

    def at(t: float) -> float:
        share = min(max(t / steps, 0.0), 1.0)
        return end + (start - end) * (1.0 + math.cos(math.pi * share)) / 2.0 if share < 1.0 else end

    return at


def with_warmup(schedule: Schedule, steps: float) -> Schedule:
    """A straight line from 0 at ``t = 0`` to ``schedule(steps)`` at ``t = steps``; from there on ``schedule`` itself.

    The schedule is not shifted: one made for the whole run still ends with the run. ``steps = 0`` changes nothing.

    >>> warm = with_warmup(linear(1.0, 0.0, 100), 10)
    >>> [round(warm(t), 3) for t in (0, 5, 10, 50, 100)]
    [0.0, 0.45, 0.9, 0.5, 0.0]

    Raises:
        ConfigError: ``steps`` is negative.
    """
    if steps < 0 or not math.isfinite(steps):
        raise ConfigError(f"with_warmup: steps must be at least 0, got {steps=}")

    def at(t: float) -> float:
        return schedule(steps) * max(t, 0.0) / steps if t < steps else schedule(t)

    return at


def _positive(where: str, steps: float) -> None:
    if not (steps > 0 and math.isfinite(steps)):
        raise ConfigError(f"{where}: steps must be a positive number, got {steps=}; it is the length of the whole decay")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
