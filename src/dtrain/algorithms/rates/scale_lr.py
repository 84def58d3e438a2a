"""The learning rate as a schedule of factors."""

from __future__ import annotations

import math

from dtrain.errors import ConfigError
from dtrain.schedules.hyper import hyperparameter
from dtrain.state import TrainState
from dtrain.transform import Transform, UpdateFn
from dtrain.types import Metrics, Schedule, as_metric


def scale_lr(schedule: float | Schedule) -> Transform:
    """Multiply the rate of each parameter group by ``schedule(step)``, for the step about to run.

    The factors are those of ``torch.optim.lr_scheduler.LambdaLR``, but evaluated from the step counter, so they are right after
    any resume. Each group has its own rate back when the step is over, also after an error: between steps the optimizer holds
    the rates it was built with (or what ``set_lr_`` gave it since), as does a checkpoint, and factors never pile up. Adds the
    metric ``lr``, the rate that the first group ran with.

    Mutates: ``lr`` of the optimizer's groups, for the time of the update.

    Raises:
        ConfigError: ``schedule`` is neither a function nor a number; a factor that is negative or not finite, of a schedule in
            the step that it is for, before anything changes.
    """
    factor_at = hyperparameter(schedule, "scale_lr: schedule")
    if not callable(schedule):
        _check_factor(schedule)

    def update(inner: UpdateFn) -> UpdateFn:
        def scaled(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            factor, groups = factor_at(state.clock), state.optimizer.param_groups
            _check_factor(factor)
            rates = [group["lr"] for group in groups]
            try:
                for group, rate in zip(groups, rates, strict=True):
                    group["lr"] = rate * factor
                return inner(state, {**metrics, "lr": as_metric(groups[0]["lr"], 1.0, state.device)})
            finally:
                for group, rate in zip(groups, rates, strict=True):
                    group["lr"] = rate

        return scaled

    return Transform(name="scale_lr", update=update, sees_gradient=False)


def _check_factor(factor: float) -> None:
    if not 0.0 <= factor < math.inf:
        raise ConfigError(f"scale_lr: needs a finite factor >= 0, got {factor=}")
