"""An exponential moving average of the parameters."""

from __future__ import annotations

from collections.abc import Callable

from dtrain.clock import Clock
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import Hyperparameter, hyperparameter
from dtrain.state import TrainState
from dtrain.step.step_clock import ends_interval, next_clock
from dtrain.transform import Transform, UpdateFn
from dtrain.transforms.weights.averaging import copy_params_, duration_ratio, init_average, lerp_
from dtrain.typing import Metrics, Params, Schedule, TransformState

_NAME = "ema"


def update_ema_(averages: Params, params: Params, decay: float) -> None:
    """Leave the next exponential average in ``averages``, on the local shards.

    Formula: ``average = decay * average + (1 - decay) * param``, for every name in ``averages``

    Args:
        averages: tensors by name, laid out like the parameters, of any floating-point dtype.
        params: parameters by name; those that ``averages`` does not have are left out.
        decay: what is kept of the average.

    Mutates: ``averages``. Collective: none. Host sync: none.

    Source: Polyak and Juditsky 1992; as an exponential average, Tarvainen and Valpola 2017, arXiv:1703.01780, equation 1.

    Example:
        >>> average = {"w": torch.tensor([4.0])}
        >>> update_ema_(average, {"w": torch.tensor([2.0])}, 0.75)
        >>> average["w"].item()  # 0.75 * 4 + 0.25 * 2
        3.5
    """
    lerp_(averages, params, 1.0 - decay)


def ema(
    decay: float | Schedule | None = None,
    *,
    half_life: Duration | int | str | None = None,
    start: Duration | int | str = 0,
    interval: Duration | int | str = 1,
) -> Transform:
    """Keep an exponential moving average of every floating-point parameter, brought up to date at the end of a step.

    Formula: ``average = decay * average + (1 - decay) * param``, every ``interval`` from ``start`` on, where the average is
    the parameters; ``decay = 2 ** (-interval / half_life)`` where a half life is given

    The slice is ``{"params": {name: average}, "averaged": n}``, ``n`` being the sets of parameters that are in the average. It
    is laid out like the parameters, so nothing is ever gathered for it, in their dtype, or in float32 where that is wider.
    ``with swapped(state, "ema")`` puts the average in their place for an evaluation. Buffers are not averaged: running
    statistics are averages already; ``update_batch_norm_`` makes those that fit the average exactly.

    Args:
        decay: in ``[0, 1)``, for each update; or a schedule of such, read at the step about to run. Either this or
            ``half_life``.
        half_life: after which a set of parameters counts half as much, as a duration (``"1000ba"``, ``"1ep"``). In the unit of
            ``interval``, or both are converted into steps, for which ``step.init(..., run=...)`` must say enough.
        start: when the average begins, with the parameters as they are then.
        interval: from one update to the next; an update is due in the step that reaches its end. Listed after what skips
            updates (``loss_scale``), the average skips those steps, too: for longer intervals list it before.

    Collective: none. Host sync: none.

    Raises:
        ConfigError: both or neither of ``decay`` and ``half_life``, no durations, ``decay`` outside of ``[0, 1)``; of a
            schedule, in the step for which it is, before anything changes. From ``Step.init`` on, a duration that cannot be
            told from what is known of the run.

    Source: Tarvainen and Valpola 2017, arXiv:1703.01780, equation 1; half life, start and interval as MosaicML Composer's EMA.

    Example:
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> step = compose_step(mean_loss(lambda model, x: model(x).sum() / len(x), weight=len), [ema(half_life=2, interval=2)])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 4.0)
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> for _ in range(2):  # the gradient is 1, so the weight goes to 3.5, then 3
        ...     state, _ = step(state, torch.ones(2, 1))
        >>> state.slices["ema"]["params"]["weight"].item()  # half of 4 and half of 3
        3.5
    """
    decay_at, each = _decay_fn(decay, half_life, Duration.parse(interval)), Duration.parse(interval)
    begins = Duration.parse(start, allow_zero=True)

    def init(state: TrainState) -> TransformState:
        state.clock.reached(each)  # which refuses a share of a run of unknown length, as the next line does
        started = state.clock.reached(begins)
        if half_life is not None:
            decay_at(state.clock)
        return {"params": init_average(state), "averaged": int(started)}

    def update(inner: UpdateFn) -> UpdateFn:
        def averaged(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            now = decay_at(state.clock)
            state, metrics = inner(state, metrics)
            after, kept = next_clock(state), state.transform_states[_NAME]
            if not kept["averaged"]:
                if not after.reached(begins):
                    return state, metrics
                copy_params_(kept["params"], state.params, kept["params"])
            elif ends_interval(state, each):
                update_ema_(kept["params"], state.params, now)
            else:
                return state, metrics
            return state.with_transform_state(_NAME, {**kept, "averaged": kept["averaged"] + 1}), metrics

        return averaged

    return Transform(
        name=_NAME,
        init=init,
        update=update,
        uses_grad=False,
        hyperparameters=(decay_at,) if isinstance(decay_at, Hyperparameter) else (),
    )


def _decay_fn(
    decay: float | Schedule | None, half_life: Duration | int | str | None, each: Duration
) -> Callable[[Clock], float]:
    if (decay is None) == (half_life is None):
        raise ConfigError(f"ema: needs either decay=0.999 or half_life='1000ba', got {decay=}, {half_life=}")
    if decay is not None:
        return hyperparameter(decay, "ema: decay", "[0, 1)")
    life = Duration.parse(half_life if half_life is not None else 0)
    return lambda clock: float(2.0 ** -float(duration_ratio(each, life, clock.run)))
