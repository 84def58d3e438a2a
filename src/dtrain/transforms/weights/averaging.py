"""Averages of parameters, laid out like them: how one is begun, copied, pulled along; and shares of time.

An average in place of the parameters: for an evaluation, or for good."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction

import torch
from torch import Tensor

from dtrain.clock import Clock
from dtrain.dtensor import from_local_like, to_local
from dtrain.durations import Duration, RunLength
from dtrain.errors import ConfigError
from dtrain.shard.buffers import BufferSnapshot
from dtrain.shard.unshard import is_unsharded, reshard
from dtrain.state import TrainState
from dtrain.typing import Params


def init_average(state: TrainState) -> dict[str, Tensor]:
    """A copy of every parameter of real or complex numbers, laid out like it, in float32 where the parameter has fewer bits.

    An average moves by a thousandth of a difference: eight bits of a bfloat16 would not see that.
    """
    return {
        name: _clone_at_least_float32(param.detach())
        for name, param in state.params.items()
        if param.is_floating_point() or param.is_complex()
    }


def _clone_at_least_float32(param: Tensor) -> Tensor:
    return param.clone() if param.dtype.itemsize >= 4 else from_local_like(param, to_local(param).float())


def copy_params_(targets: Params, sources: Params, names: Mapping[str, object]) -> None:
    """``target = source`` for every name of ``names``, on the local shards, whatever their dtypes. Mutates: ``targets``."""
    if names:
        with torch.no_grad():
            torch._foreach_copy_([to_local(targets[n]) for n in names], [to_local(sources[n]) for n in names])


def lerp_(averages: Params, params: Params, weight: float) -> None:
    """``average += weight * (param - average)`` for every name of ``averages``, on the local shards.

    Mutates: ``averages``. Collective: none.
    """
    with torch.no_grad():
        pairs = [(to_local(average), to_local(params[name])) for name, average in averages.items()]
        alike = [(target, source) for target, source in pairs if target.dtype == source.dtype]
        if alike:
            targets, sources = zip(*alike, strict=True)
            torch._foreach_lerp_(targets, sources, weight)
        for target, source in pairs:
            if target.dtype != source.dtype:  # one after another: wide copies of all would take what the averages do once more
                target.lerp_(source.to(target.dtype), weight)


def duration_ratio(part: Duration, whole: Duration, run: RunLength | None) -> Fraction:
    """``part / whole``; in steps where their units differ, which ``run`` must be known well enough for.

    Raises:
        ConfigError: it is not.
    """
    if part.unit == whole.unit:
        return part.fraction / whole.fraction
    return Fraction(part.steps(run), whole.steps(run))


def elapsed_fraction(clock: Clock, start: Duration, length: Duration) -> Fraction:
    """How much of ``length`` has passed since ``start``, from 0 to 1; in steps where their units differ.

    Raises:
        ConfigError: the run is not known well enough for that.
    """
    if start.unit == length.unit:
        # A count of "dur" is a float next to a fraction with the steps of the run below the line: that fraction is meant.
        passed = (Fraction(clock.count(start.unit)).limit_denominator(10**7) - start.fraction) / length.fraction
    else:
        passed = Fraction(clock.step - start.steps(clock.run), length.steps(clock.run))
    return min(max(passed, Fraction(0)), Fraction(1))


@contextmanager
def use_average(state: TrainState, name: str = "ema") -> Iterator[None]:
    """A context in which the model computes with an average of its parameters; on leaving, every bit is as it was.

    Formula: ``param, average = average, param`` on entering and again on leaving, for every name in
    ``state.slices[name]["params"]``

    The two exchange their contents, one local shard after the other, so it takes the memory of one shard more (of a parameter
    with fewer bits than its average, a copy for as long as it lasts), and gathers nothing. ``evaluate``, ``eval_mode``,
    ``unshard_params`` and ``full_params`` see the average inside. Buffers that are changed inside, by ``update_batch_norm_`` or in
    training mode, are put back too, also after an exception.

    The run stands still inside: a step, a save or a load of any of its states, and a second ``use_average``, raise.

    Args:
        state: the newest one of its run.
        name: of a transform whose slice has ``{"params": {name: average}}``: ``"ema"``, ``"swa"``.

    Mutates: parameters and the slice, while it lasts. Collective: none. Host sync: none.

    Raises:
        ConfigError: ``state`` has no such average, it has not begun, or the model is whole just now (``unshard_params``).
        StaleStateError: ``state`` was stepped already, or an average is swapped in.

    Source: Tarvainen and Valpola 2017, arXiv:1703.01780, section 2: the averaged weights are those that predict.

    Example:
        >>> from dtrain.transforms.weights.ema import ema
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> step = compose_step(mean_loss(lambda model, x: model(x).sum() / len(x), weight=len), [ema(0.75)])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 4.0)
        >>> state, _ = step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.5)), torch.ones(2, 1))
        >>> with swapped(state, "ema"):
        ...     model.weight.item()  # 0.75 * 4 + 0.25 * 3.5
        3.875
        >>> model.weight.item()
        3.5
    """
    averages = _find_average(state, name, "swapped")
    buffers, undo = BufferSnapshot(state.model), list[Callable[[], None]]()
    buffers.capture()
    reshard(state.model)  # an earlier forward may have left gathered copies, with which the next one would compute
    state.run_context.swapped_average = name
    try:
        for key, average in averages.items():
            undo.append(_exchange_(state.params[key], average))
        yield
    finally:
        reshard(state.model)
        for back in undo:
            back()
        buffers.restore()
        state.run_context.swapped_average = None


def load_average_(state: TrainState, name: str = "ema") -> None:
    """Leave an average in the parameters for good: what training has come to, when it is over.

    Formula: ``param = average``, for every name in ``state.slices[name]["params"]``

    The running statistics of batch normalisation are still those of the parameters before: ``update_batch_norm_`` makes new
    ones. The optimizer and the average stay as they are.

    Args:
        state: the newest one of its run, which stays so.
        name: of a transform whose slice has ``{"params": {name: average}}``.

    Mutates: parameters. Collective: none. Host sync: none.

    Raises:
        ConfigError: ``state`` has no such average, it has not begun, or the model is whole just now (``unshard_params``).
        StaleStateError: ``state`` was stepped already, or an average is swapped in.

    Source: Izmailov et al. 2018, arXiv:1803.05407, algorithm 1: the average is the result.

    Example:
        >>> from dtrain.transforms.weights.ema import ema
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> step = compose_step(mean_loss(lambda model, x: model(x).sum() / len(x), weight=len), [ema(0.75)])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(model.weight, 4.0)
        >>> state, _ = step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.5)), torch.ones(2, 1))
        >>> load_average_(state, "ema")
        >>> model.weight.item()  # 0.75 * 4 + 0.25 * 3.5
        3.875
    """
    averages = _find_average(state, name, "load_average_")
    reshard(state.model)
    copy_params_(state.params, averages, averages)


def _find_average(state: TrainState, name: str, caller: str) -> Mapping[str, Tensor]:
    state._check_not_stale(caller)
    kept = state.transform_states.get(name, {})
    averages: Mapping[str, Tensor] = kept.get("params", {})
    if not averages or any(key not in state.params for key in averages):
        with_one = [key for key, content in state.transform_states.items() if "params" in content]
        raise ConfigError(f"{caller}: the state has no average {name!r} of its parameters; it has {with_one or 'none'}")
    if not kept.get("averaged", 1):
        raise ConfigError(f"{caller}: the average {name!r} has not begun at step {state.step}; see its start")
    if is_unsharded(state.model):
        raise ConfigError(
            f"{caller}: the model is whole just now, and would not change; enter dt.memory.unshard_params inside of it"
        )
    return averages


def _exchange_(param: Tensor, average: Tensor) -> Callable[[], None]:
    """Put ``average`` into ``param``. Mutates both. Returns: what undoes it."""
    with torch.no_grad():
        own, mean = to_local(param), to_local(average)
        kept = own.clone()
        own.copy_(mean)
        if own.dtype == mean.dtype:
            mean.copy_(kept)

            def back() -> None:
                _exchange_(param, average)

            return back

    def put_back() -> None:
        with torch.no_grad():
            to_local(param).copy_(kept)

    return put_back
