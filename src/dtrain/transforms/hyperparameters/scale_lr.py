"""The learning rate as a schedule of factors, one for all groups or one each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import mul
from typing import Any

from dtrain.clock import Clock
from dtrain.dist.init import get_dist_info
from dtrain.schedules.lookahead import warn_if_absolute_lr
from dtrain.state import TrainState
from dtrain.transform import Transform, UpdateFn
from dtrain.transforms.hyperparameters.by_group import ByGroup, GroupValues, during_update, parse_group_values
from dtrain.typing import Metrics, TransformState


def scale_lr(schedule: ByGroup) -> Transform:
    """Multiply the rate of each parameter group by ``schedule(step)``, for the step about to run.

    The factors are those of ``torch.optim.lr_scheduler.LambdaLR``, but evaluated from the step counter, so they are right after
    any resume. Each group has its own rate back when the step is over, also after an error: between steps the optimizer holds
    the rates it was built with (or what ``set_lr_`` gave it since), as does a checkpoint, and factors never pile up. Adds the
    metric ``lr``, the rate that the first group ran with, and with names ``lr.NAME`` for each group that has a factor.

    Formula: ``lr = group["lr"] * schedule(step)``

    Args:
        schedule: a number or schedule for all groups, or one each by the group's name, as ``param_groups`` gives them:
            ``{"head": 0.1, "rest": dt.schedules.cosine(1.0, 0.1, 1000)}``. A rule's name stands for all its groups (``head`` and
            ``head.no_decay``); ``*`` is any text without a dot, ``**`` any text. A group without one keeps its rate.

    Mutates: ``lr`` of the optimizer's groups, for the time of the update.

    Raises:
        ConfigError: ``schedule`` is neither a function nor a number; a factor that is negative or not finite, of a schedule in
            the step that it is for, before anything changes; from ``Step.init`` on, a name that no group has, or a group that
            two names fit.

    Warns: UserWarning, on rank 0: from ``Step.init`` on, a schedule that looks like rates and not like factors, because its
        values stay far below 1 or its peak is the rate that the optimizer has already (a base rate of 0.5 and more takes
        rates); in a step whose rates are all 0 because the schedule is over and the run goes on.

    Source: ``torch.optim.lr_scheduler.LambdaLR``, without its counter.

    Example:
        >>> from dtrain.schedules.curves import linear
        >>> schedule = linear(1.0, 0.0, 4)
        >>> [0.5 * schedule(step) for step in range(4)]  # the rates of a group that was made with lr=0.5
        [0.5, 0.375, 0.25, 0.125]
        >>> scale_lr({"head": schedule, "rest": 1.0}).name
        'scale_lr'
    """
    given = parse_group_values(schedule, "scale_lr", "factor")
    made = during_update("scale_lr", "lr", given, mul, always_report_first=True)
    assert made.update is not None, "that is what it is made of"
    scaled, checked = made.update, made.init

    def init(state: TrainState) -> TransformState:
        groups = state.optimizer.param_groups
        if get_dist_info().rank == 0:
            warn_if_absolute_lr(
                "scale_lr", [hyper.value for _, hyper in given.by_pattern], given.indices_by_group(groups), groups
            )
        return checked(state)

    return replace(made, init=init, update=lambda inner: _warn_when_over(given, scaled(inner)))


def _warn_when_over(group_values: GroupValues, update: UpdateFn) -> UpdateFn:
    """``update``, which says on rank 0 where the schedule is over and the run is not: nothing is learned there."""

    def told(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
        if get_dist_info().rank == 0 and _is_schedule_over(group_values, state.clock, state.optimizer.param_groups):
            # Without the step: a text of its own for each would be shown again and again.
            warnings.warn(
                "scale_lr: the rate of every group is 0 from here on, because the schedule has come to its end and the run has "
                "not; give the schedule the length of the run, as in dt.schedules.cosine(1.0, 0.0, loader.total_steps(length))",
                stacklevel=2,
            )
        return update(state, metrics)

    return told


def _is_schedule_over(group_values: GroupValues, clock: Clock, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all factors are 0 in this step and in the one before, and were not half-way to here."""

    def all_zero(then: Clock) -> bool:
        return not any(factor is None or factor for factor in group_values.values_by_group(then, groups))

    def at(count: Callable[[int], int]) -> Clock:
        step, samples, tokens, epoch = map(count, (clock.step, clock.samples, clock.tokens, clock.epoch))
        return replace(clock, step=step, samples=samples, tokens=tokens, epoch=epoch)

    # The clock as it is comes first: in nearly every step that is all there is to ask.
    return all_zero(clock) and all_zero(at(lambda count: max(count - 1, 0))) and not all_zero(at(lambda count: count // 2))
