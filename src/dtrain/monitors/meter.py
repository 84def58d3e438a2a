"""``collect``: one mapping of all numbers of a step that is logged.

``learning_rates``: the hyperparameters that the optimizer has just now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from dtrain.errors import ConfigError
from dtrain.state import TrainState

Meter: TypeAlias = Callable[[TrainState], Mapping[str, float]]
"""Numbers by name, of a state: what ``throughput()`` returns. What it remembers between calls is no part of training."""


def collect(state: TrainState, *sources: Mapping[str, float] | Meter) -> dict[str, float]:
    """The numbers of all ``sources`` in one dict, in their order, for a sink: ``log(state.step, dt.monitors.collect(state, ...))``.

    Args:
        state: after the step that is logged; what meters are called with.
        sources: mappings of numbers, as ``reduce_metrics`` returns, and meters: ``dt.monitors.throughput()``, ``dt.monitors.memory_stats``, or
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
            what = f"the meter {_name_of(source)} returned" if callable(source) else "got"
            raise ConfigError(
                f"readings: source {place} must give numbers by name, {what} {type(numbers).__name__}; pass a dict, or a meter "
                "as dt.monitors.throughput() makes it"
            )
        twice = next((name for name in numbers if name in found), None)
        if twice is not None:
            raise ConfigError(
                f"readings: {twice!r} is given by source {place} and by an earlier one; rename it or leave it out"
            )
        found.update(numbers)
    return found


def _name_of(source: object) -> str:
    return str(getattr(source, "__qualname__", type(source).__name__))


def learning_rates(state: TrainState, *, extra_options: Sequence[str] = ()) -> dict[str, float]:
    """The learning rate of each parameter group: ``lr``, or of several ``lr/<name>`` (``lr/<index>`` where they have no names).

    It is what the groups have between steps. ``scale_lr`` and ``set_option`` change that for the time of an update only, and
    give the rate of the update as the metric ``lr`` of the step. Beside them the numbers here are called ``base_lr`` and
    ``base_lr/<name>``, so both stand in one row of ``collect``; the same goes for other scheduled options.

    Args:
        state: whose optimizer.
        extra_options: further numbers of the groups, such as ``("weight_decay", "momentum", "betas")``; a pair as ``betas`` becomes
            ``betas0`` and ``betas1``. Groups without one are left out. ``functools.partial(dt.monitors.learning_rates, extra_options=...)`` is a
            meter.

    Host sync: none; one each for those that are tensors on a device.

    Raises:
        ConfigError: no group has a number of that name.

    Example:
        >>> from types import SimpleNamespace
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> state = SimpleNamespace(optimizer=torch.optim.Adam([weight], lr=0.5), slices={})
        >>> learning_rates(state, extra_options=("betas",))
        {'lr': 0.5, 'betas0': 0.9, 'betas1': 0.999}
    """
    groups = state.optimizer.param_groups
    labels = [str(group.get("name", index)) for index, group in enumerate(groups)]
    if len(set(labels)) < len(labels):
        labels = [str(index) for index in range(len(groups))]
    # The slices have the names of all transforms of the step.
    scheduled = {
        option for option in ("lr", *extra_options) if {f"scale_{option}", f"set_{option}"} & set(state.transform_states)
    }
    found: dict[str, float] = {}
    for option in ("lr", *extra_options):
        own = [(label, group[option]) for label, group in zip(labels, groups, strict=True) if option in group]
        if not own:
            known = ", ".join(sorted({name for group in groups for name in group} - {"params", "name"}))
            raise ConfigError(f"learning_rates: no group of {type(state.optimizer).__name__} has {option!r}; they have {known}")
        for label, value in own:
            values = {f"{option}{place}": each for place, each in enumerate(value)} if isinstance(value, tuple | list) else {}
            for name, each in (values or {option: value}).items():
                called = f"base_{name}" if option in scheduled else name
                found[called if len(groups) == 1 else f"{called}/{label}"] = _to_number(option, each)
    return found


def _to_number(option: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigError(f"learning_rates: {option!r} is no number, got {value!r}; leave it out") from None
