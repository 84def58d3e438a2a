"""Apply a low-pass filter before strided convolutions and max pools subsample: ``blur_pool``."""

from __future__ import annotations

from math import comb
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.arguments import check_choice, check_int
from dtrain.errors import ConfigError
from dtrain.surgery.replace import Mixin, add_mixin, apply_policies, check_plain_model

EdgeMode = Literal["replicate", "reflect", "zeros"]


def blur_kernel(size: int) -> Tensor:
    """Return the binomial filter ``[size, size]``, float32, whose entries sum to 1.

    Formula: ``kernel[i, j] = binomial(size - 1, i) * binomial(size - 1, j) / 4 ** (size - 1)``

    Source: Zhang 2019, arXiv:1904.11486, section 4 (its Rect-2, Tri-3 and Bin-5 are sizes 2, 3 and 5).

    Example:
        >>> import dtrain as dt
        >>> (16 * dt.surgery.blur_kernel(3)).tolist()
        [[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]
    """
    row = torch.tensor([float(comb(size - 1, index)) for index in range(size)])
    return torch.outer(row, row) / 4.0 ** (size - 1)


def blur_2d(
    x: Tensor, *, stride: int | tuple[int, int] = 1, kernel: Tensor | None = None, edge: EdgeMode = "replicate"
) -> Tensor:
    """Filter ``x`` and return every ``stride``-th pixel.

    Formula: ``out[h, w] = sum_ij kernel[i, j] * x[stride * h + i - before, stride * w + j - before]``, for each channel, with
    ``before = (size - 1) // 2``

    Args:
        x: ``[*, channels, height, width]``.
        stride: stride of the result, whose sides are ``ceil(side / stride)``.
        kernel: ``[size, size]``, on the device of ``x``; None uses ``blur_kernel(3)``.
        edge: padding beyond the edge: nearest pixel, mirrored pixels, or zeros, which darken the edge.

    Source: Zhang 2019, arXiv:1904.11486, section 3.2. The paper does not define the edge. Its author's code mirrors, Composer
        uses zeros, and the nearest pixel keeps constant areas constant in images of any size.

    Example:
        >>> import dtrain as dt
        >>> x = torch.tensor([[[0.0, 0.0, 16.0, 0.0, 0.0]]])
        >>> dt.surgery.blur_2d(x).tolist(), dt.surgery.blur_2d(x, stride=2).tolist()
        ([[[0.0, 4.0, 8.0, 4.0, 0.0]]], [[[0.0, 8.0, 0.0]]])
    """
    kernel = blur_kernel(3).to(x.device) if kernel is None else kernel
    size, channels = kernel.shape[-1], x.shape[-3]
    before, after = (size - 1) // 2, size // 2
    sides = (before, after, before, after)
    x = F.pad(x, sides) if edge == "zeros" else F.pad(x, sides, mode=edge)
    return F.conv2d(x, kernel.to(x.dtype).expand(channels, 1, size, size), stride=stride, groups=channels)


class Blur(Mixin):
    """Mixin of a convolution or max pool with a blur before the module, or after the module in place of its stride."""

    blur_kernel: Tensor

    def _set_up_blur(self, *, first: bool, stride: int | tuple[int, int], kernel: Tensor, edge: EdgeMode) -> None:
        self._blur_first, self._stride, self._edge = first, stride, edge
        self.register_buffer("blur_kernel", kernel, persistent=False)

    def reset_parameters(self) -> None:
        reset = getattr(super(), "reset_parameters", None)
        if reset is not None:
            reset()
        self.blur_kernel = blur_kernel(self.blur_kernel.shape[-1]).to(self.blur_kernel)

    def forward(self, x: Tensor) -> Tensor:
        if self._blur_first:
            out: Tensor = super().forward(blur_2d(x, kernel=self.blur_kernel, edge=self._edge))
            return out
        return blur_2d(super().forward(x), stride=self._stride, kernel=self.blur_kernel, edge=self._edge)

    def extra_repr(self) -> str:
        position = "first" if self._blur_first else f"after, stride={self._stride}"
        return f"{super().extra_repr()}, blur={self.blur_kernel.shape[-1]} {position}"


def blur_pool(
    model: nn.Module,
    *,
    replace_convs: bool = True,
    replace_maxpools: bool = True,
    blur_first: bool = True,
    min_channels: int = 16,
    size: int = 3,
    edge: EdgeMode = "replicate",
) -> nn.Module:
    """Blur before strided convolutions and max pools of ``model`` subsample; return the model.

    A max pool computes the maximum at every position and then blurs with its stride. Shapes, parameters and names do not
    change.

    Formula: ``max pool: blur_2d(max_pool(x, stride=1), stride)``, ``convolution: conv(blur_2d(x), stride)``, and with
    ``blur_first=False``: ``blur_2d(conv(x, stride=1), stride)``

    Args:
        model: plain module before ``shard_model``; on meta, too.
        replace_convs: if True, change strided ``nn.Conv2d``.
        replace_maxpools: if True, change strided ``nn.MaxPool2d``, except with ``ceil_mode`` or ``return_indices``.
        blur_first: if True, blur the input of a convolution, as Composer does by default. The paper blurs the output after the
            activation, so the convolution computes every position: ``stride ** 2`` times the work.
        min_channels: smallest number of input channels of convolutions to change, because images need their high frequencies.
        size: size of the filter; larger filters blur more.
        edge: as in ``blur_2d``.

    Mutates: ``model``: the classes of the selected modules, their stride if the blur follows the module, and a non-persistent
        buffer.

    Example:
        >>> import dtrain as dt
        >>> model = dt.surgery.blur_pool(nn.Sequential(nn.MaxPool2d(2)))
        >>> model(
        ...     torch.tensor([[[0.0, 0.0, 0.0, 0.0, 16.0, 0.0]] * 2])
        ... ).tolist()  # maxima 0 0 0 16 16
        [[[0.0, 4.0, 16.0]]]

    Raises:
        ConfigError: nothing to change, an invalid argument, or a sharded model.

    Source: Zhang 2019, arXiv:1904.11486, sections 3.2 and 4.

    Suggested values:
        ImageNet, ResNet-50: ``size=3`` (Zhang 2019, section 4 (Tri-3))
        ImageNet, best consistency under shifts: ``size=5`` (Zhang 2019, section 4 (Bin-5))
    When not to use: the model has few strided layers, or time counts more than accuracy: the blur of a whole feature map is
        memory traffic. Vision transformers have no layer to edit.
    """
    caller = "blur_pool"
    check_int(caller, "size", size, minimum=2, maximum=15)
    check_choice(caller, "edge", edge, get_args(EdgeMode))
    if not replace_convs and not replace_maxpools:
        raise ConfigError(
            f"{caller}: replace_convs or replace_maxpools must be True, got False for both. Set one of them to True."
        )
    check_int(caller, "min_channels", min_channels, minimum=0)
    check_plain_model(model, caller)

    def policy(module: nn.Module, name: str) -> nn.Module | None:
        assert isinstance(module, nn.Conv2d | nn.MaxPool2d)
        stride = _pair(module.stride)
        if max(stride) == 1 or not add_mixin(module, Blur):
            return None
        assert isinstance(module, Blur)
        first = isinstance(module, nn.Conv2d) and blur_first
        like = next((tensor for source in (module, model) for tensor in source.parameters()), torch.empty(0))
        module._set_up_blur(first=first, stride=stride, kernel=blur_kernel(size).to(like.device), edge=edge)
        if not first:
            module.stride = (1, 1)
        return module

    def is_selected(name: str, module: nn.Module) -> bool:
        if isinstance(module, nn.MaxPool2d):
            return replace_maxpools and not module.ceil_mode and not module.return_indices
        return replace_convs and isinstance(module, nn.Conv2d) and module.in_channels >= min_channels

    return apply_policies(model, {is_selected: policy}, caller=f"{caller} with {min_channels=}").model


def _pair(value: object) -> tuple[int, int]:
    return cast("tuple[int, int]", tuple(value) if isinstance(value, tuple | list) else (value, value))
