"""Run 2-d convolutions in the channels-last memory format, the fastest format on GPUs: ``channels_last``."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from dtrain.surgery.replace import Mixin, add_mixin, apply_policies


class ChannelsLast(Mixin):
    """Mixin of a convolution that converts its input and weight to channels last."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolve: Any = super()._conv_forward  # type: ignore[misc]
        # An image without a batch axis has no such format.
        if x.ndim == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return cast(Tensor, convolve(x, weight.contiguous(memory_format=torch.channels_last), bias))


def channels_last(model: nn.Module) -> nn.Module:
    """Run the 2-d convolutions of ``model`` in the channels-last memory format; return the model.

    Values, shapes, parameters and names do not change. Outputs of convolutions are channels last, and norms, activations and
    pools keep the format. ``model.to(memory_format=torch.channels_last)`` (as in Composer) changes the parameters, which FSDP2
    does not support. Here parameters stay contiguous, and each forward converts the weight. The copy is small beside the
    activations.

    Formula: ``out = conv(x, weight)``, in which ``stride(x) = (channels * height * width, 1, width * channels, channels)``

    Args:
        model: plain module before ``shard_model``; on meta, too.

    Mutates: ``model``: the classes of its ``nn.Conv2d``.

    Example:
        >>> import dtrain as dt
        >>> dt.surgery.channels_last(nn.Conv2d(3, 4, 1))(torch.zeros(2, 3, 5, 5)).stride()
        (100, 1, 20, 4)

    Raises:
        ConfigError: no 2-d convolution, or a sharded model.

    Source: PyTorch's channels-last memory format; MosaicML Composer's ``apply_channels_last``.

    Suggested values:
        NVIDIA GPU with tensor cores, ResNet-50: with ``autocast``, for the whole model (PyTorch's tutorial on channels-last)
        CPU, ResNet: as is; see the measured cost below (dtrain, ``benchmarks/algorithms.py``)
    When not to use: the model has no 2-d convolutions, or reshapes by ``view`` between them: operations without a channels-last
        kernel copy the tensor.
    """

    def policy(module: nn.Module, name: str) -> nn.Module | None:
        return add_mixin(module, ChannelsLast)

    def is_selected(name: str, module: nn.Module) -> bool:
        return isinstance(module, nn.Conv2d)

    return apply_policies(model, {is_selected: policy}, caller="channels_last").model
