"""Norms in the dtype of autocast, which would run them in float32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from dtrain.surgery.class_swap import swap_class
from dtrain.surgery.replace import ModuleSelector, ReplacementPolicy, replace_modules


def cast_to_autocast_dtype(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in the dtype that autocast has on their device, or as they are outside of autocast. None stays None.

    Formula: ``tensor.to(torch.get_autocast_dtype(device))``

    Source: torch's own rules of autocast, of which layer norm is an exception (it runs in float32 on a GPU).

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
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # there is none on meta


def _without_autocast(kind: str) -> AbstractContextManager[None]:
    return torch.autocast(kind, enabled=False) if _is_autocast_enabled(kind) else nullcontext()


class LowPrecisionLayerNorm(nn.LayerNorm):
    """A layer norm that takes, and gives, the dtype of autocast; outside of autocast it is ``nn.LayerNorm``.

    Formula: ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, with ``x``, ``weight`` and ``bias`` rounded before

    Source: Ba et al. 2016, arXiv:1607.06450; run in low precision as by MosaicML Composer.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     LowPrecisionLayerNorm(2)(torch.tensor([1.0, 3.0]))
        tensor([-1.,  1.], dtype=torch.bfloat16, grad_fn=<NativeLayerNormBackward0>)
    """

    def forward(self, input: Tensor) -> Tensor:
        """``[*, normalized_shape]`` -> the same shape."""
        x, weight, bias = cast_to_autocast_dtype(input, self.weight, self.bias)
        assert x is not None
        with _without_autocast(input.device.type):  # which would make it float32 again
            return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class LowPrecisionRMSNorm(nn.RMSNorm):
    """An RMS norm that takes, and gives, the dtype of autocast; outside of autocast it is ``nn.RMSNorm``.

    Formula: ``y = x / sqrt(mean(x ** 2) + eps) * weight``, with ``x`` and ``weight`` rounded before

    Source: Zhang and Sennrich 2019, arXiv:1910.07467; run in low precision as ``LowPrecisionLayerNorm`` is.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     LowPrecisionRMSNorm(2)(torch.tensor([3.0, 3.0])).tolist()
        [1.0, 1.0]
    """

    def forward(self, x: Tensor) -> Tensor:
        """``[*, normalized_shape]`` -> the same shape."""
        low, weight = cast_to_autocast_dtype(x, self.weight)
        assert low is not None
        with _without_autocast(x.device.type):
            return functional.rms_norm(low, list(self.normalized_shape), weight, self.eps)


class LowPrecisionGroupNorm(nn.GroupNorm):
    """A group norm that takes, and gives, the dtype of autocast; outside of autocast it is ``nn.GroupNorm``.

    Formula: ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over each group of channels of a sample, with ``x``,
    ``weight`` and ``bias`` rounded before

    Source: Wu and He 2018, arXiv:1803.08494; run in low precision as by MosaicML Composer.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     LowPrecisionGroupNorm(1, 2)(torch.tensor([[[1.0], [3.0]]])).flatten().tolist()
        [-1.0, 1.0]
    """

    def forward(self, input: Tensor) -> Tensor:
        """``[batch, channels, ...]`` -> the same shape."""
        x, weight, bias = cast_to_autocast_dtype(input, self.weight, self.bias)
        assert x is not None
        with _without_autocast(input.device.type):
            return functional.group_norm(x, self.num_groups, weight, bias, self.eps)


def low_precision_layer_norm(model: nn.Module) -> nn.Module:
    """The model with layer norms (and RMS norms) that run in the dtype of autocast, in place of float32.

    That halves what a norm reads and writes; sums inside of torch's kernels are float32 all the same. It acts under
    ``torch.autocast`` (``autocast("bf16")``) only: with ``Precision(param="bf16")`` norms are in low precision already.
    Names in checkpoints stay.

    Formula: ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, with ``x``, ``weight`` and ``bias`` rounded before

    Args:
        model: with ``nn.LayerNorm`` or ``nn.RMSNorm`` inside, before ``shard_model``; subclasses of these are left alone.

    Mutates: ``model``. The parameters stay the same objects.

    Raises:
        ConfigError: no such norm, or a model that is sharded already.

    Source: Ba et al. 2016, arXiv:1607.06450; run in low precision as by MosaicML Composer.

    Example:
        >>> model = low_precision_layer_norm(nn.Sequential(nn.LayerNorm(2)))
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     model(torch.tensor([1.0, 3.0])).dtype
        torch.bfloat16
    """
    policies: dict[ModuleSelector, ReplacementPolicy] = {
        nn.LayerNorm: lambda norm, name: swap_class(norm, LowPrecisionLayerNorm),
        nn.RMSNorm: lambda norm, name: swap_class(norm, LowPrecisionRMSNorm),
    }
    return replace_modules(model, policies, caller="low_precision_layer_norm").model


def low_precision_group_norm(model: nn.Module) -> nn.Module:
    """The model with group norms that run in the dtype of autocast, in place of float32; see ``low_precision_layer_norm``.

    Formula: ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over each group of channels of a sample

    Args:
        model: with ``nn.GroupNorm`` inside, before ``shard_model``; subclasses of it are left alone.

    Mutates: ``model``. The parameters stay the same objects.

    Raises:
        ConfigError: no group norm, or a model that is sharded already.

    Source: Wu and He 2018, arXiv:1803.08494; run in low precision as by MosaicML Composer.

    Example:
        >>> model = low_precision_group_norm(nn.Sequential(nn.GroupNorm(1, 2)))
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     model(torch.tensor([[[1.0], [3.0]]])).flatten().tolist()
        [-1.0, 1.0]
    """
    policies: dict[ModuleSelector, ReplacementPolicy] = {
        nn.GroupNorm: lambda norm, name: swap_class(norm, LowPrecisionGroupNorm)
    }
    return replace_modules(model, policies, caller="low_precision_group_norm").model
