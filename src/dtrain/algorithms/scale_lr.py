"""The learning rate as a schedule of factors."""

from __future__ import annotations

from dtrain.state import TrainState
from dtrain.transform import Transform, UpdateFn
from dtrain.types import Metrics, Schedule, Slice, as_metric


def scale_lr(schedule: Schedule) -> Transform:
    """Multiply the rate that each parameter group was built with by ``schedule(step)``, for the step about to run.

    As in ``torch.optim.lr_scheduler.LambdaLR``, but evaluated from the step counter, so it is right after any resume. The
    rates at the start are kept in the slice (``{"base": {"0": 3e-4}}``), so a checkpoint carries them. Adds the metric ``lr``
    of the first group.

    Mutates: ``lr`` of the optimizer's groups.
    """

    def init(state: TrainState) -> Slice:
        groups = state.optimizer.param_groups
        return {"base": {str(index): float(group["lr"]) for index, group in enumerate(groups)}}

    def update(inner: UpdateFn) -> UpdateFn:
        def scaled(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            factor, base = schedule(state.step), state.slices["scale_lr"]["base"]
            for index, group in enumerate(state.optimizer.param_groups):
                group["lr"] = base[str(index)] * factor
            rate = as_metric(state.optimizer.param_groups[0]["lr"], 1.0, state.device)
            return inner(state, {**metrics, "lr": rate})

        return scaled

    return Transform(name="scale_lr", init=init, update=update)
