"""Options of an optimizer's parameter groups that are other ones for the time of an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from dtrain.clock import Clock
from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns
from dtrain.schedules.hyperparameter import Hyperparameter, hyperparameter, is_number
from dtrain.state import TrainState
from dtrain.transform import Transform, UpdateFn
from dtrain.typing import Metrics, Schedule, TransformState, make_metric

ByGroup: TypeAlias = "float | Schedule | Mapping[str, float | Schedule]"
"""A number or schedule for all groups, or one each by name: ``"head"`` is ``head.no_decay``, too, and patterns are names."""

_BELOW_ONE = frozenset({"betas", "momentum"})


def must_be_below_one(option: str) -> bool:
    """Return True if an option of an optimizer must be below 1."""
    return option.partition(".")[0] in _BELOW_ONE


@dataclass(frozen=True, slots=True)
class GroupValues:
    """A number or schedule per group.

    Args:
        caller: the transform, for errors.
        kind: what its numbers are, for errors.
        by_pattern: by patterns of names, of which None stands for all groups.
    """

    caller: str
    kind: str
    by_pattern: tuple[tuple[str | None, Hyperparameter], ...]

    @property
    def hyperparameters(self) -> tuple[Hyperparameter, ...]:
        """Its numbers, for ``Transform.hyperparameters``."""
        return tuple(value for _, value in self.by_pattern)

    def values_by_group(self, clock: Clock, groups: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """For each group its number for the step about to run, None where there is none.

        Raises:
            ConfigError: a number that is negative or not finite, a name that no group has, or a group that two patterns fit.
        """
        values = [value(clock) for _, value in self.by_pattern]
        return [None if at is None else values[at] for at in self.indices_by_group(groups)]

    def indices_by_group(self, groups: Sequence[Mapping[str, Any]]) -> list[int | None]:
        """For each group the index of its number.

        Raises:
            ConfigError: a name that no group has, or a group that two patterns fit.
        """
        if self.by_pattern[0][0] is None:
            return [0 for _ in groups]
        names = [str(group.get("name", "")) for group in groups]
        fits = [
            (key, compile_patterns([key, f"{key}.**"], caller=self.caller)) for key, _ in self.by_pattern if key is not None
        ]
        for key, fit in fits:
            if not any(fit(name) for name in names):
                have = ", ".join(name or "(no name)" for name in names)
                raise ConfigError(
                    f"{self.caller}: no group is called {key!r}, there are: {have}; dt.optim.param_groups gives names"
                )
        mine = [[at for at, (_, fit) in enumerate(fits) if fit(name)] for name in names]
        for name, found in zip(names, mine, strict=True):
            if len(found) > 1:
                both = " and ".join(repr(fits[at][0]) for at in found)
                raise ConfigError(f"{self.caller}: {both} fit the group {name!r}; keep one of them")
        return [found[0] if found else None for found in mine]


def parse_group_values(given: ByGroup, caller: str, kind: str, *, below_one: bool = False) -> GroupValues:
    """The argument of a transform, checked as far as it can be without a run.

    Args:
        given: the argument.
        caller: the transform, for errors.
        kind: what its numbers are, for errors.
        below_one: if True, 1 and more are not allowed.

    Raises:
        ConfigError: neither a number >= 0, nor a schedule, nor a mapping from text to such.
    """
    by_name: Mapping[Any, float | Schedule] = given if isinstance(given, Mapping) else {None: given}
    if not by_name:
        raise ConfigError(f"{caller}: needs the name of a group, got an empty mapping; as in {{'head': 0.1}}")
    for key in by_name:
        if not (isinstance(key, str) or (key is None and by_name is not given)):
            raise ConfigError(f"{caller}: names of groups are text, got {key!r}")
    allowed = "[0, 1)" if below_one else "[0, inf)"
    return GroupValues(
        caller,
        kind,
        tuple(
            (key, hyperparameter(value, _hyperparameter_label(caller, kind, key), allowed)) for key, value in by_name.items()
        ),
    )


def _hyperparameter_label(caller: str, kind: str, key: str | None) -> str:
    return f"{caller}: {kind}" if key is None else f"{caller}: {kind} of {key!r}"


def during_update(
    name: str,
    option: str,
    group_values: GroupValues,
    combine: Callable[[float, float], float],
    *,
    always_report_first: bool = False,
) -> Transform:
    """A transform that changes an option of groups for the time of the update.

    Args:
        name: of the transform.
        option: of the groups; ``betas.0`` is the first of several numbers.
        group_values: a number per group.
        combine: what the option is for the update, of what the group has and the number for the step.
        always_report_first: whether there is a metric of the first group even if numbers go by name.
    """
    by_name = group_values.by_pattern[0][0] is not None

    def init(state: TrainState) -> TransformState:
        groups = state.optimizer.param_groups
        for group, at in zip(groups, group_values.indices_by_group(groups), strict=True):
            if at is not None:
                _read_option(group, option, name, type(state.optimizer).__name__)
        return {}

    def reported(groups: Sequence[Mapping[str, Any]], values: Sequence[float | None]) -> dict[str, float]:
        first = {option: _read_option(groups[0], option, name)} if always_report_first or not by_name else {}
        if by_name:
            first.update({f"{option}.{g['name']}": v for g, v in zip(groups, values, strict=True) if v is not None})
        return first

    def update(inner: UpdateFn) -> UpdateFn:
        def changed(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            groups = state.optimizer.param_groups
            values: list[float | None] = []
            for group, number in zip(groups, group_values.values_by_group(state.clock, groups), strict=True):
                values.append(None if number is None else combine(_read_option(group, option, name), number))
                _check_value(values[-1], option, name)
            key = option.partition(".")[0]
            before = [group.get(key) for group in groups]
            try:
                for group, value in zip(groups, values, strict=True):
                    if value is not None:
                        _write_option(group, option, value)
                seen = {key: make_metric(value, 1.0, state.device) for key, value in reported(groups, values).items()}
                return inner(state, {**metrics, **seen})
            finally:
                for group, value, held in zip(groups, values, before, strict=True):
                    if value is not None:
                        group[key] = held

        return changed

    return Transform(name=name, init=init, update=update, uses_grad=False, hyperparameters=group_values.hyperparameters)


def _read_option(group: Mapping[str, Any], option: str, caller: str, owner: str = "the optimizer") -> float:
    """The number that a group has as ``option``.

    Raises:
        ConfigError: it has none, or something else.
    """
    key, _, index = option.partition(".")
    value = group.get(key)
    if index and isinstance(value, (tuple, list)) and index.isdecimal() and int(index) < len(value):
        value = value[int(index)]
    elif index:
        value = None
    if not is_number(value) and not (isinstance(value, Tensor) and value.ndim == 0):  # a rate may be a tensor on the device
        which = f"the group {group['name']!r}" if "name" in group else "a group"
        found = [key for key, value in group.items() if is_number(value)]
        pairs = [f"{key}.{at}" for key, value in group.items() if isinstance(value, tuple) for at in range(len(value))]
        raise ConfigError(f"{caller}: {which} of {owner} has no number {option!r}; it has {', '.join(found + pairs)}")
    number: float = value  # type: ignore[assignment]
    return number


def _write_option(group: dict[str, Any], option: str, value: float) -> None:
    """Mutates: ``group``; of several numbers it has new ones after that."""
    key, _, index = option.partition(".")
    held = group[key]
    group[key] = type(held)(value if at == int(index) else old for at, old in enumerate(held)) if index else value


def _check_value(value: float | None, option: str, caller: str) -> None:
    if value is not None and must_be_below_one(option) and not value < 1.0:
        raise ConfigError(f"{caller}: needs {option} < 1, got {value!r}")
