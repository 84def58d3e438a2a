"""Averages of parameters, laid out like them: how one is begun, copied, pulled along; and the time at which that is due."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from dtrain.clock import Clock
from dtrain.durations import Duration, RunLength
from dtrain.errors import StepError
from dtrain.state import TrainState
from dtrain.tensors import local, with_shard
from dtrain.types import Params


def begun(state: TrainState) -> dict[str, Tensor]:
    """A copy of every floating-point parameter, laid out like it, in float32 where the parameter has fewer bits.

    An average moves by a thousandth of a difference: eight bits of a bfloat16 would not see that.
    """
    return {name: _wide_copy(param.detach()) for name, param in state.params.items() if param.is_floating_point()}


def _wide_copy(param: Tensor) -> Tensor:
    return param.clone() if param.dtype.itemsize >= 4 else with_shard(param, local(param).float())


def copy_(targets: Params, sources: Params, names: Mapping[str, object]) -> None:
    """``target = source`` for every name of ``names``, on the local shards, whatever their dtypes. Mutates: ``targets``."""
    if names:
        with torch.no_grad():
            torch._foreach_copy_([local(targets[n]) for n in names], [local(sources[n]) for n in names])


def pull_(averages: Params, params: Params, weight: float) -> None:
    """``average += weight * (param - average)`` for every name of ``averages``, on the local shards.

    Mutates: ``averages``. Collective: none.
    """
    with torch.no_grad():
        targets = [local(average) for average in averages.values()]
        sources = [local(params[name]) for name in averages]
        if [t.dtype for t in targets] != [s.dtype for s in sources]:
            sources = [s.to(t.dtype) for s, t in zip(sources, targets, strict=True)]
        if targets:
            torch._foreach_lerp_(targets, sources, weight)


def clock_after(state: TrainState, where: str) -> Clock:
    """The clock as it will be when the step in progress is over: what falls due at its end is done in it, not one late.

    Raises:
        StepError: no step is in progress: nobody has counted the batch.
    """
    tally = state.tally
    if tally is None:
        raise StepError(f"{where}: no step is in progress; the state must come from microbatch_step, which counts the batch")
    return state.clock.tick(samples=tally.samples, tokens=tally.tokens, seconds=tally.seconds, end_of_epoch=tally.end_of_epoch)


def ratio(part: Duration, whole: Duration, run: RunLength | None) -> Fraction:
    """``part / whole``; in steps where their units differ, which ``run`` must be known well enough for.

    Raises:
        ConfigError: it is not.
    """
    if part.unit == whole.unit:
        return part.fraction / whole.fraction
    return Fraction(part.steps(run), whole.steps(run))


def share(clock: Clock, start: Duration, length: Duration) -> Fraction:
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
