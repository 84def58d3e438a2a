"""Stochastic weight averaging (SWA): the equal average of the weights at the end of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from dtrain.arguments import check_choice
from dtrain.errors import ConfigError
from dtrain.schedules.clock import Clock
from dtrain.schedules.durations import Duration, parse_window
from dtrain.schedules.hyperparameters import hyperparameter
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.state import TrainState
from dtrain.step.metrics import make_metric
from dtrain.step.step_clock import ends_interval, next_clock
from dtrain.step.transform import Transform, UpdateFn
from dtrain.transforms.weights.averaging import copy_params_, elapsed_fraction, init_average, lerp_
from dtrain.typing import Metrics, Params, Schedule, TransformState

_NAME = "swa"


def update_swa_(averages: Params, params: Params, count: int) -> None:
    """Add one parameter set to equal averages in place, on the local shards.

    Formula: ``average = average + (param - average) / (count + 1)``, for every name in ``averages``

    Args:
        averages: tensors by name, laid out like the parameters, any floating-point dtype.
        params: parameters by name; names that ``averages`` lacks are ignored.
        count: parameter sets in the average so far; 0 overwrites the average.

    Mutates: ``averages``. Collective: none. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> average = {"w": torch.tensor([4.0])}
        >>> dt.transforms.update_swa_(average, {"w": torch.tensor([1.0])}, 2)
        >>> average["w"].item()  # (4 + 4 + 1) / 3
        3.0

    Source: Izmailov et al. 2018, arXiv:1803.05407, algorithm 1.
    """
    if count == 0:
        copy_params_(averages, params, averages)
    else:
        lerp_(averages, params, 1.0 / (count + 1))


def swa(
    *,
    start: Duration | int | str = "0.7dur",
    end: Duration | int | str = "0.97dur",
    every: Duration | int | str = "1ep",
    load_average: bool = True,
    lr: float | Schedule | None = None,
    anneal: Duration | int | str | None = None,
    shape: Literal["linear", "cosine"] = "linear",
) -> Transform:
    """Average the parameters at ``start`` and once per ``every`` until ``end``, with equal weights.

    Formula: ``average = sum of the collected params / n``; the rate of each group, with ``t`` the elapsed fraction of
    ``anneal`` since ``start``, is ``(1 - a) * rate + a * lr``, where ``a = t`` (linear) or ``(1 - cos(pi * t)) / 2`` (cosine)

    With ``load_average`` the parameters are the average from ``end`` on: each later step sets them to the average again. So the
    run ends with the average, and the last steps adapt the running statistics of batch normalization. ``update_batch_norm_``
    computes the exact statistics; the paper uses a pass over the training data. Without ``load_average`` the training continues
    and the average is kept separately: ``with dt.transforms.use_average(state, "swa")`` evaluates it, ``load_average_``
    loads it.

    List ``swa`` before transforms that skip updates (``loss_scale``). Listed after them, it does not see the skipped steps, and
    misses an interval that ends in a skipped step.

    The transform state is ``{"params": {name: average}, "averaged": n}``. Before the first set (``n = 0``) there is no average,
    and ``use_average`` raises. The average is laid out like the parameters, in their dtype, but at least float32.

    Args:
        start: duration before the first set, which the step that reaches ``start`` collects. ``0`` collects at the end of the
            first interval first.
        end: duration before the end of the collection; the step that reaches ``end`` collects last.
        every: duration between sets, by its boundaries in the run; ``"1ep"`` collects at ends of epochs.
        load_average: if True, the parameters become the average at ``end``.
        lr: absolute learning rate of all groups from ``start`` on, or a schedule. List ``swa`` after ``scale_lr``, whose rate
            is the start of the annealing. None keeps the rates. Adds the metric ``lr``, of the first group.
        anneal: duration of the change from the own rate to ``lr``; None uses ten times ``every``. If its unit differs from
            that of ``start``, both are converted to steps, which may need ``step.init(..., run_length=...)``.
        shape: curve of the annealing.

    Mutates: parameters from ``end`` on; ``lr`` of the optimizer's groups, during the update.
    Collective: none. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.swa(start=1, end=3, every=1)])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 4.0)
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> for _ in range(3):  # the gradient is 1, so the weight goes to 3.5, 3, 2.5
        ...     state, _ = step(state, torch.ones(2, 1))
        >>> model.weight.item()  # (3.5 + 3 + 2.5) / 3
        3.0

    Raises:
        ConfigError: an argument is not a duration, ``end`` is not after ``start`` in one unit, ``lr`` is negative or not
            finite, ``shape`` is unknown, or ``anneal`` is given without ``lr``. From ``Step.init`` on: a duration is a
            fraction of a run of unknown length.

    Source: Izmailov et al. 2018, arXiv:1803.05407, algorithm 1, whose average includes the weights of its start; times and
    annealing as MosaicML Composer's SWA, which however continues to train from the average.

    Suggested values:
        CIFAR, PreResNet-164 and WRN-28-10, 300 epochs: ``start="161ep"``, ``lr=0.05`` (Izmailov et al. 2018, the authors'
            repository)
        CIFAR, VGG-16, 300 epochs: ``start="161ep"``, ``lr=0.01`` (Izmailov et al. 2018, the authors' repository)
        ImageNet, ResNet-50: ``start="0.7dur"``, ``end="0.97dur"`` (MosaicML Composer's defaults)
    When not to use: the rate falls to 0 before ``start``: the averaged weights are then nearly equal. A model with batch norm
        also needs ``update_batch_norm_`` afterwards.
    """
    (first, last), each = parse_window("swa", start, end), Duration.parse(every)
    lr_at = _annealed_lr_fn(lr, anneal, each, first, shape)

    def init(state: TrainState) -> TransformState:
        for duration in (first, last, each):
            # Raise for a fraction of a run of unknown length.
            state.clock.reached(duration)
        lr_at(state.clock)
        return {"params": init_average(state), "averaged": 0}

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            before = state.clock
            with _anneal_lr(state, lr_at(before)) as metric:
                state, metrics = inner(state, {**metrics, **metric})
            after, content = next_clock(state), state.transform_states[_NAME]
            # The first set is due in this step or in an earlier, skipped step.
            begins = first.value > 0 and not content["averaged"]
            due = after.reached(first) and (begins or ends_interval(state, each))
            if due and not before.reached(last):
                update_swa_(content["params"], state.params, content["averaged"])
                content = {**content, "averaged": content["averaged"] + 1}
                state = state.with_transform_state(_NAME, content)
            if load_average and content["averaged"] and after.reached(last):
                # Unsharded copies, if any, belong to the previous parameters.
                grad_sync_of(state.model).reshard()
                copy_params_(state.params, content["params"], content["params"])
            return state, metrics

        return update_fn

    return Transform(name=_NAME, init=init, update=update, uses_grad=False)


def _annealed_lr_fn(
    lr: float | Schedule | None, anneal: Duration | int | str | None, each: Duration, start: Duration, shape: str
) -> Callable[[Clock], tuple[float, float] | None]:
    """Return a function of the clock: the progress of the annealing and the target rate; None if ``lr`` is None."""
    check_choice("swa", "shape", shape, ("linear", "cosine"))
    if lr is None:
        if anneal is not None:
            raise ConfigError(f"swa: anneal must be None without lr, got {anneal!r}. Give lr= as well.")
        return lambda clock: None
    length = Duration.parse(anneal) if anneal is not None else Duration(each.value * 10, each.unit)
    lr_at = hyperparameter(lr, "swa: lr", "[0, inf)")

    def annealed_lr(clock: Clock) -> tuple[float, float]:
        elapsed = float(elapsed_fraction(clock, start, length))
        # The schedule may be undefined before `start`, so it is not evaluated there and not checked by Step.init.
        rate = lr_at(clock) if elapsed else 0.0
        return elapsed if shape == "linear" else (1.0 - math.cos(math.pi * elapsed)) / 2.0, rate

    return annealed_lr


@contextmanager
def _anneal_lr(state: TrainState, target: tuple[float, float] | None) -> Iterator[Metrics]:
    """Move the rates of all groups toward the target rate inside the context. Yield the metric of the first group's rate.

    Mutates: ``lr`` of the optimizer's groups, inside the context.
    """
    if target is None:
        yield {}
        return
    progress, rate = target
    groups = state.optimizer.param_groups
    own = [group["lr"] for group in groups]
    try:
        for group, lr in zip(groups, own, strict=True):
            group["lr"] = lr if progress == 0.0 else (1.0 - progress) * lr + progress * rate
        yield {"lr": make_metric(groups[0]["lr"], 1.0, state.device)}
    finally:
        for group, lr in zip(groups, own, strict=True):
            group["lr"] = lr
