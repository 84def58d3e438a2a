"""Run norms in the dtype of autocast instead of float32: ``low_precision_layer_norm``, ``low_precision_group_norm``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from dtrain.surgery.replace import ModuleSelector, ReplacementPolicy, apply_policies, swap_class


def cast_to_autocast_dtype(*tensors: Tensor | None) -> list[Tensor | None]:
    """Cast tensors to the autocast dtype of their device. Outside of autocast tensors do not change. None stays None.

    Formula: ``tensor.to(torch.get_autocast_dtype(device))``

    Source: torch's rules of autocast, which run layer norm in float32 on a GPU.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     cast_to_autocast_dtype(torch.tensor([1.0, 1.001]))[0].tolist()
        [1.0, 1.0]
    """
    first = next(tensor for tensor in tensors if tensor is not None)
    kind = first.device.type
    if not _is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


def _is_autocast_enabled(kind: str) -> bool:
    # The meta device has no autocast.
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _without_autocast(kind: str) -> AbstractContextManager[None]:
    return torch.autocast(kind, enabled=False) if _is_autocast_enabled(kind) else nullcontext()


class LowPrecisionLayerNorm(nn.LayerNorm):
    """Layer norm with inputs and outputs in the autocast dtype; outside of autocast equal to ``nn.LayerNorm``.

    Formula: ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, with ``x``, ``weight`` and ``bias`` rounded before

    Source: Ba et al. 2016, arXiv:1607.06450; low precision as in MosaicML Composer.

    Example:
        >>> import dtrain as dt
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     dt.surgery.LowPrecisionLayerNorm(2)(torch.tensor([1.0, 3.0]))
        tensor([-1.,  1.], dtype=torch.bfloat16, grad_fn=<NativeLayerNormBackward0>)
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``[*, normalized_shape]``; the shape does not change."""
        x, weight, bias = cast_to_autocast_dtype(input, self.weight, self.bias)
        assert x is not None
        # Autocast would run the norm in float32.
        with _without_autocast(input.device.type):
            return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class LowPrecisionRMSNorm(nn.RMSNorm):
    """RMS norm with inputs and outputs in the autocast dtype; outside of autocast equal to ``nn.RMSNorm``.

    Formula: ``y = x / sqrt(mean(x ** 2) + eps) * weight``, with ``x`` and ``weight`` rounded before

    Source: Zhang and Sennrich 2019, arXiv:1910.07467; low precision as in ``LowPrecisionLayerNorm``.

    Example:
        >>> import dtrain as dt
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     dt.surgery.LowPrecisionRMSNorm(2)(torch.tensor([3.0, 3.0])).tolist()
        [1.0, 1.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[*, normalized_shape]``; the shape does not change."""
        low, weight = cast_to_autocast_dtype(x, self.weight)
        assert low is not None
        with _without_autocast(x.device.type):
            return functional.rms_norm(low, list(self.normalized_shape), weight, self.eps)


class LowPrecisionGroupNorm(nn.GroupNorm):
    """Group norm with inputs and outputs in the autocast dtype; outside of autocast equal to ``nn.GroupNorm``.

    Formula: ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over each group of channels of a sample, with ``x``,
    ``weight`` and ``bias`` rounded before

    Source: Wu and He 2018, arXiv:1803.08494; low precision as in MosaicML Composer.

    Example:
        >>> import dtrain as dt
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     dt.surgery.LowPrecisionGroupNorm(1, 2)(
        ...         torch.tensor([[[1.0], [3.0]]])
        ...     ).flatten().tolist()
        [-1.0, 1.0]
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize ``[batch, channels, ...]``; the shape does not change."""
        x, weight, bias = cast_to_autocast_dtype(input, self.weight, self.bias)
        assert x is not None
        with _without_autocast(input.device.type):
            return functional.group_norm(x, self.num_groups, weight, bias, self.eps)


def low_precision_layer_norm(model: nn.Module) -> nn.Module:
    """Run layer norms and RMS norms in the autocast dtype instead of float32; return the model.

    The norms read and write half of the bytes. torch's kernels still accumulate in float32. The edit acts under
    ``torch.autocast`` (``autocast("bf16")``) only; with ``Precision(param="bf16")`` norms already run in low precision. Names
    in checkpoints do not change.

    Formula: ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, with ``x``, ``weight`` and ``bias`` rounded before

    Args:
        model: model with ``nn.LayerNorm`` or ``nn.RMSNorm``, before ``shard_model``; subclasses do not change.

    Mutates: ``model``. Parameter objects do not change.

    Example:
        >>> import dtrain as dt
        >>> model = dt.surgery.low_precision_layer_norm(nn.Sequential(nn.LayerNorm(2)))
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     model(torch.tensor([1.0, 3.0])).dtype
        torch.bfloat16

    Raises:
        ConfigError: the model has no such norm, or is sharded.

    Source: Ba et al. 2016, arXiv:1607.06450; low precision as in MosaicML Composer.

    Suggested values:
        MosaicBERT, bf16: no values to choose (Portes et al. 2023, arXiv:2312.17482)
        BERT on the CPU, bf16: no values to choose (dtrain, ``examples/pretrain_bert.py``)
    When not to use: the run does not use autocast: nothing changes. Keep float32 norms if a residual stream of fp16 grows
        large.
    """
    policies: dict[ModuleSelector, ReplacementPolicy] = {
        nn.LayerNorm: lambda norm, name: swap_class(norm, LowPrecisionLayerNorm),
        nn.RMSNorm: lambda norm, name: swap_class(norm, LowPrecisionRMSNorm),
    }
    return apply_policies(model, policies, caller="low_precision_layer_norm").model


def low_precision_group_norm(model: nn.Module) -> nn.Module:
    """Run group norms in the autocast dtype instead of float32; return the model. See ``low_precision_layer_norm``.

    Formula: ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over each group of channels of a sample

    Args:
        model: model with ``nn.GroupNorm``, before ``shard_model``; subclasses do not change.

    Mutates: ``model``. Parameter objects do not change.

    Example:
        >>> import dtrain as dt
        >>> model = dt.surgery.low_precision_group_norm(nn.Sequential(nn.GroupNorm(1, 2)))
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     model(torch.tensor([[[1.0], [3.0]]])).flatten().tolist()
        [-1.0, 1.0]

    Raises:
        ConfigError: the model has no group norm, or is sharded.

    Source: Wu and He 2018, arXiv:1803.08494; low precision as in MosaicML Composer.

    Suggested values:
        diffusion U-Net with autocast: bf16 or fp16, no values to choose (dtrain, ``examples/train_diffusion.py``)
    When not to use: the run does not use autocast: nothing changes. Large activations of fp16 may overflow in the norm; bf16
        does not.
    """
    policies: dict[ModuleSelector, ReplacementPolicy] = {
        nn.GroupNorm: lambda norm, name: swap_class(norm, LowPrecisionGroupNorm)
    }
    return apply_policies(model, policies, caller="low_precision_group_norm").model
