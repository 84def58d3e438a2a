"""A loss that is scaled before backward, so that small gradients survive in float16."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dtrain.dtensor import scale_
from dtrain.errors import ConfigError, NonFiniteError
from dtrain.state import TrainState
from dtrain.step.finite import all_finite
from dtrain.transform import GradStep, Transform, UpdateFn
from dtrain.typing import Batch, LossFn, LossSum, Metrics, TransformState, make_metric

_NAME = "loss_scale"


def loss_scale(
    initial: float = 2.0**16,
    *,
    growth: float = 2.0,
    backoff: float = 0.5,
    interval: int = 2000,
    minimum: float = 2.0**-40,
) -> Transform:
    """Scale the loss before backward and the gradient back after it; leave a step out whose gradient is not finite.

    Formula: ``gradient = d(scale * loss) / scale``; ``scale *= backoff`` after an update that is not finite,
    ``scale *= growth`` after ``interval`` in a row that are

    What all other transforms see, wherever this one is listed, is the loss and the gradient as they are: the scale is put on
    after every loss wrapper, and taken off before any gradient wrapper returns. An update for which any rank's gradient is
    infinite or NaN is left out on all ranks alike, and the scale is multiplied by ``backoff``; after ``interval`` updates in a
    row it is multiplied by ``growth``. These are the numbers of ``torch.amp.GradScaler``. List it first: those listed after it
    are left out together with the update, those before it are not (an average of the parameters would move on).

    The loss is a sum over samples or tokens until the step has divided it, so scales settle lower than those of a mean, by the
    number of samples on a rank.

    The slice is ``{"scale": float, "streak": int}``: the scale of the next step, and the updates since it last changed. Adds
    the metrics ``loss_scale``, the scale that the step ran with, and ``skipped``, 1 for a step that was left out.

    Args:
        initial: scale of the first step, > 0; rounded to float32.
        growth: factor, > 1.
        backoff: factor, between 0 and 1.
        interval: updates without an infinity from one growth to the next, >= 1.
        minimum: the step that would need a smaller scale raises: a gradient that is infinite at any scale never ends.

    Collective: one all-reduce of float32 ``[]`` a step, on several ranks.
    Host sync: one a step: whether the gradient is finite decides what the host does next.

    Raises:
        ConfigError: an argument out of its range; from ``Step.init`` on, parameters that are stored in float16, whose gradients
            would lose again what the scale has saved.
        NonFiniteError: in a step, gradients are not finite at the smallest scale; on all ranks.

    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.

    Example:
        >>> rule = Rule(growth=2.0, backoff=0.5, interval=2, minimum=1e-6)
        >>> rule.next(1024.0, 1, broken=False), rule.next(1024.0, 1, broken=True)  # (scale, updates since it changed)
        ((2048.0, 0), (512.0, 0))
        >>> loss_scale(1024.0, interval=2).name
        'loss_scale'
    """
    rule = LossScaleRule(growth=growth, backoff=backoff, interval=interval, minimum=minimum)
    if not _is_number(initial) or not minimum <= _round_to_float32(initial) < math.inf:
        raise ConfigError(f"loss_scale: needs a finite initial >= minimum, got {initial=}, {minimum=}")
    return Transform(
        name=_NAME,
        init=lambda state: _init_scale(state, initial),
        grad_step=_unscale_grads,
        update=_skip_nonfinite_update(rule),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleRule:
    """How the scale moves: the arguments of ``loss_scale``."""

    growth: float
    backoff: float
    interval: int
    minimum: float

    def __post_init__(self) -> None:
        if not _is_number(self.growth) or not 1.0 < self.growth < math.inf:
            raise ConfigError(f"loss_scale: needs a finite growth > 1, got growth={self.growth!r}")
        if not _is_number(self.backoff) or not 0.0 < self.backoff < 1.0:
            raise ConfigError(f"loss_scale: needs 0 < backoff < 1, got backoff={self.backoff!r}")
        if type(self.interval) is not int or self.interval < 1:
            raise ConfigError(f"loss_scale: needs a whole interval >= 1, got interval={self.interval!r}")
        if not _is_number(self.minimum) or not 0.0 < self.minimum < math.inf:
            raise ConfigError(f"loss_scale: needs a finite minimum > 0, got minimum={self.minimum!r}")

    def next(self, scale: float, streak: int, *, broken: bool) -> tuple[float, int]:
        """The scale and the streak after a step. Pure; in float32, as ``torch.amp.GradScaler`` computes."""
        if broken:
            return _round_to_float32(scale * self.backoff), 0
        if streak + 1 < self.interval:
            return scale, streak + 1
        grown = _round_to_float32(scale * self.growth)
        return (grown if math.isfinite(grown) else scale), 0


class _ScaleGrad(torch.autograd.Function):
    """The identity, whose gradient is ``multiply`` times as large: so metrics are of the loss as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


def _init_scale(state: TrainState, initial: float) -> TransformState:
    half = [name for name, param in state.params.items() if param.dtype == torch.float16 and param.requires_grad]
    if half:
        raise ConfigError(
            f"loss_scale: {len(half)} parameters are stored in float16 (first: {half[0]}), and so would be their gradients; "
            "store them in float32 and compute in float16 by shard_model(precision=...) or dt.transforms.autocast"
        )
    return {"scale": _round_to_float32(initial), "streak": 0}


def _unscale_grads(inner: GradStep) -> GradStep:
    def scaled(
        state: TrainState, batch: Batch, *, loss_fn: LossFn, microbatch_size: int | None = None
    ) -> tuple[TrainState, Metrics]:
        scale = state.transform_states[_NAME]["scale"]
        size = {} if microbatch_size is None else {"microbatch_size": microbatch_size}
        state, metrics = inner(state, batch, loss_fn=_scale_loss(loss_fn, scale), **size)
        grads = [param.grad for param in state.params.values() if param.grad is not None]
        # Filled on the device: a number from the host would have to be copied there.
        scale_(grads, torch.full((), 1.0 / scale, dtype=torch.float64, device=state.device))
        return state, {**metrics, _NAME: make_metric(scale, 1.0, state.device)}

    return scaled


def _scale_loss(loss_fn: LossFn, scale: float) -> LossFn:
    def loss(model: nn.Module, batch: Batch) -> LossSum:
        found = loss_fn(model, batch)
        if not isinstance(found, LossSum) or not isinstance(found.total, Tensor):
            return found  # refused by the step, which knows how to say it
        terms = {name: (_scale_grad(total, scale), weight) for name, (total, weight) in found.terms.items()}
        return replace(found, total=_scale_grad(found.total, scale), terms=terms)

    return loss


def _scale_grad(total: Tensor, scale: float) -> Tensor:
    amplified: Tensor = _ScaleGrad.apply(total, scale)  # type: ignore[no-untyped-call]
    return amplified


def _skip_nonfinite_update(rule: LossScaleRule) -> Callable[[UpdateFn], UpdateFn]:
    def update(inner: UpdateFn) -> UpdateFn:
        def maybe(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            now = state.transform_states[_NAME]
            grads = [param.grad for param in state.params.values() if param.grad is not None]
            finite = all_finite(grads, state.device, caller=_NAME)
            broken = not bool(finite)  # note: the one wait for the device
            scale, streak = rule.next(now["scale"], now["streak"], broken=broken)
            if broken and scale < rule.minimum:
                raise NonFiniteError(
                    f"loss_scale: step {state.step}: a gradient is not finite even at scale {now['scale']:g}, and minimum is "
                    f"{rule.minimum:g}; look for a loss that is infinite or NaN by itself"
                )
            if not broken:
                state, metrics = inner(state, metrics)
            skipped = make_metric(float(broken), 1.0, state.device)
            state = state.with_transform_state(_NAME, {"scale": scale, "streak": streak})
            return state, {"skipped": skipped, **metrics}

        return maybe

    return update


def _round_to_float32(value: float) -> float:
    with np.errstate(over="ignore"):  # what is too large is infinite then, and refused or not taken
        return float(np.float32(value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
