"""Stochastic weight averaging: the equal average of the weights along the end of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from dtrain.clock import Clock
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import hyperparameter
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.state import TrainState
from dtrain.step.step_clock import ends_interval, next_clock
from dtrain.transform import Transform, UpdateFn
from dtrain.transforms.weights.averaging import copy_params_, elapsed_fraction, init_average, lerp_
from dtrain.typing import Metrics, Params, Schedule, TransformState, make_metric

_NAME = "swa"


def update_swa_(averages: Params, params: Params, count: int) -> None:
    """Leave the equal average of one set of parameters more in ``averages``, on the local shards.

    Formula: ``average = average + (param - average) / (count + 1)``, for every name in ``averages``

    Args:
        averages: tensors by name, laid out like the parameters, of any floating-point dtype.
        params: parameters by name; those that ``averages`` does not have are left out.
        count: the sets of parameters that are in the average; with 0 it is overwritten.

    Mutates: ``averages``. Collective: none. Host sync: none.

    Source: Izmailov et al. 2018, arXiv:1803.05407, algorithm 1.

    Example:
        >>> average = {"w": torch.tensor([4.0])}
        >>> update_swa_(average, {"w": torch.tensor([1.0])}, 2)
        >>> average["w"].item()  # (4 + 4 + 1) / 3
        3.0
    """
    if count == 0:
        copy_params_(averages, params, averages)
    else:
        lerp_(averages, params, 1.0 / (count + 1))


def swa(
    *,
    start: Duration | int | str = "0.7dur",
    end: Duration | int | str = "0.97dur",
    interval: Duration | int | str = "1ep",
    load_average: bool = True,
    lr: float | Schedule | None = None,
    anneal: Duration | int | str | None = None,
    strategy: Literal["linear", "cosine"] = "linear",
) -> Transform:
    """Average the parameters as they are at ``start`` and at the end of every ``interval`` from there to ``end``, all alike.

    Formula: ``average = sum of the collected params / n``; the rate of each group, with ``t`` the share of ``anneal`` that has
    passed since ``start``, is ``(1 - a) * rate + a * lr``, where ``a = t`` (linear) or ``(1 - cos(pi * t)) / 2`` (cosine)

    With ``load_average`` the parameters are the average from ``end`` on: each step that is left sets them to it again, so what a run
    comes to is the average, and the last steps bring the running statistics of batch normalisation close to it.
    ``update_batch_norm_`` makes those that fit exactly; the paper has them made by a pass over the training data. Without
    ``load_average`` training goes on beside the average: ``with swapped(state, "swa")`` evaluates it, ``load_average_`` puts it in.

    List it before what skips updates (``loss_scale``): inside, it does not learn of the steps that are skipped, and an interval
    that ends in one has no set in the average.

    The slice is ``{"params": {name: average}, "averaged": n}``; before the first set (``n = 0``) the average is that of no
    weights, and ``use_average`` refuses it. It is laid out like the parameters, in their dtype, or in float32 where that is wider.

    Args:
        start: when the first set is collected: in the step that comes there. ``0`` collects none before the first interval.
        end: nothing is collected after the step that comes there.
        interval: from one set to the next, by its boundaries in the run: ``"1ep"`` collects at ends of epochs.
        load_average: whether the parameters become the average at ``end``.
        lr: the absolute rate from ``start`` on, of all groups; or a schedule of such. List this after ``scale_lr``, whose rate
            it goes out from. None leaves rates alone. Adds the metric ``lr``, of the first group.
        anneal: how long the rate takes to come from its own value to ``lr``; None takes ten times ``interval``. In the unit of
            ``start``, or both are converted into steps, for which ``step.init(..., run=...)`` must say enough.
        strategy: the form of that way.

    Mutates: parameters from ``end`` on; ``lr`` of the optimizer's groups, for the time of the update.
    Collective: none. Host sync: none.

    Raises:
        ConfigError: no durations, an ``end`` that is not after ``start`` in one unit, a rate that is negative or not finite,
            another ``strategy``, ``anneal`` without ``lr``; from ``Step.init`` on, a share of a run of unknown length.

    Source: Izmailov et al. 2018, arXiv:1803.05407, algorithm 1, whose average has the weights of its start in it; times, and
    how the rate is annealed, as MosaicML Composer's SWA, but its own goes on training from the average.

    Example:
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> loss = mean_loss(lambda model, x: model(x).sum() / len(x), weight=len)
        >>> step = compose_step(loss, [swa(start=1, end=3, interval=1)])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 4.0)
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> for _ in range(3):  # the gradient is 1, so the weight goes to 3.5, 3, 2.5
        ...     state, _ = step(state, torch.ones(2, 1))
        >>> model.weight.item()  # (3.5 + 3 + 2.5) / 3
        3.0
    """
    first, last, each = Duration.parse(start, allow_zero=True), Duration.parse(end), Duration.parse(interval)
    if first.unit == last.unit and first.value >= last.value:
        raise ConfigError(f"swa: needs start < end, got start={str(first)!r}, end={str(last)!r}")
    rate_at = _annealed_lr_fn(lr, anneal, each, first, strategy)

    def init(state: TrainState) -> TransformState:
        for duration in (first, last, each):
            state.clock.reached(duration)  # which refuses a share of a run of unknown length
        rate_at(state.clock)
        return {"params": init_average(state), "averaged": 0}

    def update(inner: UpdateFn) -> UpdateFn:
        def collected(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            before = state.clock
            with _anneal_lr(state, rate_at(before)) as metric:
                state, metrics = inner(state, {**metrics, **metric})
            after, kept = next_clock(state), state.transform_states[_NAME]
            begins = first.value > 0 and not kept["averaged"]  # in this step, or in an earlier one that was skipped
            due = after.reached(first) and (begins or ends_interval(state, each))
            if due and not before.reached(last):
                update_swa_(kept["params"], state.params, kept["averaged"])
                kept = {**kept, "averaged": kept["averaged"] + 1}
                state = state.with_transform_state(_NAME, kept)
            if load_average and kept["averaged"] and after.reached(last):
                grad_sync_of(state.model).reshard()  # gathered copies, if any, are of the parameters before
                copy_params_(state.params, kept["params"], kept["params"])
            return state, metrics

        return collected

    return Transform(name=_NAME, init=init, update=update, uses_grad=False)


def _annealed_lr_fn(
    lr: float | Schedule | None, anneal: Duration | int | str | None, each: Duration, start: Duration, strategy: str
) -> Callable[[Clock], tuple[float, float] | None]:
    """By the clock: how much of the way to the rate is made, and the rate; None where rates are left alone."""
    if strategy not in ("linear", "cosine"):
        raise ConfigError(f"swa: strategy must be 'linear' or 'cosine', got {strategy!r}")
    if lr is None:
        if anneal is not None:
            raise ConfigError(f"swa: anneal={anneal!r} is the way to a rate; give lr=..., too")
        return lambda clock: None
    length = Duration.parse(anneal) if anneal is not None else Duration(each.value * 10, each.unit)
    rate_at = hyperparameter(lr, "swa: lr", "[0, inf)")

    def at(clock: Clock) -> tuple[float, float]:
        passed = float(elapsed_fraction(clock, start, length))
        # A schedule for the end of a run may not know its beginning, so it is not looked at before, nor checked ahead.
        rate = rate_at(clock) if passed else 0.0
        return passed if strategy == "linear" else (1.0 - math.cos(math.pi * passed)) / 2.0, rate

    return at


@contextmanager
def _anneal_lr(state: TrainState, target: tuple[float, float] | None) -> Iterator[Metrics]:
    """A context in which all groups have a rate so much of the way nearer to another one; the metric of the first's.

    Mutates: ``lr`` of the optimizer's groups, while it lasts.
    """
    if target is None:
        yield {}
        return
    way, rate = target
    groups = state.optimizer.param_groups
    own = [group["lr"] for group in groups]
    try:
        for group, lr in zip(groups, own, strict=True):
            group["lr"] = lr if way == 0.0 else (1.0 - way) * lr + way * rate
        yield {"lr": make_metric(groups[0]["lr"], 1.0, state.device)}
    finally:
        for group, lr in zip(groups, own, strict=True):
            group["lr"] = lr
