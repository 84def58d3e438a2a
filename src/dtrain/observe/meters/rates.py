"""``learning_rates``: the hyperparameters that the optimizer has just now."""

from __future__ import annotations

from collections.abc import Sequence

from dtrain.errors import ConfigError
from dtrain.state import TrainState


def learning_rates(state: TrainState, *, also: Sequence[str] = ()) -> dict[str, float]:
    """The learning rate of each parameter group: ``lr``, or of several ``lr/<name>`` (``lr/<index>`` where they have no names).

    It is what the groups have between steps. ``scale_lr`` and ``set_option`` change that for the time of an update only, and
    give the rate of the update as the metric ``lr`` of the step. Beside them the numbers here are called ``base_lr`` and
    ``base_lr/<name>``, so both stand in one row of ``readings``; the same goes for other scheduled options.

    Args:
        state: whose optimizer.
        also: further numbers of the groups, such as ``("weight_decay", "momentum", "betas")``; a pair as ``betas`` becomes
            ``betas0`` and ``betas1``. Groups without one are left out. ``functools.partial(dt.learning_rates, also=...)`` is a
            meter.

    Host sync: none; one each for those that are tensors on a device.

    Raises:
        ConfigError: no group has a number of that name.

    Example:
        >>> from types import SimpleNamespace
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> state = SimpleNamespace(optimizer=torch.optim.Adam([weight], lr=0.5), slices={})
        >>> learning_rates(state, also=("betas",))
        {'lr': 0.5, 'betas0': 0.9, 'betas1': 0.999}
    """
    groups = state.optimizer.param_groups
    labels = [str(group.get("name", index)) for index, group in enumerate(groups)]
    if len(set(labels)) < len(labels):
        labels = [str(index) for index in range(len(groups))]
    # The slices have the names of all transforms of the step.
    scheduled = {option for option in ("lr", *also) if {f"scale_{option}", f"set_{option}"} & set(state.slices)}
    found: dict[str, float] = {}
    for option in ("lr", *also):
        own = [(label, group[option]) for label, group in zip(labels, groups, strict=True) if option in group]
        if not own:
            known = ", ".join(sorted({name for group in groups for name in group} - {"params", "name"}))
            raise ConfigError(f"learning_rates: no group of {type(state.optimizer).__name__} has {option!r}; they have {known}")
        for label, value in own:
            values = {f"{option}{place}": each for place, each in enumerate(value)} if isinstance(value, tuple | list) else {}
            for name, each in (values or {option: value}).items():
                called = f"base_{name}" if option in scheduled else name
                found[called if len(groups) == 1 else f"{called}/{label}"] = _number(option, each)
    return found


def _number(option: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ConfigError(f"learning_rates: {option!r} is no number, got {value!r}; leave it out") from None
