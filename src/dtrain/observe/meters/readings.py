"""``readings``: one mapping of all numbers of a step that is logged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from dtrain.errors import ConfigError
from dtrain.state import TrainState

Meter: TypeAlias = Callable[[TrainState], Mapping[str, float]]
"""Numbers by name, of a state: what ``throughput()`` returns. What it remembers between calls is no part of training."""


def readings(state: TrainState, *sources: Mapping[str, float] | Meter) -> dict[str, float]:
    """The numbers of all ``sources`` in one dict, in their order, for a sink: ``log(state.step, dt.readings(state, ...))``.

    Args:
        state: after the step that is logged; what meters are called with.
        sources: mappings of numbers, as ``reduce_metrics`` returns, and meters: ``dt.throughput()``, ``dt.memory_stats``, or
            any function of a state.

    Collective: those of the meters.

    Raises:
        ConfigError: two sources give the same name, or one is neither a mapping nor a function, or a meter gives no mapping.

    Example:
        >>> readings(None, {"loss": 2.5}, lambda state: {"lr": 0.1})
        {'loss': 2.5, 'lr': 0.1}
    """
    found: dict[str, float] = {}
    for place, source in enumerate(sources, start=1):
        numbers = source(state) if callable(source) else source
        if not isinstance(numbers, Mapping):
            what = f"the meter {_called(source)} returned" if callable(source) else "got"
            raise ConfigError(
                f"readings: source {place} must give numbers by name, {what} {type(numbers).__name__}; pass a dict, or a meter "
                "as dt.throughput() makes it"
            )
        twice = next((name for name in numbers if name in found), None)
        if twice is not None:
            raise ConfigError(
                f"readings: {twice!r} is given by source {place} and by an earlier one; rename it or leave it out"
            )
        found.update(numbers)
    return found


def _called(source: object) -> str:
    return str(getattr(source, "__qualname__", type(source).__name__))
