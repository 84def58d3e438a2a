"""Any number among the options of an optimizer as a schedule: weight decay, momentum, betas."""

from __future__ import annotations

from operator import mul

from dtrain.errors import ConfigError
from dtrain.transform import Transform
from dtrain.transforms.hyperparameters.by_group import ByGroup, during_update, must_be_below_one, parse_group_values


def scale_option(option: str, schedule: ByGroup) -> Transform:
    """Multiply ``option`` of each parameter group by ``schedule(step)``, for the step about to run.

    As ``scale_lr`` does with rates: each group has its own number back when the step is over, also after an error. Adds a
    metric called as the option, with names ``option.NAME`` for each group that has a factor.

    Formula: ``group[option] = group[option] * schedule(step)``

    Args:
        option: such as ``"weight_decay"``; ``"betas.0"`` is the first of several. Rates are scaled by ``scale_lr``.
        schedule: a number or schedule for all groups, or one each by the group's name, as for ``scale_lr``.

    Mutates: the option of the optimizer's groups, for the time of the update.

    Raises:
        ConfigError: no option's name, a ``schedule`` that is neither a function nor a number; a factor that is negative or not
            finite, or a momentum or beta that it makes 1 or more, of a schedule in the step that it is for, before anything
            changes; from ``Step.init`` on, an option that a group does not have, and names as for ``scale_lr``.

    Source: a schedule of the weight decay, Loshchilov and Hutter 2019, arXiv:1711.05101, section 4; of momentum, Smith 2018,
        arXiv:1803.09820, section 4.3.

    Example:
        >>> transform = scale_option("weight_decay", lambda step: 1.0 / (1 + step))
        >>> transform.name
        'scale_weight_decay'
        >>> [0.1 * 1.0 / (1 + step) for step in range(3)]  # the decays of a group that was made with 0.1
        [0.1, 0.05, 0.03333333333333333]
    """
    name = _transform_name("scale", option, "scale_option")
    if option == "lr":
        raise ConfigError("scale_option: 'lr' is for scale_lr; call dt.transforms.scale_lr(schedule)")
    return during_update(name, option, parse_group_values(schedule, name, "factor"), mul)


def set_option(option: str, schedule: ByGroup) -> Transform:
    """Put ``schedule(step)`` in place of ``option`` of each parameter group, for the step about to run.

    For what is no multiple of a base: a momentum that goes from 0.85 to 0.95. All else is as in ``scale_option``. A transform
    listed after this one scales what it has set.

    Formula: ``group[option] = schedule(step)``

    Args:
        option: such as ``"momentum"``, ``"betas.1"``, ``"lr"``.
        schedule: a number or schedule for all groups, or one each by the group's name, as for ``scale_lr``.

    Mutates: the option of the optimizer's groups, for the time of the update.

    Raises:
        ConfigError: as ``scale_option``.

    Source: Smith 2018, arXiv:1803.09820, section 4.3, whose momentum goes down as the rate goes up.

    Example:
        >>> from dtrain.schedules.curves import linear
        >>> set_option("betas.0", linear(0.95, 0.85, 10)).name
        'set_betas_0'
        >>> [round(linear(0.95, 0.85, 10)(step), 2) for step in (0, 5, 10)]
        [0.95, 0.9, 0.85]
    """
    name = _transform_name("set", option, "set_option")
    given = parse_group_values(schedule, name, "value", below_one=must_be_below_one(option))
    return during_update(name, option, given, lambda held, number: number)


def _transform_name(prefix: str, option: object, caller: str) -> str:
    """The name of a transform: one for each option, so that there may be several in a step."""
    if not isinstance(option, str) or not option.replace("_", "").replace(".", "").isalnum():
        raise ConfigError(f"{caller}: needs the name of an option, as in 'weight_decay' or 'betas.0', got {option!r}")
    return f"{prefix}_{option.replace('.', '_')}"
