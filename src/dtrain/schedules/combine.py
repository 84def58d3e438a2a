"""Schedules made of other schedules: one behind the other, scaled, stretched, held within limits.

What they make is measured in the unit of what it is made of: ``multiply(with_unit("tok", schedule), 2.0)`` is of tokens, too.

A schedule for a loop that steps a scheduler of torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import (
    STEP_UNIT,
    attach_unit,
    check_finite,
    check_increasing,
    check_positive,
    check_sequence,
    common_unit,
    is_number,
)
from dtrain.schedules.lookahead import warn_if_absolute_lr
from dtrain.typing import Schedule


def sequential(schedules: Sequence[Schedule], boundaries: Sequence[float], *, shifted: bool = True) -> Schedule:
    """One schedule behind the other: the first until ``boundaries[0]``, the second from there on, and so on.

    Formula: ``schedules[i](t - boundaries[i - 1])``, where ``i`` boundaries are at most ``t``; ``schedules[0](t)`` for none;
    ``schedules[i](t)`` where they are not ``shifted``

    Args:
        schedules: at least one.
        boundaries: where the next one takes over, one less than schedules, each later than the one before.
        shifted: whether each of them sees the time since it took over, as if it began there; else that of the whole run.

    Raises:
        ConfigError: no schedules, another number of boundaries, some that do not increase, or schedules in different units.

    Source: as ``torch.optim.lr_scheduler.SequentialLR``.

    Example:
        >>> from dtrain.schedules.curves import constant, linear
        >>> both = join([linear(0.0, 1.0, 10), constant(1.0), linear(1.0, 0.0, 10)], [10, 90])
        >>> [round(both(t), 3) for t in (0, 5, 10, 90, 95, 100)]
        [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]
    """
    check_sequence("join", "schedules", schedules)
    check_sequence("join", "boundaries", boundaries)
    parts, times = tuple(schedules), tuple(boundaries)
    if not parts or len(times) != len(parts) - 1:
        raise ConfigError(
            f"join: needs one boundary less than schedules, got {len(times)} and {len(parts)}; at each one the next begins"
        )
    check_increasing("join", "boundaries", times)
    unit = common_unit("join", *parts)
    begins = (0, *times) if shifted else (0,) * len(parts)

    def at(t: float) -> float:
        number = bisect_right(times, t)
        return parts[number](t - begins[number])

    return attach_unit(unit, at)


def multiply(schedule: Schedule, factor: float) -> Schedule:
    """``schedule`` with all its values times ``factor``.

    Formula: ``factor * schedule(t)``

    Raises:
        ConfigError: no schedule, or ``factor`` is not a finite number.

    Source: arithmetic; a base rate times a schedule of factors.

    Example:
        >>> from dtrain.schedules.curves import linear
        >>> [scale(linear(1.0, 0.0, 10), 0.5)(t) for t in (0, 5, 10)]
        [0.5, 0.25, 0.0]
    """
    unit = common_unit("scale", schedule)
    check_finite("scale", factor=factor)
    return attach_unit(unit, lambda t: factor * schedule(t))


def time_scale(schedule: Schedule, ratio: float) -> Schedule:
    """``schedule`` over ``ratio`` times its time: 2 takes twice as long, 0.5 half.

    All of it is stretched, a warm-up within it too. So it is Composer's ``scale_schedule_ratio`` with ``scale_warmup=True``,
    which scales the length of the run as well: give the run ``ratio`` times its length.

    Formula: ``schedule(t / ratio)``

    Raises:
        ConfigError: no schedule, or ``ratio`` is not positive.

    Source: Composer's scale schedule ratio, with the warm-up scaled.

    Example:
        >>> from dtrain.schedules.curves import linear
        >>> [stretch(linear(1.0, 0.0, 10), 2.0)(t) for t in (0, 5, 10, 20)]
        [1.0, 0.75, 0.5, 0.0]
    """
    unit = common_unit("stretch", schedule)
    check_positive("stretch", "it is how many times as long the schedule takes", ratio=ratio)
    return attach_unit(unit, lambda t: schedule(t / ratio))


def clip(schedule: Schedule, *, low: float = -math.inf, high: float = math.inf) -> Schedule:
    """``schedule`` where it is within ``low`` and ``high``, and the nearer of the two elsewhere.

    Formula: ``min(max(schedule(t), low), high)``

    Raises:
        ConfigError: no schedule, neither limit, one that is no number, or limits the wrong way round.

    Source: arithmetic; ``min_lr`` of many recipes is a lower limit.

    Example:
        >>> from dtrain.schedules.curves import linear
        >>> [clamp(linear(1.0, 0.0, 10), low=0.1, high=0.75)(t) for t in (0, 5, 10)]
        [0.75, 0.5, 0.1]
    """
    unit = common_unit("clamp", schedule)
    for name, limit in (("low", low), ("high", high)):
        if not is_number(limit) or abs(limit) != math.inf:
            check_finite("clamp", **{name: limit})
    if not low <= high or (low, high) == (-math.inf, math.inf):
        raise ConfigError(f"clamp: needs low <= high, and at least one of them, got {low=} and {high=}")
    return attach_unit(unit, lambda t: min(max(schedule(t), low), high))


def to_lambda_lr(schedule: Schedule | Sequence[Schedule], optimizer: Optimizer) -> LambdaLR:
    """A scheduler of torch that multiplies the rate of each parameter group by ``schedule``, for the step about to run.

    Right after it is made the optimizer has the rate of step 0; call its ``step()`` once after each ``optimizer.step()``. Its
    ``state_dict`` holds the number of steps, and not the schedule.

    Formula: ``initial_lr * schedule(number of calls of step())``

    Args:
        schedule: of steps; or one for each parameter group.
        optimizer: with the base rates.

    Mutates: ``lr`` of the optimizer's groups, now and at each ``step()``.

    Raises:
        ConfigError: no schedule, another number of them than groups, or one that is measured in something else than steps,
            which torch's scheduler does not count.

    Warns: UserWarning, a schedule that looks like rates and not like factors, as ``scale_lr`` does.

    Source: ``torch.optim.lr_scheduler.LambdaLR``.

    Example:
        >>> from dtrain.schedules.curves import linear
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        >>> scheduler, rates = to_lambda_lr(linear(1.0, 0.0, 4), optimizer), []
        >>> for step in range(5):
        ...     rates.append(optimizer.param_groups[0]["lr"])
        ...     optimizer.step()
        ...     scheduler.step()
        >>> rates
        [0.5, 0.375, 0.25, 0.125, 0.0]
    """
    groups = len(optimizer.param_groups)
    schedules = [schedule] * groups if callable(schedule) else list(schedule)
    if len(schedules) != groups:
        raise ConfigError(f"to_lambda_lr: needs a schedule for each parameter group, got {len(schedules)} for {groups}")
    if (unit := common_unit("to_lambda_lr", *schedules)) != STEP_UNIT:
        raise ConfigError(
            f"to_lambda_lr: torch's scheduler counts steps, got a schedule of {unit}; scale_lr(...) reads the clock"
        )
    warn_if_absolute_lr("to_lambda_lr", schedules, range(groups), optimizer.param_groups)
    return LambdaLR(optimizer, [_as_function(each) for each in schedules])


def _as_function(schedule: Schedule) -> Callable[[int], float]:
    # A function, and not an object: torch would put the attributes of an object into the state_dict.
    return lambda step: schedule(step)
