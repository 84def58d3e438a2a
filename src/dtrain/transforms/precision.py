"""Compute in low precision: ``autocast`` of the forward, ``loss_scale`` so that small gradients do not underflow in float16."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dtrain.arguments import check_choice, check_int, check_number
from dtrain.device import backend_function
from dtrain.dist.dtensor import scale_
from dtrain.errors import ConfigError, NonFiniteError
from dtrain.schedules.hyperparameters import is_number
from dtrain.state import TrainState
from dtrain.step.normalization import make_metric
from dtrain.step.optimizer import update_if_finite
from dtrain.step.transform import GradStep, StepContext, Transform, UpdateFn
from dtrain.typing import Batch, LossFn, LossSum, Metrics, TransformState

_NAME = "loss_scale"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(dtype: Literal["bf16", "fp16"] = "bf16", *, cache: bool = True) -> Transform:
    """Run the forward of every microbatch under ``torch.autocast``: matmuls in ``dtype``, sensitive operations in float32.

    Formula: ``loss = loss_fn(model, batch)`` with every matmul as ``(a.to(dtype) @ b.to(dtype))``

    At any position in the list, the loss function and the wrappers listed after ``autocast`` run under autocast. The backward
    runs in the dtypes of the forward. Parameters, gradients and gradient sums over ranks keep their dtypes. With float16, also
    list ``loss_scale``.

    Autocast casts per operation, so dtypes never mismatch. But the low-precision copies of the weights are kept for the
    backward. With ``full_shard`` they take as many bytes as ``Precision(param=...)`` gathers, for the whole model at once. In
    that case prefer ``Precision``.

    Args:
        dtype: ``"bf16"`` or ``"fp16"``.
        cache: if True, cast a weight once per microbatch even if the forward uses the weight several times.

    Example:
        >>> import dtrain as dt
        >>> dtypes = []
        >>> def loss_fn(model, x):
        ...     dtypes.append(model(x).dtype)
        ...     return dt.LossSum(total=model(x).float().sum(), weight=len(x))
        >>> model = torch.nn.Linear(2, 1)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.autocast("bf16")])
        >>> _ = step(
        ...     step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), torch.ones(1, 2)
        ... )
        >>> dtypes
        [torch.bfloat16]

    Raises:
        ConfigError: ``dtype`` is unknown, or, from ``Step.init`` on, not supported by autocast on the model's device.

    Source: Micikevicius et al. 2018, arXiv:1710.03740.

    Suggested values:
        GPUs with bf16 (Ampere and newer), CPUs: ``dtype="bf16"``, no loss scale (Kalamkar et al. 2019, arXiv:1905.12322)
        older GPUs: ``dtype="fp16"`` with ``loss_scale`` (Micikevicius et al. 2018, section 3)
    When not to use: ``shard_model`` already casts parameters by ``Precision``: then a module computes in that dtype without
        autocast. See docs/precision.md.
    """
    check_choice("autocast", "dtype", dtype, _DTYPES)
    check_choice("autocast", "cache", cache, (True, False))

    def init(state: TrainState) -> TransformState:
        _check_device(state.device, dtype)
        return {}

    def loss(inner: LossFn, context: StepContext) -> LossFn:
        device = context.state.device.type

        def loss_fn(model: nn.Module, batch: Batch) -> LossSum:
            with torch.autocast(device, dtype=_DTYPES[dtype], cache_enabled=cache):
                return inner(model, batch)

        return loss_fn

    return Transform(name="autocast", init=init, loss=loss)


def _check_device(device: torch.device, dtype: str) -> None:
    """Raise if torch does not support autocast on ``device``. Torch itself only warns and computes in float32."""
    is_available = torch.amp.is_autocast_available(device.type)
    supports_bf16 = backend_function(device, "is_bf16_supported") if is_available and dtype == "bf16" else None
    if not is_available or (supports_bf16 is not None and not supports_bf16()):
        raise ConfigError(
            f"autocast: dtype must be supported on the device, got {dtype} on {device.type}. Omit autocast on this device."
        )


def loss_scale(
    initial_scale: float = 2.0**16,
    *,
    growth: float = 2.0,
    backoff: float = 0.5,
    grow_every: int = 2000,
    min_scale: float = 2.0**-40,
) -> Transform:
    """Scale the loss before the backward, unscale the gradient after it, and skip updates with a non-finite gradient.

    Formula: ``gradient = d(scale * loss) / scale``; ``scale *= backoff`` after an update that is not finite,
    ``scale *= growth`` after ``grow_every`` finite updates in a row

    At any position in the list, all other transforms see the unscaled loss and the unscaled gradient. The loss is scaled after
    every loss wrapper, and the gradient is unscaled before any gradient wrapper returns. If the gradient of any rank is
    infinite or NaN, all ranks skip the update and multiply the scale by ``backoff``. After ``grow_every`` updates in a row the
    scale is multiplied by ``growth``. The defaults are those of ``torch.amp.GradScaler``. List ``loss_scale`` first: transforms
    listed after ``loss_scale`` are skipped together with the update. A parameter average listed before ``loss_scale`` would
    still change.

    The loss is a sum over samples or tokens until the step divides it. So scales settle lower than with a mean loss, by the
    number of samples on a rank.

    The transform state is ``{"scale": float, "streak": int}``: the scale of the next step, and the updates since its last
    change. Adds the metrics ``loss_scale``, the scale of the step, and ``skipped``, 1 for a skipped update.

    Args:
        initial_scale: scale of the first step, > 0; rounded to float32.
        growth: factor, > 1.
        backoff: factor, between 0 and 1.
        grow_every: finite updates before a growth, >= 1.
        min_scale: smallest scale; a step that needs a smaller scale raises.

    Example:
        >>> import dtrain as dt
        >>> model = torch.nn.Linear(2, 1)
        >>> loss_fn = dt.mean_loss(lambda model, x: model(x).mean(), weight=len)
        >>> step = dt.compose_step(loss_fn, [dt.transforms.loss_scale(1024.0)])
        >>> state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> state, metrics = step(state, torch.ones(1, 2))
        >>> metrics["loss_scale"].total.item(), metrics["skipped"].total.item()
        (1024.0, 0.0)

    Collective: one all-reduce of float32 ``[]`` per step, on several ranks.
    Host sync: one per step: the host reads if the gradient is finite.

    Raises:
        ConfigError: an argument is out of its range. From ``Step.init`` on: parameters are stored in float16, whose gradients
            would underflow.
        NonFiniteError: on all ranks, if a step's gradients are not finite at the smallest scale.

    Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2.

    Suggested values:
        fp16, any model: ``initial_scale=2**16``, ``growth=2``, ``backoff=0.5``, ``grow_every=2000`` (``torch.amp.GradScaler``'s
            defaults)
        fp16, Megatron-LM: ``initial_scale=2**32``, ``grow_every=1000``, ``min_scale=1`` (Megatron-LM's ``arguments.py``)
    When not to use: gradients are bf16 or float32: their exponents have the range of float32, and ``nonfinite`` skips bad
        updates without a scale.
    """
    rule = LossScaleRule(growth=growth, backoff=backoff, grow_every=grow_every, min_scale=min_scale)
    if not is_number(initial_scale) or not min_scale <= _round_to_float32(initial_scale) < math.inf:
        raise ConfigError(
            f"loss_scale: initial_scale must be finite and at least min_scale, got {initial_scale=}, {min_scale=}. "
            "Raise initial_scale, or lower min_scale."
        )
    return Transform(
        name=_NAME,
        init=lambda state: _init_scale(state, initial_scale),
        grad_step=_unscale_grads,
        update=_skip_nonfinite_update(rule),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleRule:
    """The rule that updates the scale. The arguments are those of ``loss_scale``."""

    growth: float
    backoff: float
    grow_every: int
    min_scale: float

    def __post_init__(self) -> None:
        check_number(_NAME, "growth", self.growth, above=1)
        check_number(_NAME, "backoff", self.backoff, above=0, below=1)
        check_int(_NAME, "grow_every", self.grow_every)
        check_number(_NAME, "min_scale", self.min_scale, above=0)

    def next(self, scale: float, streak: int, *, broken: bool) -> tuple[float, int]:
        """Return the scale and the streak after a step, in float32 as in ``torch.amp.GradScaler``.

        Example:
            >>> rule = LossScaleRule(growth=2.0, backoff=0.5, grow_every=2, min_scale=1e-6)
            >>> rule.next(1024.0, 1, broken=False), rule.next(1024.0, 1, broken=True)
            ((2048.0, 0), (512.0, 0))
        """
        if broken:
            return _round_to_float32(scale * self.backoff), 0
        if streak + 1 < self.grow_every:
            return scale, streak + 1
        grown = _round_to_float32(scale * self.growth)
        return (grown if math.isfinite(grown) else scale), 0


class _ScaleGrad(torch.autograd.Function):
    """The identity in the forward, with the gradient multiplied by ``scale``. So metrics see the unscaled loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.scale, None


def _init_scale(state: TrainState, initial_scale: float) -> TransformState:
    half = [name for name, param in state.params.items() if param.dtype == torch.float16 and param.requires_grad]
    if half:
        raise ConfigError(
            f"loss_scale: parameters must not be stored in float16, got {len(half)} (first: {half[0]}). Store parameters in "
            "float32 and compute in float16 with dt.shard_model(precision=...) or dt.transforms.autocast."
        )
    return {"scale": _round_to_float32(initial_scale), "streak": 0}


def _unscale_grads(inner: GradStep) -> GradStep:
    def grad_step(
        state: TrainState, batch: Batch, *, loss_fn: LossFn, microbatch_size: int | None = None
    ) -> tuple[TrainState, Metrics]:
        scale = state.transform_states[_NAME]["scale"]
        size = {} if microbatch_size is None else {"microbatch_size": microbatch_size}
        state, metrics = inner(state, batch, loss_fn=_scale_loss(loss_fn, scale), **size)
        grads = [param.grad for param in state._trainable.values() if param.grad is not None]
        # torch.full fills on the device, so the host copies no number to the device.
        scale_(grads, torch.full((), 1.0 / scale, dtype=torch.float64, device=state.device))
        return state, {**metrics, _NAME: make_metric(scale, 1.0, state.device)}

    return grad_step


def _scale_loss(loss_fn: LossFn, scale: float) -> LossFn:
    def scaled_loss_fn(model: nn.Module, batch: Batch) -> LossSum:
        loss = loss_fn(model, batch)
        if not isinstance(loss, LossSum) or not isinstance(loss.total, Tensor):
            # The step raises an error for this value.
            return loss
        terms = {name: (_scale_grad(total, scale), weight) for name, (total, weight) in loss.terms.items()}
        return replace(loss, total=_scale_grad(loss.total, scale), terms=terms)

    return scaled_loss_fn


def _scale_grad(total: Tensor, scale: float) -> Tensor:
    scaled: Tensor = _ScaleGrad.apply(total, scale)  # type: ignore[no-untyped-call]
    return scaled


def _skip_nonfinite_update(rule: LossScaleRule) -> Callable[[UpdateFn], UpdateFn]:
    def update(inner: UpdateFn) -> UpdateFn:
        def update_fn(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            def next_state(broken: bool) -> TransformState:
                now = state.transform_states[_NAME]
                scale, streak = rule.next(now["scale"], now["streak"], broken=broken)
                if broken and scale < rule.min_scale:
                    raise NonFiniteError(
                        f"loss_scale: step {state.step}: the gradient must be finite at scale {now['scale']:g}, got a "
                        f"non-finite gradient at the smallest scale, min_scale={rule.min_scale:g}. Look for an infinite or NaN "
                        "loss."
                    )
                return {"scale": scale, "streak": streak}

            return update_if_finite(inner, state, metrics, name=_NAME, next_state=next_state)

        return update_fn

    return update


def _round_to_float32(value: float) -> float:
    # An overflow gives infinity, which the callers handle.
    with np.errstate(over="ignore"):
        return float(np.float32(value))
