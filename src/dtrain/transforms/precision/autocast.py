"""torch's autocast around the loss of every microbatch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from dtrain.errors import ConfigError
from dtrain.state import TrainState
from dtrain.transform import StepContext, Transform
from dtrain.typing import Batch, LossFn, LossSum, TransformState

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(dtype: Literal["bf16", "fp16"] = "bf16", *, cache: bool = True) -> Transform:
    """Run the forward of every microbatch under ``torch.autocast``: matmuls in ``dtype``, what needs range in float32.

    Formula: ``loss = loss_fn(model, batch)`` with every matmul as ``(a.to(dtype) @ b.to(dtype))``

    Wherever it is listed, the loss function and the wrappers listed after this one run inside; backward runs in the dtypes
    that forward has chosen. Parameters, gradients and their sums over ranks keep their dtypes. In float16, ``loss_scale`` goes
    with it.

    Each operation casts for itself, so it needs no care about what meets what; but the low-precision copies of the weights
    that matmuls make are kept for backward. With ``full_shard`` these are as many bytes as ``Precision(param=...)`` gathers,
    held for the whole model at once: there ``Precision`` is the better choice.

    Args:
        dtype: ``"bf16"`` or ``"fp16"``.
        cache: cast a weight once per microbatch, although it is used several times.

    Raises:
        ConfigError: another dtype; from ``Step.init`` on, one that autocast does not have on the model's device.

    Source: Micikevicius et al. 2018, arXiv:1710.03740.

    Example:
        >>> seen = []
        >>> def loss(model, x):
        ...     seen.append(model(x).dtype)
        ...     return LossSum(total=model(x).float().sum(), weight=len(x))
        >>> from dtrain.step.compose import compose_step
        >>> model = torch.nn.Linear(2, 1)
        >>> step = compose_step(loss, [autocast("bf16")])
        >>> _ = step(step.init(model, torch.optim.SGD(model.parameters(), lr=0.1)), torch.ones(1, 2))
        >>> seen
        [torch.bfloat16]
    """
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ConfigError(f"autocast: dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    if not isinstance(cache, bool):
        raise ConfigError(f"autocast: cache must be True or False, got {cache!r}")
    low = _DTYPES[dtype]

    def init(state: TrainState) -> TransformState:
        _check_device(state.device, dtype)
        return {}

    def loss(inner: LossFn, context: StepContext) -> LossFn:
        device = context.state.device.type

        def cast(model: nn.Module, batch: Batch) -> LossSum:
            with torch.autocast(device, dtype=low, cache_enabled=cache):
                return inner(model, batch)

        return cast

    return Transform(name="autocast", init=init, loss=loss)


def _check_device(device: torch.device, dtype: str) -> None:
    """Refuse what torch would only warn of, and then compute in float32."""
    known = torch.amp.is_autocast_available(device.type)
    if not known or (device.type == "cuda" and dtype == "bf16" and not torch.cuda.is_bf16_supported()):
        raise ConfigError(f"autocast: torch has no autocast to {dtype} on this {device.type} device; leave it out here")
