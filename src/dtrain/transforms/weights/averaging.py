"""Keep averages of the parameters (``ema``, ``swa``), evaluate with an average (``use_average``), or load the average."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fractions import Fraction
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from dtrain.arguments import check_choice
from dtrain.dist.dtensor import from_local_like, to_local
from dtrain.errors import ConfigError
from dtrain.schedules.clock import Clock, elapsed_fraction
from dtrain.schedules.durations import Duration, RunLength, parse_window
from dtrain.schedules.hyperparameters import hyperparameter
from dtrain.shard.buffers import BufferSnapshot
from dtrain.shard.grad_sync import grad_sync_of
from dtrain.shard.skipped_units import ModelUnits
from dtrain.shard.snapshots import exchange_
from dtrain.shard.unshard import is_unsharded, reshard
from dtrain.state import TrainState
from dtrain.step.normalization import make_metric
from dtrain.step.step_clock import ends_interval, next_clock
from dtrain.step.transform import Transform, UpdateFn
from dtrain.typing import Metrics, Params, Schedule, TransformState

_EMA = "ema"
_SWA = "swa"


def ema(
    decay: float | Schedule | None = None,
    *,
    half_life: Duration | int | str | None = None,
    start: Duration | int | str = 0,
    every: Duration | int | str = 1,
) -> Transform:
    """Keep an exponential moving average of every trainable parameter, updated at the end of a step.

    Formula: ``average = decay * average + (1 - decay) * param``, once per ``every`` from ``start`` on, where the average is
    the parameters; with a half life ``decay = 2 ** (-interval / half_life)``

    The transform state is ``{"params": {name: average}, "averaged": n}`` with ``n`` parameter sets in the average. The average
    is laid out like the parameters, so it is never gathered. Its dtype is that of the parameters, but at least float32. A
    frozen parameter is its own average. If it becomes trainable, its average begins with the value that it had until then.
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
    interval = Duration.parse(every)
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
        return _half_life_decay(life, interval, _run_length(state, lengths))

    def init(state: TrainState) -> TransformState:
        # Raise for a fraction of a run of unknown length.
        state.clock.reached(interval)
        started = state.clock.reached(begins)
        if life is not None:
            decay_of(state)
        return {"params": init_average(state), "averaged": int(started)}

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            now = decay_of(state)
            state, metrics = inner(_with_new_averages(state, _EMA), metrics)
            content = state.transform_states[_EMA]
            if not content["averaged"]:
                if not next_clock(state).reached(begins):
                    return state, metrics
                copy_params_(content["params"], state.params, content["params"])
            elif ends_interval(state, interval):
                update_ema_(content["params"], state.params, now)
            else:
                return state, metrics
            return state.with_transform_state(_EMA, {**content, "averaged": content["averaged"] + 1}), metrics

        return update_fn

    return Transform(
        name=_EMA,
        init=init,
        update=update,
        uses_grad=False,
        hyperparameters=() if schedule is None else (schedule,),
    )


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


def init_average(state: TrainState) -> dict[str, Tensor]:
    """Return a copy of every trainable parameter, laid out like the parameter, in at least float32.

    An update changes the average by about a thousandth of the difference. The eight bits of a bfloat16 are too few for this
    change.
    """
    return {name: _copy_wide(param.detach()) for name, param in state._trainable.items()}


def _copy_wide(value: Tensor) -> Tensor:
    return value.clone() if value.dtype.itemsize >= 4 else from_local_like(value, to_local(value).float())


def _with_new_averages(state: TrainState, name: str) -> TrainState:
    """Return ``state`` with averages of the parameters that have become trainable. Call before the update.

    Until now such a parameter was constant, so that any average of it is its value.
    """
    content = state.transform_states[name]
    new = state._trainable.keys() - content["params"].keys()
    if not new:
        return state
    # In the order of the parameters, which is equal on all ranks.
    added = {key: _copy_wide(param.detach()) for key, param in state._trainable.items() if key in new}
    return state.with_transform_state(name, {**content, "params": {**content["params"], **added}})


def copy_params_(targets: Params, sources: Params, names: Mapping[str, object]) -> None:
    """Copy ``source`` to ``target`` for every name in ``names``, on the local shards, in any dtypes. Mutates: ``targets``."""
    if names:
        with torch.no_grad():
            torch._foreach_copy_([to_local(targets[n]) for n in names], [to_local(sources[n]) for n in names])


def lerp_(averages: Params, params: Params, weight: float) -> None:
    """Apply ``average += weight * (param - average)`` for every name in ``averages``, on the local shards.

    Mutates: ``averages``. Collective: none.
    """
    with torch.no_grad():
        pairs = [(to_local(average), to_local(params[name])) for name, average in averages.items()]
        same_dtype = [(target, source) for target, source in pairs if target.dtype == source.dtype]
        if same_dtype:
            targets, sources = zip(*same_dtype, strict=True)
            torch._foreach_lerp_(targets, sources, weight)
        for target, source in pairs:
            # Cast one tensor at a time: wide copies of all tensors would take as much memory as the averages.
            if target.dtype != source.dtype:
                target.lerp_(source.to(target.dtype), weight)


def duration_ratio(length: Duration, whole: Duration, run: RunLength | None) -> Fraction:
    """Return ``part / whole``, in steps if the units differ.

    Raises:
        ConfigError: ``run`` cannot convert a duration to steps.
    """
    if length.unit == whole.unit:
        return length.fraction / whole.fraction
    return Fraction(length.steps(run), whole.steps(run))


@contextmanager
def use_average(state: TrainState, name: str = "ema") -> Iterator[None]:
    """Use an average as the model's parameters inside the context; restore every bit on exit.

    Formula: ``param, average = average, param`` on entry and again on exit, for every name in
    ``state.transform_states[name]["params"]``

    The parameters and the average exchange their contents, one local shard at a time. This needs the memory of one more shard
    and gathers nothing. A parameter with a narrower dtype than its average is copied for the whole context. ``evaluate``,
    ``eval_mode``, ``unshard_params`` and ``full_params`` see the average inside the context. Buffers that change inside the
    context (by ``update_batch_norm_`` or in training mode) are restored too, also after an error.

    Inside the context, a step, a save or a load of any state of the run, and a second ``use_average``, raise.

    A loss function may enter the context if all ranks have equal numbers of microbatches; see ``shard.use_snapshot``.

    Args:
        state: newest state of the run.
        name: name of a transform whose state has ``{"params": {name: average}}``: ``"ema"``, ``"swa"``.

    Mutates: parameters and the transform state, inside the context. Collective: none. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.ema(0.75)])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 4.0)
        >>> state, _ = step(
        ...     step.init(model, torch.optim.SGD(model.parameters(), lr=0.5)), torch.ones(2, 1)
        ... )
        >>> with dt.transforms.use_average(state, "ema"):
        ...     model.weight.item()  # 0.75 * 4 + 0.25 * 3.5
        3.875
        >>> model.weight.item()
        3.5

    Raises:
        ConfigError: ``state`` has no such average, the average has not started, or the model is unsharded (``unshard_params``).
        StaleStateError: ``state`` was stepped already, or another ``use_average`` is active.
        StepError: as ``shard.use_snapshot``.

    Source: Tarvainen and Valpola 2017, arXiv:1703.01780, section 2: predictions use the averaged weights.
    """
    averages = _find_average(state, name, "use_average")
    buffers, undo = BufferSnapshot(state.model), list[Callable[[], None]]()
    buffers.capture()
    # An earlier forward may have left unsharded copies, which the next forward would reuse.
    reshard(state.model)
    leave = f"`with dt.transforms.use_average(state, {name!r}):`"
    state._run_context.replaced_by = f"the average {name!r} is in the place of the parameters. Leave {leave} first."
    try:
        for key, average in averages.items():
            undo.append(exchange_(state.params[key], average))
        with ModelUnits.mark_replaced(state.model):
            yield
    finally:
        reshard(state.model)
        for restore in undo:
            restore()
        buffers.restore()
        state._run_context.replaced_by = None


def load_average_(state: TrainState, name: str = "ema") -> None:
    """Replace the parameters by an average at the end of training.

    Formula: ``param = average``, for every name in ``state.transform_states[name]["params"]``

    The running statistics of batch normalization still belong to the previous parameters; ``update_batch_norm_`` computes new
    statistics. The optimizer and the average do not change.

    Args:
        state: newest state of the run; it stays the newest state.
        name: name of a transform whose state has ``{"params": {name: average}}``.

    Mutates: parameters. Collective: none. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.ema(0.75)])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 4.0)
        >>> state, _ = step(
        ...     step.init(model, torch.optim.SGD(model.parameters(), lr=0.5)), torch.ones(2, 1)
        ... )
        >>> dt.transforms.load_average_(state, "ema")
        >>> model.weight.item()  # 0.75 * 4 + 0.25 * 3.5
        3.875

    Raises:
        ConfigError: ``state`` has no such average, the average has not started, or the model is unsharded (``unshard_params``).
        StaleStateError: ``state`` was stepped already, or ``use_average`` is active.

    Source: Izmailov et al. 2018, arXiv:1803.05407, algorithm 1: the average is the result.
    """
    averages = _find_average(state, name, "load_average_")
    reshard(state.model)
    copy_params_(state.params, averages, averages)


def _find_average(state: TrainState, name: str, caller: str) -> Mapping[str, Tensor]:
    state._check_not_stale(caller)
    content = state.transform_states.get(name, {})
    averages: Mapping[str, Tensor] = content.get("params", {})
    if not averages or any(key not in state.params for key in averages):
        existing = [key for key, value in state.transform_states.items() if "params" in value]
        raise ConfigError(f"{caller}: name must be an average of the state, got {name!r}. Averages: {existing or 'none'}.")
    if not content.get("averaged", 1):
        raise ConfigError(f"{caller}: the average {name!r} has not started at step {state.step}. See start= of the transform.")
    if is_unsharded(state.model):
        raise ConfigError(
            f"{caller}: the model must be sharded, got an unsharded model. Enter unshard_params inside the context."
        )
    return averages


def _half_life_decay(life: Duration, interval: Duration, run_length: RunLength | None) -> float:
    """Return the decay per update for the half life ``life``."""
    try:
        ratio = duration_ratio(interval, life, run_length)
    except ConfigError as error:
        raise ConfigError(
            f"ema: half_life must be convertible to steps, got {str(life)!r} with every={str(interval)!r}. "
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
    and ``use_average`` raises. The average is laid out like the parameters, in their dtype, but at least float32. Frozen
    parameters are in no set, as in ``ema``.

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
    (first, last), interval = parse_window("swa", start, end), Duration.parse(every)
    lr_at = _annealed_lr_fn(lr, anneal, interval, first, shape)

    def init(state: TrainState) -> TransformState:
        for duration in (first, last, interval):
            # Raise for a fraction of a run of unknown length.
            state.clock.reached(duration)
        lr_at(state.clock)
        return {"params": init_average(state), "averaged": 0}

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            before = state.clock
            with _anneal_lr(state, lr_at(before)) as metric:
                state, metrics = inner(_with_new_averages(state, _SWA), {**metrics, **metric})
            after, content = next_clock(state), state.transform_states[_SWA]
            # The first set is due in this step or in an earlier, skipped step.
            begins = first.value > 0 and not content["averaged"]
            due = after.reached(first) and (begins or ends_interval(state, interval))
            if due and not before.reached(last):
                update_swa_(content["params"], state.params, content["averaged"])
                content = {**content, "averaged": content["averaged"] + 1}
                state = state.with_transform_state(_SWA, content)
            if load_average and content["averaged"] and after.reached(last):
                # Unsharded copies, if any, belong to the previous parameters.
                grad_sync_of(state.model).reshard()
                copy_params_(state.params, content["params"], content["params"])
            return state, metrics

        return update_fn

    return Transform(name=_SWA, init=init, update=update, uses_grad=False)


def _annealed_lr_fn(
    lr: float | Schedule | None, anneal: Duration | int | str | None, interval: Duration, start: Duration, shape: str
) -> Callable[[Clock], tuple[float, float] | None]:
    """Return a function of the clock: the progress of the annealing and the target rate; None if ``lr`` is None."""
    check_choice("swa", "shape", shape, ("linear", "cosine"))
    if lr is None:
        if anneal is not None:
            raise ConfigError(f"swa: anneal must be None without lr, got {anneal!r}. Give lr= as well.")
        return lambda clock: None
    length = Duration.parse(anneal) if anneal is not None else Duration(interval.value * 10, interval.unit)
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
