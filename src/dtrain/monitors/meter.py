"""Collect the numbers of meters and metrics into one record: ``collect``, and the meter ``learning_rates``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from dtrain.errors import ConfigError
from dtrain.state import TrainState

Meter: TypeAlias = Callable[[TrainState], Mapping[str, float]]
"""Meter: function from a training state to numbers by name. Memory between calls is not part of the training state."""


def collect(state: TrainState, *sources: Mapping[str, float] | Meter) -> dict[str, float]:
    """Merge the numbers of all ``sources`` into one dict, in order, for a logger.

    Args:
        state: training state after the step; passed to the meters.
        sources: mappings of numbers, such as the result of ``reduce_metrics``, and meters, such as ``throughput()``,
            ``memory_stats`` or any function of a state.

    Collective: those of the meters.

    Example:
        >>> import dtrain as dt
        >>> dt.monitors.collect(None, {"loss": 2.5}, lambda state: {"lr": 0.1})
        {'loss': 2.5, 'lr': 0.1}

    Raises:
        ConfigError: two sources return the same name, a source is neither a mapping nor a function, or a meter returns no
            mapping.
    """
    merged: dict[str, float] = {}
    for position, source in enumerate(sources, start=1):
        numbers = source(state) if callable(source) else source
        if not isinstance(numbers, Mapping):
            origin = f" from the meter {_name_of(source)}" if callable(source) else ""
            raise ConfigError(
                f"collect: source {position} must be or return a mapping of numbers, got {type(numbers).__name__}{origin}. "
                "Pass a dict, or a meter such as dt.monitors.throughput()."
            )
        duplicate = next((name for name in numbers if name in merged), None)
        if duplicate is not None:
            raise ConfigError(
                f"collect: names must be unique, got {duplicate!r} from source {position} and an earlier source. "
                "Rename the number."
            )
        merged.update(numbers)
    return merged


def _name_of(source: object) -> str:
    return str(getattr(source, "__qualname__", type(source).__name__))


def learning_rates(state: TrainState, *, extra_options: Sequence[str] = ()) -> dict[str, float]:
    """Return the learning rate of each parameter group: ``lr``, or ``lr/<name>`` with several groups (or ``lr/<index>``).

    The numbers are the values of the groups between steps. ``scale_lr`` and ``set_option`` change an option only during an
    update and add the metric ``lr`` to the step. The numbers here are then called ``base_lr`` and ``base_lr/<name>``, so that
    ``collect`` can merge both. The same holds for other scheduled options.

    Args:
        state: training state with the optimizer.
        extra_options: further options of the groups, such as ``("weight_decay", "momentum", "betas")``; a pair such as
            ``betas`` becomes ``betas0`` and ``betas1``. Groups without the option are skipped. For a meter, use
            ``functools.partial(dt.monitors.learning_rates, extra_options=...)``.

    Host sync: none; one for each option that is a tensor on a device.

    Example:
        >>> from types import SimpleNamespace
        >>> import dtrain as dt
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> state = SimpleNamespace(
        ...     optimizer=torch.optim.Adam([weight], lr=0.5), transform_states={}
        ... )
        >>> dt.monitors.learning_rates(state, extra_options=("betas",))
        {'lr': 0.5, 'betas0': 0.9, 'betas1': 0.999}

    Raises:
        ConfigError: no group has a number with the name.
    """
    groups = state.optimizer.param_groups
    labels = [str(group.get("name", index)) for index, group in enumerate(groups)]
    if len(set(labels)) < len(labels):
        labels = [str(index) for index in range(len(groups))]
    # Transform states have the names of all transforms of the step.
    scheduled = {
        option for option in ("lr", *extra_options) if {f"scale_{option}", f"set_{option}"} & set(state.transform_states)
    }
    rates: dict[str, float] = {}
    for option in ("lr", *extra_options):
        labeled = [(label, group[option]) for label, group in zip(labels, groups, strict=True) if option in group]
        if not labeled:
            known = ", ".join(sorted({name for group in groups for name in group} - {"params", "name"}))
            raise ConfigError(
                f"learning_rates: extra_options must be options of {type(state.optimizer).__name__} ({known}), got {option!r}. "
                "Choose from these options."
            )
        for label, value in labeled:
            values = {f"{option}{index}": each for index, each in enumerate(value)} if isinstance(value, tuple | list) else {}
            for name, each in (values or {option: value}).items():
                metric = f"base_{name}" if option in scheduled else name
                rates[metric if len(groups) == 1 else f"{metric}/{label}"] = _to_number(option, each)
    return rates


def _to_number(option: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigError(f"learning_rates: option {option!r} must be a number, got {value!r}. Remove the option.") from None


def run_identity(state: TrainState) -> tuple[int, str | None]:
    """Return an identifier that changes if a state belongs to another run or to a newly loaded checkpoint."""
    # The id avoids a reference to the object, which would keep the checkpoint's folder locked.
    return id(state._run_context), state._run_context.lineage.resumed_from
