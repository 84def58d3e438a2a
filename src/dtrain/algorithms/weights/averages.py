"""Averages of parameters, laid out like them: how one is begun, copied, pulled along; and shares of time."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from dtrain.clock import Clock
from dtrain.durations import Duration, RunLength
from dtrain.state import TrainState
from dtrain.tensors import local, with_shard
from dtrain.types import Params


def begun(state: TrainState) -> dict[str, Tensor]:
    """A copy of every parameter of real or complex numbers, laid out like it, in float32 where the parameter has fewer bits.

    An average moves by a thousandth of a difference: eight bits of a bfloat16 would not see that.
    """
    return {
        name: _wide_copy(param.detach())
        for name, param in state.params.items()
        if param.is_floating_point() or param.is_complex()
    }


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
        pairs = [(local(average), local(params[name])) for name, average in averages.items()]
        alike = [(target, source) for target, source in pairs if target.dtype == source.dtype]
        if alike:
            targets, sources = zip(*alike, strict=True)
            torch._foreach_lerp_(targets, sources, weight)
        for target, source in pairs:
            if target.dtype != source.dtype:  # one after another: wide copies of all would take what the averages do once more
                target.lerp_(source.to(target.dtype), weight)


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
