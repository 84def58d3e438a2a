"""Averages of parameters: create and update an average, evaluate with the average, or load the average."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction

import torch
from torch import Tensor

from dtrain.dist.dtensor import from_local_like, to_local
from dtrain.errors import ConfigError
from dtrain.schedules.clock import Clock
from dtrain.schedules.durations import Duration, RunLength
from dtrain.shard.buffers import BufferSnapshot
from dtrain.shard.unshard import is_unsharded, reshard
from dtrain.state import TrainState
from dtrain.typing import Params


def init_average(state: TrainState) -> dict[str, Tensor]:
    """Return a copy of every floating-point or complex parameter, laid out like the parameter, in at least float32.

    An update changes the average by about a thousandth of the difference. The eight bits of a bfloat16 are too few for this
    change.
    """
    return {
        name: _clone_at_least_float32(param.detach())
        for name, param in state.params.items()
        if param.is_floating_point() or param.is_complex()
    }


def _clone_at_least_float32(param: Tensor) -> Tensor:
    return param.clone() if param.dtype.itemsize >= 4 else from_local_like(param, to_local(param).float())


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


def duration_ratio(part: Duration, whole: Duration, run: RunLength | None) -> Fraction:
    """Return ``part / whole``, in steps if the units differ.

    Raises:
        ConfigError: ``run`` cannot convert a duration to steps.
    """
    if part.unit == whole.unit:
        return part.fraction / whole.fraction
    return Fraction(part.steps(run), whole.steps(run))


def elapsed_fraction(clock: Clock, start: Duration, length: Duration) -> Fraction:
    """Return the elapsed fraction of ``length`` since ``start``, from 0 to 1, in steps if the units differ.

    Raises:
        ConfigError: the run cannot convert a duration to steps.
    """
    if start.unit == length.unit:
        # A count of "dur" is a float close to a fraction whose denominator is the number of steps. Recover this fraction.
        elapsed = (Fraction(clock.count(start.unit)).limit_denominator(10**7) - start.fraction) / length.fraction
    else:
        elapsed = Fraction(clock.step - start.steps(clock.run_length), length.steps(clock.run_length))
    return min(max(elapsed, Fraction(0)), Fraction(1))


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

    Source: Tarvainen and Valpola 2017, arXiv:1703.01780, section 2: predictions use the averaged weights.
    """
    averages = _find_average(state, name, "use_average")
    buffers, undo = BufferSnapshot(state.model), list[Callable[[], None]]()
    buffers.capture()
    # An earlier forward may have left unsharded copies, which the next forward would reuse.
    reshard(state.model)
    state._run_context.swapped_average = name
    try:
        for key, average in averages.items():
            undo.append(_exchange_(state.params[key], average))
        yield
    finally:
        reshard(state.model)
        for restore in undo:
            restore()
        buffers.restore()
        state._run_context.swapped_average = None


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


def _exchange_(param: Tensor, average: Tensor) -> Callable[[], None]:
    """Exchange the contents of ``param`` and ``average``. Mutates both. Return a function that undoes the exchange."""
    with torch.no_grad():
        own, mean = to_local(param), to_local(average)
        original = own.clone()
        own.copy_(mean)
        if own.dtype == mean.dtype:
            mean.copy_(original)

            def exchange_again() -> None:
                _exchange_(param, average)

            return exchange_again

    def restore_copy() -> None:
        with torch.no_grad():
            to_local(param).copy_(original)

    return restore_copy
