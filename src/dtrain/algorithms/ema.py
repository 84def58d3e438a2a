"""An exponential moving average of the parameters."""

from __future__ import annotations

import torch

from dtrain.errors import ConfigError
from dtrain.schedules.basic import as_schedule
from dtrain.state import TrainState
from dtrain.tensors import lerp_
from dtrain.transform import Transform, UpdateFn
from dtrain.types import Metrics, Params, Schedule, Slice


def update_ema_(averages: Params, params: Params, decay: float) -> None:
    """``average = decay * average + (1 - decay) * param`` for every name in ``averages``, on the local shards.

    Mutates: ``averages``. Collective: none.
    """
    names = list(averages)
    with torch.no_grad():
        lerp_([averages[n] for n in names], [params[n] for n in names], 1.0 - decay)


def ema(decay: float | Schedule) -> Transform:
    """Keep ``decay * average + (1 - decay) * param`` of every floating-point parameter, updated after each step.

    The slice is ``{"params": {name: average}}``; averages are laid out like the parameters, in their dtype.

    Args:
        decay: in ``[0, 1)``; an average with this decay has a half life of ``log(0.5) / log(decay)`` steps. Or a schedule of
            such, read at the step about to run.

    Raises:
        ConfigError: ``decay`` outside of ``[0, 1)``; of a schedule, in the step for which it is, before anything changes.

    Source: Polyak and Juditsky 1992; as an exponential average, Tarvainen and Valpola 2017, arXiv:1703.01780.
    """
    decay_at = as_schedule(decay, "ema: decay")
    if not callable(decay):
        _check_decay(decay)

    def init(state: TrainState) -> Slice:
        return {"params": {name: p.detach().clone() for name, p in state.params.items() if p.is_floating_point()}}

    def update(inner: UpdateFn) -> UpdateFn:
        def averaged(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            now = decay_at(state.step)
            _check_decay(now)
            state, metrics = inner(state, metrics)
            update_ema_(state.slices["ema"]["params"], state.params, now)
            return state, metrics

        return averaged

    return Transform(name="ema", init=init, update=update, sees_gradient=False)


def _check_decay(decay: float) -> None:
    if not 0.0 <= decay < 1.0:
        raise ConfigError(f"ema: needs 0 <= decay < 1, got {decay=}")
