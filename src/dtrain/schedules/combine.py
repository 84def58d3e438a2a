"""Schedules made of other schedules: in sequence, multiplied, stretched in time, clipped, or as a torch scheduler.

The result has the unit of its parts: ``multiply(with_unit("tok", schedule), 2.0)`` is a schedule of tokens.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dtrain.arguments import check_number
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameters import (
    STEP_UNIT,
    attach_unit,
    check_increasing,
    check_sequence,
    common_unit,
    is_number,
    warn_if_absolute_lr,
)
from dtrain.typing import Schedule


def sequential(schedules: Sequence[Schedule], boundaries: Sequence[float], *, shifted: bool = True) -> Schedule:
    """Return a schedule that runs ``schedules`` one after another and switches at each of ``boundaries``.

    Formula: ``schedules[i](t - boundaries[i - 1])``, where ``i`` boundaries are at most ``t``, and ``schedules[0](t)`` if none
    is; ``schedules[i](t)`` if not ``shifted``

    Args:
        schedules: at least one schedule.
        boundaries: increasing times of the switches, one fewer than schedules.
        shifted: if True, each schedule sees the time since its own beginning; if False, the time of the whole run.

    Example:
        >>> import dtrain as dt
        >>> up, down = dt.schedules.linear(0.0, 1.0, 10), dt.schedules.linear(1.0, 0.0, 10)
        >>> schedule = dt.schedules.sequential([up, dt.schedules.constant(1.0), down], [10, 90])
        >>> [round(schedule(t), 3) for t in (0, 5, 10, 90, 95, 100)]
        [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]

    Raises:
        ConfigError: ``schedules`` is empty, ``boundaries`` has the wrong length or does not increase, or the schedules have
            different units.

    Source: as ``torch.optim.lr_scheduler.SequentialLR``.
    """
    check_sequence("sequential", "schedules", schedules)
    check_sequence("sequential", "boundaries", boundaries)
    parts, times = tuple(schedules), tuple(boundaries)
    if not parts or len(times) != len(parts) - 1:
        raise ConfigError(
            f"sequential: boundaries must be one fewer than schedules, got {len(times)} boundaries and {len(parts)} schedules. "
            "Give a step for each change of schedule."
        )
    check_increasing("sequential", "boundaries", times)
    unit = common_unit("sequential", *parts)
    begins = (0, *times) if shifted else (0,) * len(parts)

    def value(t: float) -> float:
        index = bisect_right(times, t)
        return parts[index](t - begins[index])

    return attach_unit(unit, value)


def multiply(schedule: Schedule, factor: float) -> Schedule:
    """Return ``schedule`` with all values multiplied by ``factor``.

    Formula: ``factor * schedule(t)``

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.multiply(dt.schedules.linear(1.0, 0.0, 10), 0.5)
        >>> [schedule(t) for t in (0, 5, 10)]
        [0.5, 0.25, 0.0]

    Raises:
        ConfigError: ``schedule`` is not a function, or ``factor`` is not a finite number.

    Source: arithmetic; a base rate times a schedule of factors.
    """
    unit = common_unit("multiply", schedule)
    check_number("multiply", "factor", factor)
    return attach_unit(unit, lambda t: factor * schedule(t))


def time_scale(schedule: Schedule, ratio: float) -> Schedule:
    """Return ``schedule`` stretched in time: ``ratio=2`` takes twice as long.

    The whole schedule is stretched, including a warm-up. This is Composer's ``scale_schedule_ratio`` with
    ``scale_warmup=True``. Composer also scales the run, so give the run ``ratio`` times its length.

    Formula: ``schedule(t / ratio)``

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.time_scale(dt.schedules.linear(1.0, 0.0, 10), 2.0)
        >>> [schedule(t) for t in (0, 5, 10, 20)]
        [1.0, 0.75, 0.5, 0.0]

    Raises:
        ConfigError: ``schedule`` is not a function, or ``ratio`` is not positive.

    Source: Composer's scale schedule ratio, with the warm-up scaled.
    """
    unit = common_unit("time_scale", schedule)
    check_number("time_scale", "ratio", ratio, above=0, advice="Give the new duration divided by the old duration.")
    return attach_unit(unit, lambda t: schedule(t / ratio))


def clip(schedule: Schedule, *, low: float = -math.inf, high: float = math.inf) -> Schedule:
    """Return ``schedule`` with its values clipped to ``low`` and ``high``.

    Formula: ``min(max(schedule(t), low), high)``

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.clip(dt.schedules.linear(1.0, 0.0, 10), low=0.1, high=0.75)
        >>> [schedule(t) for t in (0, 5, 10)]
        [0.75, 0.5, 0.1]

    Raises:
        ConfigError: ``schedule`` is not a function, no limit is given, a limit is not a number, or ``low`` is above ``high``.

    Source: arithmetic; ``min_lr`` of many recipes is a lower limit.
    """
    unit = common_unit("clip", schedule)
    for name, limit in (("low", low), ("high", high)):
        if not is_number(limit) or abs(limit) != math.inf:
            check_number("clip", name, limit)
    if not low <= high or (low, high) == (-math.inf, math.inf):
        raise ConfigError(f"clip: low must be at most high, got {low=} and {high=}. Give low=, high= or both.")
    return attach_unit(unit, lambda t: min(max(schedule(t), low), high))


def to_lambda_lr(schedule: Schedule | Sequence[Schedule], optimizer: Optimizer) -> LambdaLR:
    """Return a torch scheduler that multiplies the learning rate of each parameter group by ``schedule``.

    The optimizer has the rate of step 0 right after this call. Call the scheduler's ``step()`` once after each
    ``optimizer.step()``. Its ``state_dict`` contains the number of steps, but not the schedule.

    Formula: ``initial_lr * schedule(number of calls of step())``

    Args:
        schedule: a schedule of steps, or one schedule per parameter group.
        optimizer: optimizer with the base rates.

    Example:
        >>> import dtrain as dt
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        >>> scheduler, rates = (
        ...     dt.schedules.to_lambda_lr(dt.schedules.linear(1.0, 0.0, 4), optimizer),
        ...     [],
        ... )
        >>> for step in range(5):
        ...     rates.append(optimizer.param_groups[0]["lr"])
        ...     optimizer.step()
        ...     scheduler.step()
        >>> rates
        [0.5, 0.375, 0.25, 0.125, 0.0]

    Mutates: ``lr`` of the optimizer's groups, now and at each ``step()``.

    Raises:
        ConfigError: ``schedule`` is not a function, the number of schedules differs from the number of groups, or the unit is
            not steps. A torch scheduler counts steps only.

    Warns: UserWarning if the values look like learning rates instead of factors, as in ``scale_lr``.

    Source: ``torch.optim.lr_scheduler.LambdaLR``.
    """
    groups = len(optimizer.param_groups)
    schedules = [schedule] * groups if callable(schedule) else list(schedule)
    if len(schedules) != groups:
        raise ConfigError(
            f"to_lambda_lr: schedule must have one entry per parameter group, got {len(schedules)} for {groups}. "
            "Pass one schedule for all groups, or a list with an entry per group."
        )
    if (unit := common_unit("to_lambda_lr", *schedules)) != STEP_UNIT:
        raise ConfigError(
            f"to_lambda_lr: schedule must be a function of steps, got a schedule of {unit}. Use dt.transforms.scale_lr instead."
        )
    warn_if_absolute_lr("to_lambda_lr", schedules, range(groups), optimizer.param_groups)
    return LambdaLR(optimizer, [_as_function(entry) for entry in schedules])


def _as_function(schedule: Schedule) -> Callable[[int], float]:
    # LambdaLR saves the attributes of a callable object in its state_dict, but not those of a function.
    return lambda step: schedule(step)
