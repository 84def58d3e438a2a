"""A schedule for a loop that steps a scheduler of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dtrain.errors import ConfigError
from dtrain.schedules.factors import warn_of_rates
from dtrain.schedules.units import STEPS, shared_unit
from dtrain.types import Schedule


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
        >>> from dtrain.schedules.basic import linear
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
    if (unit := shared_unit("to_lambda_lr", *schedules)) != STEPS:
        raise ConfigError(
            f"to_lambda_lr: torch's scheduler counts steps, got a schedule of {unit}; scale_lr(...) reads the clock"
        )
    warn_of_rates("to_lambda_lr", schedules, range(groups), optimizer.param_groups)
    return LambdaLR(optimizer, [_plain(each) for each in schedules])


def _plain(schedule: Schedule) -> Callable[[int], float]:
    # A function, and not an object: torch would put the attributes of an object into the state_dict.
    return lambda step: schedule(step)
