"""Schedule any numeric option of the optimizer: weight decay, momentum, betas."""

from __future__ import annotations

from operator import mul

from dtrain.errors import ConfigError
from dtrain.transform import Transform
from dtrain.transforms.hyperparameters.by_group import ByGroup, during_update, must_be_below_one, parse_group_values


def scale_option(option: str, schedule: ByGroup) -> Transform:
    """Multiply ``option`` of each parameter group by ``schedule(step)``.

    As with ``scale_lr``, the option changes during the update only and is restored after it, also after an error. Adds a metric
    with the name of the option. With names, adds ``option.NAME`` for each group with a factor.

    Formula: ``group[option] = group[option] * schedule(step)``

    Args:
        option: name such as ``"weight_decay"``; ``"betas.0"`` is the first number of a tuple. For ``"lr"`` use ``scale_lr``.
        schedule: a number or schedule for all groups, or one per group name, as for ``scale_lr``.

    Example:
        >>> import dtrain as dt
        >>> transform = dt.transforms.scale_option("weight_decay", lambda step: 1.0 / (1 + step))
        >>> transform.name
        'scale_weight_decay'
        >>> [0.1 * 1.0 / (1 + step) for step in range(3)]  # the decays of a group with weight_decay=0.1
        [0.1, 0.05, 0.03333333333333333]

    Mutates: the option of the optimizer's groups, during the update.

    Raises:
        ConfigError: ``option`` is not a name, ``schedule`` is neither a function nor a number, a factor is negative or not
            finite, or a factor raises a momentum or beta to 1 or more. A schedule's values are checked in their step, before
            the step changes anything. From ``Step.init`` on: a group lacks the option, or a name is wrong as for ``scale_lr``.

    Source: a schedule of the weight decay, Loshchilov and Hutter 2019, arXiv:1711.05101, section 4; of momentum, Smith 2018,
        arXiv:1803.09820, section 4.3.
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
        schedule: a number or schedule for all groups, or one per group name, as for ``scale_lr``.

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.linear(0.95, 0.85, 10)
        >>> dt.transforms.set_option("betas.0", schedule).name
        'set_betas_0'
        >>> [round(schedule(step), 2) for step in (0, 5, 10)]
        [0.95, 0.9, 0.85]

    Mutates: the option of the optimizer's groups, during the update.

    Raises:
        ConfigError: as ``scale_option``.

    Source: Smith 2018, arXiv:1803.09820, section 4.3, whose momentum falls while the rate rises.
    """
    name = _transform_name("set", option, "set_option")
    values = parse_group_values(schedule, name, "value", below_one=must_be_below_one(option))
    return during_update(name, option, values, lambda before, value: value)


def _transform_name(prefix: str, option: object, caller: str) -> str:
    """Return a transform name per option, so that one step may list several options."""
    if not isinstance(option, str) or not option.replace("_", "").replace(".", "").isalnum():
        raise ConfigError(f"{caller}: option must be a name such as 'weight_decay' or 'betas.0', got {option!r}.")
    return f"{prefix}_{option.replace('.', '_')}"
