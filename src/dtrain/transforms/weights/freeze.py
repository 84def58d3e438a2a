"""Parameters that are trained no more: all that are named from a point in time on, or layer after layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

from torch import Tensor

from dtrain.combinators import ParamFilter, masked
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import is_number
from dtrain.state import TrainState
from dtrain.transform import GradFn, Transform
from dtrain.transforms.weights.averaging import elapsed_fraction
from dtrain.typing import Batch, Metrics


def freeze(where: ParamFilter, *, start: Duration | int | str = 0) -> Transform:
    """Leave the parameters ``where`` says as they are from ``start`` on.

    Formula: ``param[t + 1] = param[t]`` for every step ``t`` that begins at or after ``start``

    A frozen parameter gets no gradient, no weight decay, no momentum: to the optimizer it is not there, and its state (moments,
    steps) stands still and is kept. What comes before all trained parameters in the forward is not run backward at all; behind
    them the gradient of a frozen weight is saved, not that of its input. Of a sharded model, units that are frozen as a whole
    are not reduced, and those that backward does not come to are not gathered again, but for the first one in its way, which
    is gathered ahead. Norms and clipping see trained parameters only. Buffers are no parameters: a frozen batch normalisation
    goes on with its running statistics.

    Args:
        where: a pattern of names, several, or a predicate ``(name, param) -> bool``; see ``masked``.
        start: a number of steps, or a duration in any unit (``"1ep"``, ``"0.5dur"``).

    Mutates: ``requires_grad`` of the parameters, while a gradient is computed. Collective: fewer. Host sync: none.

    Raises:
        ConfigError: no duration, or what ``masked`` refuses; from ``Step.init`` on, a share of a run of unknown length.
        StepError: in a step, there is nothing left to train.

    Source: Brock et al. 2017, arXiv:1706.04983, section 2: a frozen layer is left out of backward.

    Example:
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> step = compose_step(mean_loss(lambda model, x: model(x).sum() / len(x), weight=len), [freeze("weight", start=1)])
        >>> model = torch.nn.Linear(1, 1)
        >>> _ = [torch.nn.init.constant_(param, 4.0) for param in model.parameters()]
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> for _ in range(3):  # both gradients are 1
        ...     state, _ = step(state, torch.ones(2, 1))
        >>> model.weight.item(), model.bias.item()  # one step of 0.5, and three
        (3.5, 2.5)
    """
    begins = Duration.parse(start, allow_zero=True)
    return masked(_freeze_transform("freeze", lambda state: list(state.params) if state.clock.reached(begins) else []), where)


def freeze_layers(
    *, start: Duration | int | str = "0.5dur", end: Duration | int | str = "1dur", level: float = 1.0
) -> Transform:
    """Freeze layer after layer between ``start`` and ``end``, the first ones of the model first.

    Formula: ``frozen layers = floor(level * (t - start) / (end - start) * (layers - 1))``, between 0 and ``layers - 1``

    A layer is a module that has parameters of its own, in the order in which the model registers them, which should be that of
    the forward. The last one is never frozen, nor is a tied parameter, which is in several. See ``freeze`` for what that means
    for a parameter, and what it saves: all of a frozen layer's backward, since no trained layer is before it.

    Args:
        start: a number of steps, or a duration in any unit.
        end: when all of ``level`` is frozen. In the unit of ``start``, or both are converted into steps, for which
            ``step.init(..., run=...)`` must say enough.
        level: the share of the layers that is frozen at ``end``, from 0 to 1.

    Mutates: ``requires_grad`` of the parameters, while a gradient is computed. Collective: fewer. Host sync: none.

    Raises:
        ConfigError: no durations, an ``end`` that is not after ``start``, ``level`` outside of ``[0, 1]``; from ``Step.init``
            on, a run that is not known well enough.

    Source: Brock et al. 2017, arXiv:1706.04983 (FreezeOut), whose layers are annealed to rate 0 before; here, as in MosaicML
    Composer's layer freezing, they are trained at the full rate until they are frozen, at times that are evenly spaced.

    Example:
        >>> from dtrain.losses import mean_loss
        >>> from dtrain.step.compose import compose_step
        >>> loss = mean_loss(lambda model, x: model(x).sum() / len(x), weight=len)
        >>> step = compose_step(loss, [freeze_layers(start=0, end=4)])
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(3)))
        >>> _ = [torch.nn.init.constant_(param, 1.0) for param in model.parameters()]
        >>> state, frozen = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), []
        >>> for _ in range(5):
        ...     before = [layer.weight.item() for layer in model]
        ...     state, _ = step(state, torch.ones(2, 1))
        ...     frozen.append(sum(layer.weight.item() == was for layer, was in zip(model, before)))
        >>> frozen  # floor(t / 4 * 2)
        [0, 0, 1, 1, 2]
    """
    first, last = Duration.parse(start, allow_zero=True), Duration.parse(end)
    if first.unit == last.unit and first.value >= last.value:
        raise ConfigError(f"freeze_layers: needs start < end, got start={str(first)!r}, end={str(last)!r}")
    if not is_number(level) or not 0.0 <= level <= 1.0:
        raise ConfigError(f"freeze_layers: needs 0 <= level <= 1, got {level=}")
    return _freeze_transform(
        "freeze_layers", lambda state: _first_layers(state, Fraction(str(level)) * _elapsed_between(state, first, last))
    )


def _elapsed_between(state: TrainState, start: Duration, end: Duration) -> Fraction:
    clock = state.clock
    if start.unit != end.unit:
        start, end = (Duration(point.steps(clock.run), "ba") for point in (start, end))
        if start.value >= end.value:
            raise ConfigError(f"freeze_layers: needs start < end, which are steps {start.value} and {end.value} of this run")
    value = end.fraction - start.fraction
    return elapsed_fraction(clock, start, Duration(float(value) if start.unit == "dur" else int(value), start.unit))


def _first_layers(state: TrainState, part: Fraction) -> list[str]:
    """Names of the parameters of the first ``part`` of the layers, of all but the last."""
    layers: dict[str, list[str]] = {}
    for name in state.params:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    tied = set(state.aliases.values())
    chosen = list(layers.values())[: math.floor(part * (len(layers) - 1))]
    return [name for layer in chosen for name in layer if name not in tied]


def _freeze_transform(name: str, frozen: Callable[[TrainState], Sequence[str]]) -> Transform:
    """A transform that computes no gradient of the parameters that ``frozen`` names: without one, no optimizer touches them."""

    def init(state: TrainState) -> dict[str, object]:
        frozen(state)  # refuses what cannot be told of this run
        return {}

    def grad(inner: GradFn) -> GradFn:
        def partly(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            with _disable_grad([state.params[key] for key in frozen(state)]):
                return inner(state, batch, microbatch_size=microbatch_size)

        return partly

    return Transform(name=name, init=init, grad=grad, uses_grad=False)


@contextmanager
def _disable_grad(params: Sequence[Tensor]) -> Iterator[None]:
    """A context in which ``params`` require no gradient. Mutates: their ``requires_grad``, while it lasts."""
    trained = [param for param in params if param.requires_grad]
    try:
        for param in trained:
            param.requires_grad_(False)
        yield
    finally:
        for param in trained:
            param.requires_grad_(True)
