"""BlurPool: a low-pass filter before a network drops pixels."""

from __future__ import annotations

from math import comb
from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.surgery.class_swap import Mixin, add_mixin
from dtrain.surgery.replace import check_non_negative_int, check_plain_model, replace_modules

EdgeMode = Literal["replicate", "reflect", "zeros"]


def blur_kernel(size: int) -> Tensor:
    """The binomial filter ``[size, size]``, float32, whose entries sum to 1.

    Formula: ``kernel[i, j] = binomial(size - 1, i) * binomial(size - 1, j) / 4 ** (size - 1)``

    Source: Zhang 2019, arXiv:1904.11486, section 4 (its Rect-2, Tri-3 and Bin-5 are sizes 2, 3 and 5).

    Example:
        >>> (16 * blur_kernel(3)).tolist()
        [[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]
    """
    row = torch.tensor([float(comb(size - 1, at)) for at in range(size)])
    return torch.outer(row, row) / 4.0 ** (size - 1)


def blur_2d(
    x: Tensor, *, stride: int | tuple[int, int] = 1, kernel: Tensor | None = None, edge: EdgeMode = "replicate"
) -> Tensor:
    """``x`` filtered, every ``stride``-th pixel of it.

    Formula: ``out[h, w] = sum_ij kernel[i, j] * x[stride * h + i - before, stride * w + j - before]``, for each channel, with
    ``before = (size - 1) // 2``

    Args:
        x: ``[*, channels, height, width]``.
        stride: of the result, whose sides are ``ceil(side / stride)``.
        kernel: ``[size, size]``, on the device of ``x``; None is ``blur_kernel(3)``.
        edge: what is taken for pixels beyond the edge: the nearest, the mirrored, or zero, which darkens the rim.

    Source: Zhang 2019, arXiv:1904.11486, section 3.2. The edge is not in the paper; its author's code mirrors, Composer takes
        zeros, and the nearest keeps an even area even in pictures of any size.

    Example:
        >>> x = torch.tensor([[[0.0, 0.0, 16.0, 0.0, 0.0]]])
        >>> blur_2d(x).tolist(), blur_2d(x, stride=2).tolist()
        ([[[0.0, 4.0, 8.0, 4.0, 0.0]]], [[[0.0, 8.0, 0.0]]])
    """
    kernel = blur_kernel(3).to(x.device) if kernel is None else kernel
    size, channels = kernel.shape[-1], x.shape[-3]
    before, after = (size - 1) // 2, size // 2
    sides = (before, after, before, after)
    x = F.pad(x, sides) if edge == "zeros" else F.pad(x, sides, mode=edge)
    return F.conv2d(x, kernel.to(x.dtype).expand(channels, 1, size, size), stride=stride, groups=channels)


class Blur(Mixin):
    """Mixed into a convolution or a max pool: a blur before it, or after it, in place of its stride."""

    blur_kernel: Tensor

    def _set_up_blur(self, *, first: bool, stride: int | tuple[int, int], kernel: Tensor, edge: EdgeMode) -> None:
        self._blur_first, self._stride, self._edge = first, stride, edge
        self.register_buffer("blur_kernel", kernel, persistent=False)

    def reset_parameters(self) -> None:
        own = getattr(super(), "reset_parameters", None)
        if own is not None:
            own()
        self.blur_kernel = blur_kernel(self.blur_kernel.shape[-1]).to(self.blur_kernel)

    def forward(self, x: Tensor) -> Tensor:
        if self._blur_first:
            out: Tensor = super().forward(blur_2d(x, kernel=self.blur_kernel, edge=self._edge))
            return out
        return blur_2d(super().forward(x), stride=self._stride, kernel=self.blur_kernel, edge=self._edge)

    def extra_repr(self) -> str:
        when = "first" if self._blur_first else f"after, stride={self._stride}"
        return f"{super().extra_repr()}, blur={self.blur_kernel.shape[-1]} {when}"


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
    """Have the strided convolutions and max pools of ``model`` blur what they sample; return the model.

    A max pool takes the maximum at every place and then blurs with its stride. Shapes, parameters and names stay as they were.

    Formula: ``max pool: blur_2d(max_pool(x, stride=1), stride)``, ``convolution: conv(blur_2d(x), stride)``, and with
    ``blur_first=False``: ``blur_2d(conv(x, stride=1), stride)``

    Args:
        model: a plain module, before ``shard_model``; on meta, too.
        replace_convs: change ``nn.Conv2d`` with a stride.
        replace_maxpools: change ``nn.MaxPool2d`` with a stride; those with ``ceil_mode`` or ``return_indices`` stay.
        blur_first: blur what goes into a convolution. The paper blurs what comes out, after the activation, and has the
            convolution compute at every place: ``stride ** 2`` times the work. True is Composer's default, for that reason.
        min_channels: convolutions with fewer input channels stay: an image has frequencies that are to be seen.
        size: of the filter; more blurs more.
        edge: as in ``blur_2d``.

    Mutates: ``model``: the classes of those modules, their stride where the blur comes after them, and a buffer that is in no
        state dict.

    Raises:
        ConfigError: nothing to change, an argument that cannot be right, a model that is sharded already.

    Source: Zhang 2019, arXiv:1904.11486, sections 3.2 and 4.

    Example:
        >>> net = blur_pool(nn.Sequential(nn.MaxPool2d(2)))
        >>> net(torch.tensor([[[0.0, 0.0, 0.0, 0.0, 16.0, 0.0]] * 2])).tolist()  # maxima 0 0 0 16 16
        [[[0.0, 4.0, 16.0]]]
    """
    where = "blur_pool"
    if type(size) is not int or not 1 < size < 16:
        raise ConfigError(f"{where}: size must be a whole number from 2 to 15, got {size!r}")
    if edge not in get_args(EdgeMode):
        raise ConfigError(f"{where}: unknown {edge=}; use one of {', '.join(get_args(EdgeMode))}")
    if not replace_convs and not replace_maxpools:
        raise ConfigError(f"{where}: neither replace_convs nor replace_maxpools, so there is nothing to do")
    check_non_negative_int(min_channels, where, "min_channels")
    check_plain_model(model, where)

    def blurred(module: nn.Module, name: str) -> nn.Module | None:
        assert isinstance(module, nn.Conv2d | nn.MaxPool2d)
        stride = _pair(module.stride)
        if max(stride) == 1 or not add_mixin(module, Blur):
            return None
        assert isinstance(module, Blur)
        first = isinstance(module, nn.Conv2d) and blur_first
        like = next((tensor for each in (module, model) for tensor in each.parameters()), torch.empty(0))
        module._set_up_blur(first=first, stride=stride, kernel=blur_kernel(size).to(like.device), edge=edge)
        if not first:
            module.stride = (1, 1)
        return module

    def wanted(name: str, module: nn.Module) -> bool:
        if isinstance(module, nn.MaxPool2d):
            return replace_maxpools and not module.ceil_mode and not module.return_indices
        return replace_convs and isinstance(module, nn.Conv2d) and module.in_channels >= min_channels

    return replace_modules(model, {wanted: blurred}, caller=f"{where} with {min_channels=}").model


def _pair(value: object) -> tuple[int, int]:
    return cast("tuple[int, int]", tuple(value) if isinstance(value, tuple | list) else (value, value))
