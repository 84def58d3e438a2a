"""Channels last: convolutions of pictures compute in the memory format that GPUs are fastest in."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from dtrain.surgery.class_swap import Mixin, add_mixin
from dtrain.surgery.replace import replace_modules


class ChannelsLast(Mixin):
    """Mixed into a convolution: it computes with its input and its weight in the format channels last."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolve: Any = super()._conv_forward  # type: ignore[misc]
        if x.ndim == 4:  # a picture without a batch has no such format
            x = x.contiguous(memory_format=torch.channels_last)
        return cast(Tensor, convolve(x, weight.contiguous(memory_format=torch.channels_last), bias))


def channels_last(model: nn.Module) -> nn.Module:
    """Have the 2-d convolutions of ``model`` compute in the memory format channels last; return the model.

    Values, shapes, parameters and names stay as they were; what comes out of a convolution has that format, and norms,
    activations and pools keep it. ``model.to(memory_format=torch.channels_last)`` (what Composer does) changes the parameters
    instead, and FSDP2 refuses such parameters. Here they stay contiguous, and each forward converts the weight: a copy of it,
    small beside the activations.

    Formula: ``out = conv(x, weight)``, in which ``stride(x) = (channels * height * width, 1, width * channels, channels)``

    Args:
        model: a plain module, before ``shard_model``; on meta, too.

    Mutates: ``model``: the classes of its ``nn.Conv2d``.

    Raises:
        ConfigError: no such convolution, a model that is sharded already.

    Source: PyTorch's channels-last memory format; MosaicML Composer's ``apply_channels_last``.

    Example:
        >>> channels_last(nn.Conv2d(3, 4, 1))(torch.zeros(2, 3, 5, 5)).stride()
        (100, 1, 20, 4)
    """

    def last(module: nn.Module, name: str) -> nn.Module | None:
        return module if add_mixin(module, ChannelsLast) else None

    def wanted(name: str, module: nn.Module) -> bool:
        return isinstance(module, nn.Conv2d)

    return replace_modules(model, {wanted: last}, caller="channels_last").model
