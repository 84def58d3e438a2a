"""Keep an exponential moving average (EMA) of the parameters."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from dtrain.errors import ConfigError
from dtrain.schedules.durations import Duration, RunLength
from dtrain.schedules.hyperparameters import hyperparameter
from dtrain.state import TrainState
from dtrain.step.step_clock import ends_interval, next_clock
from dtrain.step.transform import Transform, UpdateFn
from dtrain.transforms.weights.averaging import copy_params_, duration_ratio, init_average, lerp_
from dtrain.typing import Metrics, Params, Schedule, TransformState

_NAME = "ema"


def update_ema_(averages: Params, params: Params, decay: float) -> None:
    """Update exponential averages in place, on the local shards.

    Formula: ``average = decay * average + (1 - decay) * param``, for every name in ``averages``

    Args:
        averages: tensors by name, laid out like the parameters, any floating-point dtype.
        params: parameters by name; names that ``averages`` lacks are ignored.
        decay: weight of the previous average.

    Mutates: ``averages``. Collective: none. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> average = {"w": torch.tensor([4.0])}
        >>> dt.transforms.update_ema_(average, {"w": torch.tensor([2.0])}, 0.75)
        >>> average["w"].item()  # 0.75 * 4 + 0.25 * 2
        3.5

    Source: Polyak and Juditsky 1992; as an exponential average, Tarvainen and Valpola 2017, arXiv:1703.01780, equation 1.
    """
    lerp_(averages, params, 1.0 - decay)


def ema(
    decay: float | Schedule | None = None,
    *,
    half_life: Duration | int | str | None = None,
    start: Duration | int | str = 0,
    every: Duration | int | str = 1,
) -> Transform:
    """Keep an exponential moving average of every floating-point parameter, updated at the end of a step.

    Formula: ``average = decay * average + (1 - decay) * param``, once per ``every`` from ``start`` on, where the average is
    the parameters; with a half life ``decay = 2 ** (-interval / half_life)``

    The transform state is ``{"params": {name: average}, "averaged": n}`` with ``n`` parameter sets in the average. The average
    is laid out like the parameters, so it is never gathered. Its dtype is that of the parameters, but at least float32.
    ``with dt.transforms.use_average(state, "ema")`` evaluates the average. Buffers are not averaged, because running statistics
    are averages already. ``update_batch_norm_`` computes the exact statistics of the average.

    Args:
        decay: decay per update, in ``[0, 1)``, or a schedule. Give either ``decay`` or ``half_life``.
        half_life: duration after which the weight of a parameter set has halved (``"1000ba"``, ``"1ep"``). If its unit differs
            from the unit of ``every``, both are converted to steps: epochs need ``step.init(..., loader=loader)`` or
            ``run_length``, other units may need ``run_length``.
        start: start of the average, with the parameters of that step.
        every: duration between updates; the step that reaches the end of an interval updates. Listed after a transform that
            skips updates (``loss_scale``), the average skips the same steps. For long intervals list ``ema`` first.

    Collective: none. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.ema(half_life=2, every=2)])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 4.0)
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> for _ in range(2):  # the gradient is 1, so the weight goes to 3.5, then 3
        ...     state, _ = step(state, torch.ones(2, 1))
        >>> state.transform_states["ema"]["params"]["weight"].item()  # half of 4 and half of 3
        3.5

    Raises:
        ConfigError: both or neither of ``decay`` and ``half_life`` are given, an argument is not a duration, or ``decay`` is
            outside of ``[0, 1)``. A schedule is checked in each step, before the step changes anything. From ``Step.init`` on:
            the run cannot convert a duration.

    Source: Tarvainen and Valpola 2017, arXiv:1703.01780, equation 1; half life, start and interval as MosaicML Composer's EMA.

    Suggested values:
        CIFAR-10 diffusion, U-Net: ``decay=0.9999`` (Ho et al. 2020, arXiv:2006.11239, appendix B)
        SVHN and CIFAR-10, mean teacher: ``decay=0.99`` first, then ``0.999`` (Tarvainen and Valpola 2017)
        any run with epochs: ``half_life="1ep"``, or ``"50ba"`` for shorter memory (MosaicML Composer, method card of EMA)
    When not to use: memory for one more copy of the parameters is missing, or a run has fewer steps than a few half lives. Then
        the average still contains the start.
    """
    each = Duration.parse(every)
    if (decay is None) == (half_life is None):
        raise ConfigError(
            f"ema: give either decay=0.999 or half_life='1000ba', got {decay=}, {half_life=}. Remove one of them."
        )
    schedule = None if decay is None else hyperparameter(decay, "ema: decay", "[0, 1)")
    life = None if half_life is None else Duration.parse(half_life)
    lengths: WeakKeyDictionary[object, RunLength | None] = WeakKeyDictionary()
    begins = Duration.parse(start, allow_zero=True)

    def decay_of(state: TrainState) -> float:
        if schedule is not None:
            return schedule(state.clock)
        assert life is not None, "one of the two is given"
        return _half_life_decay(life, each, _run_length(state, lengths))

    def init(state: TrainState) -> TransformState:
        # Raise for a fraction of a run of unknown length.
        state.clock.reached(each)
        started = state.clock.reached(begins)
        if life is not None:
            decay_of(state)
        return {"params": init_average(state), "averaged": int(started)}

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            now = decay_of(state)
            state, metrics = inner(state, metrics)
            content = state.transform_states[_NAME]
            if not content["averaged"]:
                if not next_clock(state).reached(begins):
                    return state, metrics
                copy_params_(content["params"], state.params, content["params"])
            elif ends_interval(state, each):
                update_ema_(content["params"], state.params, now)
            else:
                return state, metrics
            return state.with_transform_state(_NAME, {**content, "averaged": content["averaged"] + 1}), metrics

        return update_fn

    return Transform(
        name=_NAME,
        init=init,
        update=update,
        uses_grad=False,
        hyperparameters=() if schedule is None else (schedule,),
    )


def _half_life_decay(life: Duration, each: Duration, run_length: RunLength | None) -> float:
    """Return the decay per update for the half life ``life``."""
    try:
        ratio = duration_ratio(each, life, run_length)
    except ConfigError as error:
        raise ConfigError(
            f"ema: half_life must be convertible to steps, got {str(life)!r} with every={str(each)!r}. "
            "Pass step.init(..., run_length=loader.run_length('3ep'))."
        ) from error
    return float(2.0 ** -float(ratio))


def _run_length(state: TrainState, lengths: WeakKeyDictionary[object, RunLength | None]) -> RunLength | None:
    """Return the length of the run, or the steps per epoch of its loader. Mutates: ``lengths``, by loader."""
    loader: Any = state._tracked_loader
    if state.clock.run_length is not None or loader is None:
        return state.clock.run_length
    if loader not in lengths:
        # A dataset without length has no epochs to convert.
        with suppress(ConfigError):
            lengths[loader] = RunLength(steps_per_epoch=loader.run_length("1ep").steps_per_epoch)
    return lengths.get(loader)
