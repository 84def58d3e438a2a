"""The learning rate as a schedule of factors, one for all groups or one each."""

from __future__ import annotations

from operator import mul

from dtrain.algorithms.rates.by_group import ByGroup, for_the_update, numbers
from dtrain.transform import Transform


def scale_lr(schedule: ByGroup) -> Transform:
    """Multiply the rate of each parameter group by ``schedule(step)``, for the step about to run.

    The factors are those of ``torch.optim.lr_scheduler.LambdaLR``, but evaluated from the step counter, so they are right after
    any resume. Each group has its own rate back when the step is over, also after an error: between steps the optimizer holds
    the rates it was built with (or what ``set_lr_`` gave it since), as does a checkpoint, and factors never pile up. Adds the
    metric ``lr``, the rate that the first group ran with, and with names ``lr.NAME`` for each group that has a factor.

    Formula: ``lr = group["lr"] * schedule(step)``

    Args:
        schedule: a number or schedule for all groups, or one each by the group's name, as ``param_groups`` gives them:
            ``{"head": 0.1, "rest": dt.cosine(1.0, 0.1, 1000)}``. A rule's name stands for all its groups (``head`` and
            ``head.no_decay``); ``*`` is any text without a dot, ``**`` any text. A group without one keeps its rate.

    Mutates: ``lr`` of the optimizer's groups, for the time of the update.

    Raises:
        ConfigError: ``schedule`` is neither a function nor a number; a factor that is negative or not finite, of a schedule in
            the step that it is for, before anything changes; from ``Step.init`` on, a name that no group has, or a group that
            two names fit.

    Source: ``torch.optim.lr_scheduler.LambdaLR``, without its counter.

    Example:
        >>> from dtrain.schedules.basic import linear
        >>> schedule = linear(1.0, 0.0, 4)
        >>> [0.5 * schedule(step) for step in range(4)]  # the rates of a group that was made with lr=0.5
        [0.5, 0.375, 0.25, 0.125]
        >>> scale_lr({"head": schedule, "rest": 1.0}).name
        'scale_lr'
    """
    return for_the_update("scale_lr", "lr", numbers(schedule, "scale_lr", "factor"), mul, first_too=True)
