"""Schedule numbers of the optimizer: the learning rate (``scale_lr``), or any option such as weight decay, momentum and betas.

``during_update`` changes an option of the parameter groups, selected by group name, during an update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Any, TypeAlias

from torch import Tensor

from dtrain.arguments import warn
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns
from dtrain.schedules.clock import Clock
from dtrain.schedules.hyperparameters import Hyperparameter, hyperparameter, is_number, to_number, warn_if_absolute_lr
from dtrain.state import TrainState
from dtrain.step.normalization import make_metric
from dtrain.step.transform import Transform, UpdateFn
from dtrain.typing import Metrics, Schedule, TransformState

ByGroup: TypeAlias = "float | Schedule | Mapping[str, float | Schedule] | Mapping[int, float | Schedule]"
"""A number or schedule for all groups, or one per group: by name or pattern (``"head"`` also selects ``head.no_decay``), or by
position in ``optimizer.param_groups``, for groups without a name.
"""

_BELOW_ONE = frozenset({"betas", "momentum"})


def scale_lr(schedule: ByGroup) -> Transform:
    """Multiply the learning rate of each parameter group by ``schedule(step)``.

    The factors are those of ``torch.optim.lr_scheduler.LambdaLR``. They depend only on the clock, so they are correct after any
    resume. The rates change during the update only and are restored after it, also after an error. Between steps the optimizer
    has its own rates (or the rates of a later ``set_lr_``), and so does a checkpoint. Adds the metric ``lr``, the rate of the
    first group. With names, adds ``lr.NAME`` for each group with a factor.

    Formula: ``lr = group["lr"] * schedule(step)``

    Args:
        schedule: a number or schedule for all groups, or one per group name of ``dt.optim.param_groups``:
            ``{"head": 0.1, "rest": dt.schedules.cosine(1.0, 0.1, 1000)}``. The name of a rule selects all its groups (``head``
            and ``head.no_decay``). ``*`` matches text without a dot, ``**`` any text. Groups without names have positions:
            ``{0: 1.0, 1: 0.1}``. A group without a factor keeps its rate.

    Example:
        >>> import dtrain as dt
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(
        ...     loss_fn, [dt.transforms.scale_lr(dt.schedules.linear(1.0, 0.0, 4))]
        ... )
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> for _ in range(4):  # the gradient is 1
        ...     state, _ = step(state, torch.ones(1, 1))
        >>> model.weight.item()  # rates 0.5, 0.375, 0.25, 0.125
        -1.25

    Mutates: ``lr`` of the optimizer's groups, during the update.

    Raises:
        ConfigError: ``schedule`` is neither a function nor a number, or a factor is negative or not finite. A schedule's values
            are checked in their step, before the step changes anything. From ``Step.init`` on: no group has a given name, or
            two names match one group.

    Warns: UserWarning on rank 0. From ``Step.init`` on: the values look like learning rates instead of factors, because they
        stay far below 1, or because their peak is the optimizer's rate. An optimizer with a rate of at least 0.5 takes rates.
        In a
        step: all rates are 0, because the schedule has ended before the run.

    Source: ``torch.optim.lr_scheduler.LambdaLR``, without its counter.

    Suggested values:
        GPT-3, warm-up, cosine to a tenth: 375M tokens of warm-up, then 260B tokens of cosine (Brown et al. 2020,
            arXiv:2005.14165, appendix B)
        ImageNet, ResNet-50, 90 epochs: ``multi_step(1.0, 0.1, [30, 60, 80])`` by epochs (Goyal et al. 2017, arXiv:1706.02677,
            section 5.1)
    When not to use: a torch scheduler already changes the rate: both would multiply it. Use one of the two.
    """
    factors = parse_group_values(schedule, "scale_lr", "factor")
    transform = during_update("scale_lr", "lr", factors, mul, always_report_first=True)
    assert transform.update is not None, "during_update sets update"
    scale_update, check_groups = transform.update, transform.init

    def init(state: TrainState) -> TransformState:
        groups = state.optimizer.param_groups
        if get_dist_info().rank == 0:
            warn_if_absolute_lr(
                "scale_lr", [hyper.value for _, hyper in factors.by_pattern], factors.indices_by_group(groups), groups
            )
        return check_groups(state)

    return replace(transform, init=init, update=lambda inner: _warn_when_over(factors, scale_update(inner)))


def _warn_when_over(group_values: GroupValues, update: UpdateFn) -> UpdateFn:
    """Return ``update`` with a warning on rank 0 if the schedule has ended before the run."""

    def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
        if get_dist_info().rank == 0 and _is_schedule_over(group_values, state.clock, state.optimizer.param_groups):
            # The text omits the step: Python repeats a warning whose text differs.
            warn(
                "scale_lr: the rate of every group is 0 from this step on, because the schedule has ended before the run. Give "
                "the schedule the length of the run, as in dt.schedules.cosine(1.0, 0.0, loader.total_steps(length))."
            )
        return update(state, metrics)

    return update_fn


def _is_schedule_over(group_values: GroupValues, clock: Clock, groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if all factors are 0 in this step and in the previous step, but not at half of the current count."""

    def all_zero(moment: Clock) -> bool:
        return not any(factor is None or factor for factor in group_values.values_by_group(moment, groups))

    def zero_at(count: Callable[[int], int]) -> bool:
        step, samples, tokens, epoch = map(count, (clock.step, clock.samples, clock.tokens, clock.epoch))
        return all_zero(replace(clock, step=step, samples=samples, tokens=tokens, epoch=epoch))

    # Test the current clock first: nearly every step ends the test there.
    return all_zero(clock) and zero_at(lambda count: max(count - 1, 0)) and not zero_at(lambda count: count // 2)


def scale_option(option: str, schedule: ByGroup) -> Transform:
    """Multiply ``option`` of each parameter group by ``schedule(step)``.

    As with ``scale_lr``, the option changes during the update only and is restored after it, also after an error. Adds a metric
    with the name of the option. With names, adds ``option.NAME`` for each group with a factor.

    Formula: ``group[option] = group[option] * schedule(step)``

    Args:
        option: name such as ``"weight_decay"``; ``"betas.0"`` is the first number of a tuple. For ``"lr"`` use ``scale_lr``.
        schedule: a number or schedule for all groups, or one per group name or position, as for ``scale_lr``.

    Example:
        >>> import dtrain as dt
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(
        ...     loss_fn,
        ...     [dt.transforms.scale_option("weight_decay", lambda step: 1.0 / (1 + step))],
        ... )
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> state = step.init(
        ...     model, torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)
        ... )
        >>> for _ in range(2):  # the gradient is 0
        ...     state, _ = step(state, torch.zeros(1, 1))
        >>> round(model.weight.item(), 6)  # decays of 0.1, then 0.05
        0.855

    Mutates: the option of the optimizer's groups, during the update.

    Raises:
        ConfigError: ``option`` is not a name, ``schedule`` is neither a function nor a number, a factor is negative or not
            finite, or a factor raises a momentum or beta to 1 or more. A schedule's values are checked in their step, before
            the step changes anything. From ``Step.init`` on: a group lacks the option, or a name is wrong as for ``scale_lr``.

    Source: a schedule of the weight decay, Loshchilov and Hutter 2019, arXiv:1711.05101, section 4; of momentum, Smith 2018,
        arXiv:1803.09820, section 4.3.

    Suggested values:
        DINO, weight decay from 0.04 to 0.4: ``scale_option("weight_decay", cosine(1.0, 10.0, steps))`` (Caron et al. 2021,
            arXiv:2104.14294)
        weight decay that falls with the rate: the schedule of ``scale_lr`` (Loshchilov and Hutter 2019, algorithm 2)
    When not to use: the optimizer is ``DecoupledAdamW`` or ``DecoupledSGDW``, whose decay already follows the rate: a second
        schedule would act twice.
    """
    name = _transform_name("scale", option, "scale_option")
    if option == "lr":
        raise ConfigError("scale_option: option must not be 'lr', got 'lr'. Use dt.transforms.scale_lr(schedule).")
    return during_update(name, option, parse_group_values(schedule, name, "factor"), mul)


def set_option(option: str, schedule: ByGroup) -> Transform:
    """Replace ``option`` of each parameter group by ``schedule(step)``.

    Use ``set_option`` for values without a base value, for example a momentum from 0.85 to 0.95. Otherwise it behaves as
    ``scale_option``. A transform listed after ``set_option`` scales the new value.

    Formula: ``group[option] = schedule(step)``

    Args:
        option: name such as ``"momentum"``, ``"betas.1"``, ``"lr"``.
        schedule: a number or schedule for all groups, or one per group name or position, as for ``scale_lr``.

    Example:
        >>> import dtrain as dt
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(
        ...     loss_fn,
        ...     [dt.transforms.set_option("momentum", dt.schedules.linear(0.1, 0.5, 1))],
        ... )
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))
        >>> for _ in range(2):  # the gradient is 1
        ...     state, _ = step(state, torch.ones(1, 1))
        >>> model.weight.item()  # 1, then 0.5 * 1 + 1
        -2.5

    Mutates: the option of the optimizer's groups, during the update.

    Raises:
        ConfigError: as ``scale_option``.

    Source: Smith 2018, arXiv:1803.09820, section 4.3, whose momentum falls while the rate rises.

    Suggested values:
        one cycle, momentum falls while the rate rises: ``momentum`` from 0.95 to 0.85 and back (Smith 2018, section 4.3)
        the same with Adam: ``betas.0`` from 0.95 to 0.85 and back (``torch.optim.lr_scheduler.OneCycleLR``'s defaults)
    When not to use: groups have different base values that a schedule should keep: ``scale_option`` multiplies them.
    """
    name = _transform_name("set", option, "set_option")
    values = parse_group_values(schedule, name, "value", below_one=must_be_below_one(option))
    return during_update(name, option, values, lambda before, value: value)


def _transform_name(prefix: str, option: object, caller: str) -> str:
    """Return a transform name per option, so that one step may list several options."""
    if not isinstance(option, str) or not option.replace("_", "").replace(".", "").isalnum():
        raise ConfigError(
            f"{caller}: option must be a name such as 'weight_decay' or 'betas.0', got {option!r}. "
            "Name an entry of optimizer.param_groups."
        )
    return f"{prefix}_{option.replace('.', '_')}"


def must_be_below_one(option: str) -> bool:
    """Return True if ``option`` must be below 1."""
    return option.partition(".")[0] in _BELOW_ONE


@dataclass(frozen=True, slots=True)
class GroupValues:
    """A number or schedule per parameter group.

    Args:
        caller: name of the transform for errors.
        by_pattern: values by pattern of group names, or by position; the pattern None selects all groups.
    """

    caller: str
    by_pattern: tuple[tuple[str | int | None, Hyperparameter], ...]

    @property
    def hyperparameters(self) -> tuple[Hyperparameter, ...]:
        """Return the values for ``Transform.hyperparameters``."""
        return tuple(value for _, value in self.by_pattern)

    def values_by_group(self, clock: Clock, groups: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """Return the value of each group for the next step; None for a group without a value.

        Raises:
            ConfigError: a value is negative or not finite, no group has a given name or position, or two patterns match one
                group.
        """
        values = [value(clock) for _, value in self.by_pattern]
        return [None if index is None else values[index] for index in self.indices_by_group(groups)]

    def indices_by_group(self, groups: Sequence[Mapping[str, Any]]) -> list[int | None]:
        """Return the index of the value of each group; None for a group without a value.

        Raises:
            ConfigError: no group has a given name, or two patterns match one group.
        """
        if self.by_pattern[0][0] is None:
            return [0 for _ in groups]
        names = [str(group.get("name", "")) for group in groups]
        patterns = [(key, self._select(key, names)) for key, _ in self.by_pattern if key is not None]
        for key, selected in patterns:
            if not any(selected):
                existing = ", ".join(name or f"{index} (no name)" for index, name in enumerate(names))
                wanted = f"named {key!r}" if isinstance(key, str) else f"at position {key}"
                raise ConfigError(
                    f"{self.caller}: a group {wanted} must exist, got the groups {existing}. "
                    "Build named groups with dt.optim.param_groups, or give their positions."
                )
        by_group = [[index for index, (_, selected) in enumerate(patterns) if selected[group]] for group in range(len(names))]
        for name, indices in zip(names, by_group, strict=True):
            if len(indices) > 1:
                several = " and ".join(repr(patterns[index][0]) for index in indices)
                raise ConfigError(f"{self.caller}: one pattern must match the group {name!r}, got {several}. Keep one pattern.")
        return [indices[0] if indices else None for indices in by_group]

    def _select(self, key: str | int, names: Sequence[str]) -> list[bool]:
        """Return for each group whether ``key``, a pattern of names or a position, selects the group."""
        if isinstance(key, int):
            return [index == key for index in range(len(names))]
        return list(map(compile_patterns([key, f"{key}.**"], caller=self.caller), names))


def parse_group_values(values: ByGroup, caller: str, kind: str, *, below_one: bool = False) -> GroupValues:
    """Parse the argument of a transform and check everything that does not depend on the run.

    Args:
        values: the argument.
        caller: name of the transform for errors.
        kind: word for the numbers in errors, for example ``"factor"``.
        below_one: if True, values of 1 and above are not allowed.

    Raises:
        ConfigError: ``values`` is not a number >= 0, a schedule, or a mapping from text or positions to numbers >= 0 and
            schedules.
    """
    by_name: Mapping[Any, float | Schedule] = values if isinstance(values, Mapping) else {None: values}
    if not by_name:
        raise ConfigError(f"{caller}: the mapping must not be empty, got {{}}. Give names of groups, as in {{'head': 0.1}}.")
    for key in by_name:
        if not (isinstance(key, str) or type(key) is int or (key is None and by_name is not values)):
            raise ConfigError(
                f"{caller}: names of groups must be text or positions, got {key!r}. "
                "Name the groups with 'name' in param_groups."
            )
    allowed = "[0, 1)" if below_one else "[0, inf)"
    labels = {key: f"{caller}: {kind}" if key is None else f"{caller}: {kind} of {key!r}" for key in by_name}
    return GroupValues(caller, tuple((key, hyperparameter(value, labels[key], allowed)) for key, value in by_name.items()))


def during_update(
    name: str,
    option: str,
    group_values: GroupValues,
    combine: Callable[[float, float], float],
    *,
    always_report_first: bool = False,
) -> Transform:
    """Return a transform that changes an option of parameter groups during the update and restores the option after it.

    Args:
        name: name of the transform.
        option: name of the option; ``betas.0`` is the first number of a tuple.
        group_values: a number per group.
        combine: function of the group's own option and the value for the step; returns the option during the update.
        always_report_first: if True, add a metric of the first group even if the values are given by name.
    """
    by_name = group_values.by_pattern[0][0] is not None

    def init(state: TrainState) -> TransformState:
        groups = state.optimizer.param_groups
        for group, index in zip(groups, group_values.indices_by_group(groups), strict=True):
            if index is not None:
                _read_option(group, option, name, type(state.optimizer).__name__)
        return {}

    def reported_options(groups: Sequence[Mapping[str, Any]], values: Sequence[float | None]) -> dict[str, float]:
        options = {option: _read_option(groups[0], option, name)} if always_report_first or not by_name else {}
        if by_name:
            named = [(group.get("name", index), value) for index, (group, value) in enumerate(zip(groups, values, strict=True))]
            options.update({f"{option}.{name}": value for name, value in named if value is not None})
        return options

    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
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
                options = {
                    key: make_metric(value, 1.0, state.device) for key, value in reported_options(groups, values).items()
                }
                return inner(state, {**metrics, **options})
            finally:
                for group, value, original in zip(groups, values, before, strict=True):
                    if value is not None:
                        group[key] = original

        return update_fn

    return Transform(name=name, init=init, update=update, uses_grad=False, hyperparameters=group_values.hyperparameters)


def _read_option(group: Mapping[str, Any], option: str, caller: str, owner: str = "the optimizer") -> float:
    """Return the number ``option`` of a group.

    Raises:
        ConfigError: the group has no such option, or the option is not a number.
    """
    key, _, index = option.partition(".")
    value = group.get(key)
    if index and isinstance(value, (tuple, list)) and index.isdecimal() and int(index) < len(value):
        value = value[int(index)]
    elif index:
        value = None
    # Numpy's numbers are numbers too. A learning rate may be a tensor on the device.
    if not isinstance(value, bool | Tensor):
        value = to_number(value)
    if not is_number(value) and not (isinstance(value, Tensor) and value.ndim == 0):
        which = f"the group {group['name']!r}" if "name" in group else "a group"
        numbers = [key for key, value in group.items() if is_number(value)]
        pairs = [f"{key}.{index}" for key, value in group.items() if isinstance(value, tuple) for index in range(len(value))]
        raise ConfigError(
            f"{caller}: option must be a number in {which} of {owner}, got {option!r}. "
            f"Give one of {', '.join(numbers + pairs)}."
        )
    number: float = value  # type: ignore[assignment]
    return number


def _write_option(group: dict[str, Any], option: str, value: float) -> None:
    """Write ``value`` to ``option`` of a group. For ``betas.0`` replace the whole tuple.

    Mutates: ``group``.
    """
    key, _, index = option.partition(".")
    before = group[key]
    group[key] = type(before)(value if i == int(index) else old for i, old in enumerate(before)) if index else value


def _check_value(value: float | None, option: str, caller: str) -> None:
    if value is not None and must_be_below_one(option) and not value < 1.0:
        raise ConfigError(f"{caller}: {option} must be below 1, got {value!r}. Lower the largest value of the schedule.")
