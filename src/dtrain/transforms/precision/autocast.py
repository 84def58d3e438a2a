"""Run the forward of every microbatch under ``torch.autocast``."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from dtrain.arguments import check_choice
from dtrain.device import backend_function
from dtrain.errors import ConfigError
from dtrain.state import TrainState
from dtrain.step.transform import StepContext, Transform
from dtrain.typing import Batch, LossFn, LossSum, TransformState

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
    known = torch.amp.is_autocast_available(device.type)
    supports_bf16 = backend_function(device, "is_bf16_supported") if known and dtype == "bf16" else None
    if not known or (supports_bf16 is not None and not supports_bf16()):
        raise ConfigError(
            f"autocast: dtype must be supported on the device, got {dtype} on {device.type}. Omit autocast on this device."
        )
