"""Schedules that jump: after every period, and at given times."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from dtrain.errors import ConfigError
from dtrain.schedules.checks import check_finite, check_increasing, check_listed, check_positive
from dtrain.schedules.decays import geometric
from dtrain.types import Schedule


def step_decay(start: float, gamma: float, period: float, *, end: float | None = None) -> Schedule:
    """``start``, times ``gamma`` after each whole ``period``; never beyond ``end``.

    Formula: ``start * gamma ** floor(t / period)``, and ``end`` once that is reached.

    Args:
        start: the value of the first period, above 0.
        gamma: the factor of a jump: below 1 a decay, above 1 a growth (of a batch size), which needs an ``end``.
        period: time between jumps.
        end: where it stays; without one it goes on for ever.

    Raises:
        ConfigError: an argument that is not positive, growth without an end, or an end on the other side of ``start``.

    Source: as ``torch.optim.lr_scheduler.StepLR``.

    Example:
        >>> [step_decay(1.0, 0.5, 10)(t) for t in (0, 9, 10, 20)]
        [1.0, 1.0, 0.5, 0.25]
        >>> [step_decay(256, 2, 10, end=1000)(t) for t in (0, 10, 20, 30)]
        [256.0, 512.0, 1000, 1000]
    """
    check_positive("step_decay", "it is the time between two jumps", period=period)
    after = geometric("step_decay", start, gamma, end)
    return lambda t: after(math.floor(t / period))


def multi_step(start: float, gamma: float, milestones: Sequence[float]) -> Schedule:
    """``start``, times ``gamma`` at each of ``milestones``.

    Formula: ``start * gamma ** n``, where ``n`` milestones are at most ``t``

    Args:
        start: the value before the first milestone.
        gamma: the factor of a jump.
        milestones: when it jumps, each later than the one before; the step with this number has the new value.

    Raises:
        ConfigError: a value that is not a finite number, no milestones, or some that do not increase.

    Source: as ``torch.optim.lr_scheduler.MultiStepLR``.

    Example:
        >>> [round(multi_step(1.0, 0.1, [30, 60])(t), 3) for t in (0, 29, 30, 60, 1000)]
        [1.0, 1.0, 0.1, 0.01, 0.01]
    """
    check_finite("multi_step", start=start, gamma=gamma)
    check_listed("multi_step", "milestones", milestones)
    times = tuple(milestones)
    if not times:
        raise ConfigError("multi_step: needs at least one milestone, got none; a value that never changes is constant(...)")
    check_increasing("multi_step", "milestones", times)
    return lambda t: float(start * gamma ** bisect_right(times, t))
