"""Freeze parameters: named parameters from a point in time on, or layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

from torch import Tensor

from dtrain.arguments import check_number
from dtrain.errors import ConfigError
from dtrain.schedules.clock import elapsed_fraction
from dtrain.schedules.durations import Duration, parse_window
from dtrain.state import TrainState
from dtrain.step.transform import GradFn, Transform
from dtrain.transforms.combinators import ParamFilter, masked
from dtrain.typing import Batch, Metrics


def freeze(select: ParamFilter, *, start: Duration | int | str = 0) -> Transform:
    """Freeze the parameters selected by ``select`` from ``start`` on.

    Formula: ``param[t + 1] = param[t]`` for every step ``t`` that begins at or after ``start``

    A frozen parameter gets no gradient, no weight decay and no momentum. Its optimizer state (moments, steps) is kept
    unchanged. The backward stops at the first trained parameter of the forward. After that parameter, a frozen weight saves the
    computation of its own gradient, but not of its input's gradient. In a sharded model, units that are frozen as a whole are
    not reduced. Units that the backward never reaches are not gathered again, except the next unit, which is prefetched. Norms
    and clipping see trained parameters only. Buffers are not frozen: a frozen batch normalization still updates its running
    statistics.

    Args:
        select: pattern of names, several patterns, or a predicate ``(name, param) -> bool``; see ``masked``.
        start: number of steps, or a duration in any unit (``"1ep"``, ``"0.5dur"``).

    Mutates: ``requires_grad`` of the parameters, during the gradient computation. Collective: fewer. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.freeze("weight", start=1)])
        >>> model = torch.nn.Linear(1, 1)
        >>> _ = [torch.nn.init.constant_(param, 4.0) for param in model.parameters()]
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.5))
        >>> for _ in range(3):  # both gradients are 1
        ...     state, _ = step(state, torch.ones(2, 1))
        >>> model.weight.item(), model.bias.item()  # one step of 0.5, and three
        (3.5, 2.5)

    Raises:
        ConfigError: ``start`` is not a duration, or ``masked`` refuses ``select``. From ``Step.init`` on: ``start`` is a
            fraction of a run of unknown length.
        StepError: in a step, all parameters are frozen.

    Source: Brock et al. 2017, arXiv:1706.04983, section 2: a frozen layer is excluded from the backward.

    Suggested values:
        image and text towers, contrastive tuning: freeze the pretrained image tower from step 0 (Zhai et al. 2022,
            arXiv:2111.07991)
        BERT and RoBERTa fine-tuning: freeze all but the last fourth of the layers (Lee et al. 2019, arXiv:1911.03090)
    When not to use: the data differ much from the data of pre-training. Frozen batch norms also still update their running
        statistics in train mode.
    """
    begins = Duration.parse(start, allow_zero=True)
    return masked(_freeze_transform("freeze", lambda state: list(state.params) if state.clock.reached(begins) else []), select)


def freeze_layers(
    *, start: Duration | int | str = "0.5dur", end: Duration | int | str = "1dur", level: float = 1.0
) -> Transform:
    """Freeze the model's layers one after another between ``start`` and ``end``, beginning with the first layer.

    Formula: ``frozen layers = floor(level * (t - start) / (end - start) * (layers - 1))``, between 0 and ``layers - 1``

    A layer is a module with parameters of its own, in the order of registration, which should be the order of the forward. The
    last layer is never frozen. A tied parameter, which belongs to several layers, is never frozen. ``freeze`` describes the
    effect on a parameter. A frozen layer needs no backward at all, because no trained layer precedes it.

    Args:
        start: number of steps, or a duration in any unit.
        end: time at which ``level`` is reached. If its unit differs from that of ``start``, both are converted to steps, which
            may need ``step.init(..., run_length=...)``.
        level: fraction of the layers that is frozen at ``end``, from 0 to 1.

    Mutates: ``requires_grad`` of the parameters, during the gradient computation. Collective: fewer. Host sync: none.

    Example:
        >>> import dtrain as dt
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.freeze_layers(start=0, end=4)])
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(3)))
        >>> _ = [torch.nn.init.constant_(param, 1.0) for param in model.parameters()]
        >>> state, frozen = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), []
        >>> for _ in range(5):
        ...     before = [layer.weight.item() for layer in model]
        ...     state, _ = step(state, torch.ones(2, 1))
        ...     frozen.append(
        ...         sum(layer.weight.item() == weight for layer, weight in zip(model, before))
        ...     )
        >>> frozen  # floor(t / 4 * 2)
        [0, 0, 1, 1, 2]

    Raises:
        ConfigError: ``start`` or ``end`` is not a duration, ``end`` is not after ``start``, or ``level`` is outside of
            ``[0, 1]``. From ``Step.init`` on: the run cannot convert a duration.

    Source: Brock et al. 2017, arXiv:1706.04983 (FreezeOut), which anneals a layer's rate to 0 before the layer is frozen. Here,
    as in MosaicML Composer's layer freezing, layers train at the full rate until they are frozen, at evenly spaced times.

    Suggested values:
        CIFAR-100, ResNet-56; ImageNet, ResNet-50: ``start`` of at least ``"0.1dur"``, for example ``"0.5dur"`` (MosaicML
            Composer, method card of layer freezing)
        all layers but the last, evenly: ``start="0.5dur"``, ``level=1.0`` (MosaicML Composer's defaults)
    When not to use: accuracy counts more than time: Composer's card reports 0.5 to 1 % less accuracy for 5 % more throughput
        with ResNet-50 on ImageNet.
    """
    first, last = parse_window("freeze_layers", start, end)
    check_number("freeze_layers", "level", level, minimum=0, maximum=1)
    return _freeze_transform(
        "freeze_layers", lambda state: _first_layers(state, Fraction(str(level)) * _elapsed_between(state, first, last))
    )


def _elapsed_between(state: TrainState, start: Duration, end: Duration) -> Fraction:
    clock = state.clock
    if start.unit != end.unit:
        start, end = (Duration(point.steps(clock.run_length), "ba") for point in (start, end))
        if start.value >= end.value:
            raise ConfigError(
                f"freeze_layers: start must be before end, got steps {start.value} and {end.value} of this run. "
                "Raise end, or lower start."
            )
    value = end.fraction - start.fraction
    return elapsed_fraction(clock, start, Duration(float(value) if start.unit == "dur" else int(value), start.unit))


def _first_layers(state: TrainState, share: Fraction) -> list[str]:
    """Return the names of the parameters in the first ``part`` (a fraction) of all layers but the last."""
    layers: dict[str, list[str]] = {}
    for name in state.params:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    tied = set(state.aliases.values())
    first_layers = list(layers.values())[: math.floor(share * (len(layers) - 1))]
    return [name for layer in first_layers for name in layer if name not in tied]


def _freeze_transform(name: str, frozen: Callable[[TrainState], Sequence[str]]) -> Transform:
    """Return a transform that disables the gradient of the parameters named by ``frozen``. Optimizers skip these parameters."""

    def init(state: TrainState) -> dict[str, object]:
        # Raise if this run cannot convert a duration.
        frozen(state)
        return {}

    def grad(inner: GradFn) -> GradFn:
        def grad_fn(state: TrainState, batch: Batch, *, microbatch_size: int | None = None) -> tuple[TrainState, Metrics]:
            with _disable_grad([state.params[key] for key in frozen(state)]):
                return inner(state, batch, microbatch_size=microbatch_size)

        return grad_fn

    return Transform(name=name, init=init, grad=grad, uses_grad=False)


@contextmanager
def _disable_grad(params: Sequence[Tensor]) -> Iterator[None]:
    """Disable the gradient of ``params`` inside the context. Mutates: their ``requires_grad``, inside the context."""
    trained = [param for param in params if param.requires_grad]
    try:
        for param in trained:
            param.requires_grad_(False)
        yield
    finally:
        for param in trained:
            param.requires_grad_(True)
