"""Scale the learning rate by a schedule of factors, for all parameter groups or per group."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import mul
from typing import Any

from dtrain.dist.init import get_dist_info
from dtrain.schedules.clock import Clock
from dtrain.schedules.hyperparameters import warn_if_absolute_lr
from dtrain.state import TrainState
from dtrain.step.transform import Transform, UpdateFn
from dtrain.transforms.hyperparameters.schedule_option import ByGroup, GroupValues, during_update, parse_group_values
from dtrain.typing import Metrics, TransformState


def scale_lr(schedule: ByGroup) -> Transform:
    """Multiply the learning rate of each parameter group by ``schedule(step)``.

    The factors are those of ``torch.optim.lr_scheduler.LambdaLR``. They depend only on the clock, so they are correct after any
    resume. The rates change during the update only and are restored after it, also after an error. Between steps the optimizer
    has its own rates (or the rates of a later ``set_lr_``), and so does a checkpoint. Adds the metric ``lr``, the rate of the
    first group. With names, adds ``lr.NAME`` for each group with a factor.

    Formula: ``lr = group["lr"] * schedule(step)``

    Args:
        schedule: a number or schedule for all groups, or one per group name of ``dt.optim.param_groups``:
            ``{"head": 0.1, "rest": dt.schedules.cosine(1.0, 0.1, 1000)}``. The name of a rule selects all its groups (``head``
            and ``head.no_decay``). ``*`` matches text without a dot, ``**`` any text. Groups without names have positions:
            ``{0: 1.0, 1: 0.1}``. A group without a factor keeps its rate.

    Example:
        >>> import dtrain as dt
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(
        ...     loss_fn, [dt.transforms.scale_lr(dt.schedules.linear(1.0, 0.0, 4))]
        ... )
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> for _ in range(4):  # the gradient is 1
        ...     state, _ = step(state, torch.ones(1, 1))
        >>> model.weight.item()  # rates 0.5, 0.375, 0.25, 0.125
        -1.25

    Mutates: ``lr`` of the optimizer's groups, during the update.

    Raises:
        ConfigError: ``schedule`` is neither a function nor a number, or a factor is negative or not finite. A schedule's values
            are checked in their step, before the step changes anything. From ``Step.init`` on: no group has a given name, or
            two names match one group.

    Warns: UserWarning on rank 0. From ``Step.init`` on: the values look like learning rates instead of factors, because they
        stay far below 1, or because their peak is the optimizer's rate. An optimizer with a rate of at least 0.5 takes rates.
        In a
        step: all rates are 0, because the schedule has ended before the run.

    Source: ``torch.optim.lr_scheduler.LambdaLR``, without its counter.

    Suggested values:
        GPT-3, warm-up, cosine to a tenth: 375M tokens of warm-up, then 260B tokens of cosine (Brown et al. 2020,
            arXiv:2005.14165, appendix B)
        ImageNet, ResNet-50, 90 epochs: ``multi_step(1.0, 0.1, [30, 60, 80])`` by epochs (Goyal et al. 2017, arXiv:1706.02677,
            section 5.1)
    When not to use: a torch scheduler already changes the rate: both would multiply it. Use one of the two.
    """
    factors = parse_group_values(schedule, "scale_lr", "factor")
    transform = during_update("scale_lr", "lr", factors, mul, always_report_first=True)
    assert transform.update is not None, "during_update sets update"
    scale_update, check_groups = transform.update, transform.init

    def init(state: TrainState) -> TransformState:
        groups = state.optimizer.param_groups
        if get_dist_info().rank == 0:
            warn_if_absolute_lr(
                "scale_lr", [hyper.value for _, hyper in factors.by_pattern], factors.indices_by_group(groups), groups
            )
        return check_groups(state)

    return replace(transform, init=init, update=lambda inner: _warn_when_over(factors, scale_update(inner)))


def _warn_when_over(group_values: GroupValues, update: UpdateFn) -> UpdateFn:
    """Return ``update`` with a warning on rank 0 if the schedule has ended before the run."""

    def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
        if get_dist_info().rank == 0 and _is_schedule_over(group_values, state.clock, state.optimizer.param_groups):
            # The text omits the step: Python repeats a warning whose text differs.
            warnings.warn(
                "scale_lr: the rate of every group is 0 from this step on, because the schedule has ended before the run. Give "
                "the schedule the length of the run, as in dt.schedules.cosine(1.0, 0.0, loader.total_steps(length)).",
                stacklevel=2,
            )
        return update(state, metrics)

    return update_fn


def _is_schedule_over(group_values: GroupValues, clock: Clock, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if all factors are 0 in this step and in the previous step, but not at half of the current count."""

    def all_zero(moment: Clock) -> bool:
        return not any(factor is None or factor for factor in group_values.values_by_group(moment, groups))

    def at(count: Callable[[int], int]) -> Clock:
        step, samples, tokens, epoch = map(count, (clock.step, clock.samples, clock.tokens, clock.epoch))
        return replace(clock, step=step, samples=samples, tokens=tokens, epoch=epoch)

    # Test the current clock first: nearly every step ends the test there.
    return all_zero(clock) and all_zero(at(lambda count: max(count - 1, 0))) and not all_zero(at(lambda count: count // 2))
