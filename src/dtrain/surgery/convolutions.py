"""Change the convolutions of a model: low-pass filters, channel gates, standardized weights, the memory layout of images."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from torch import Tensor, nn

from dtrain.arguments import check_choice, check_int, check_number
from dtrain.errors import ConfigError
from dtrain.fqn import compile_patterns, modules_by_fqn
from dtrain.surgery.replace import (
    Mixin,
    add_mixin,
    apply_policies,
    check_plain_model,
    check_size_or_fraction,
    mix_in,
    resolve_size,
)

EdgeMode = Literal["replicate", "reflect", "zeros"]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def blur_kernel(size: int) -> Tensor:
    """Return the binomial filter ``[size, size]``, float32 on the CPU, whose entries sum to 1.

    Formula: ``kernel[i, j] = binomial(size - 1, i) * binomial(size - 1, j) / 4 ** (size - 1)``

    Source: Zhang 2019, arXiv:1904.11486, section 4 (its Rect-2, Tri-3 and Bin-5 are sizes 2, 3 and 5).

    Example:
        >>> import dtrain as dt
        >>> (16 * dt.surgery.blur_kernel(3)).tolist()
        [[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]
    """
    row = torch.tensor([float(comb(size - 1, index)) for index in range(size)], device="cpu")
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
        kernel: ``[size, size]``, on any device; None uses ``blur_kernel(3)``.
        edge: padding beyond the edge: nearest pixel, mirrored pixels, or zeros, which darken the edge.

    Source: Zhang 2019, arXiv:1904.11486, section 3.2. The paper does not define the edge. Its author's code mirrors, Composer
        uses zeros, and the nearest pixel keeps constant areas constant in images of any size.

    Example:
        >>> import dtrain as dt
        >>> x = torch.tensor([[[0.0, 0.0, 16.0, 0.0, 0.0]]])
        >>> dt.surgery.blur_2d(x).tolist(), dt.surgery.blur_2d(x, stride=2).tolist()
        ([[[0.0, 4.0, 8.0, 4.0, 0.0]]], [[[0.0, 8.0, 0.0]]])
    """
    kernel = (blur_kernel(3) if kernel is None else kernel).to(x.device)
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
        strides = module.stride if isinstance(module.stride, tuple | list) else (module.stride, module.stride)
        stride = cast("tuple[int, int]", tuple(strides))
        if max(stride) == 1 or not add_mixin(module, Blur):
            return None
        assert isinstance(module, Blur)
        first = isinstance(module, nn.Conv2d) and blur_first
        like = next((tensor for source in (module, model) for tensor in source.parameters()), None)
        kernel = blur_kernel(size) if like is None else blur_kernel(size).to(like.device)
        module._set_up_blur(first=first, stride=stride, kernel=kernel, edge=edge)
        if not first:
            module.stride = (1, 1)
        return module

    def is_selected(name: str, module: nn.Module) -> bool:
        if isinstance(module, nn.MaxPool2d):
            return replace_maxpools and not module.ceil_mode and not module.return_indices
        return replace_convs and isinstance(module, nn.Conv2d) and module.in_channels >= min_channels

    return apply_policies(model, {is_selected: policy}, caller=f"{caller} with {min_channels=}").model


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

    return mix_in(model, ChannelsLast, lambda name, module: isinstance(module, nn.Conv2d), caller="channels_last")


class SqueezeExcite2d(nn.Module):
    """Module that scales the channels of ``[*, channels, height, width]`` by gates computed from channel means.

    Formula: ``out = x * sigmoid(expand @ relu(reduce @ mean(x)))``, with the mean over height and width, without biases

    Args:
        channels: input and output channels.
        latent_channels: rows of ``reduce``, as a number or a fraction of ``channels``.

    Example:
        >>> import dtrain as dt
        >>> gate = dt.surgery.SqueezeExcite2d(2, latent_channels=1)
        >>> _ = gate.reduce.weight.data.copy_(torch.tensor([[1.0, -1.0]]))
        >>> _ = gate.expand.weight.data.copy_(torch.tensor([[0.0], [100.0]]))
        >>> gate(
        ...     torch.tensor([[[6.0]], [[4.0]]])
        ... ).flatten().tolist()  # gates: sigmoid(0), sigmoid(200)
        [3.0, 4.0]

    Raises:
        ConfigError: ``latent_channels`` is invalid.

    Source: Hu et al. 2018, arXiv:1709.01507, section 3.
    """

    def __init__(
        self,
        channels: int,
        latent_channels: int | float = 1 / 16,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_size_or_fraction(latent_channels, "SqueezeExcite2d", "latent_channels")
        latent = resolve_size(latent_channels, channels)
        self.reduce = nn.Linear(channels, latent, bias=False, device=device, dtype=dtype)
        self.expand = nn.Linear(latent, channels, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        gates = torch.sigmoid(self.expand(torch.relu(self.reduce(reduce(x, "... h w -> ...", "mean")))))
        return x * rearrange(gates, "... c -> ... c 1 1")


class SqueezeExcite(Mixin):
    """Mixin of a convolution that scales its output channels by gates."""

    squeeze_excite: SqueezeExcite2d

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.squeeze_excite(super().forward(x))
        return out


def squeeze_excite(
    model: nn.Module,
    *,
    latent_channels: int | float = 1 / 16,
    min_channels: int = 128,
    select: str | Sequence[str] | None = None,
) -> nn.Module:
    """Add a squeeze-and-excitation after convolutions of ``model``; return the model.

    The convolution's parameters keep their names. The new parameters are ``squeeze_excite.reduce`` and
    ``squeeze_excite.expand`` of the convolution, initialized from torch's global generator.

    Formula: ``out = squeeze_excite(conv(x))``, see ``SqueezeExcite2d``

    Args:
        model: plain module before ``shard_model``; on meta, too.
        latent_channels: number, or fraction of a convolution's output channels. The paper reduces by 16 (Composer: 64
            channels).
        min_channels: smallest number of input and output channels of convolutions to change; from Composer, not from the paper.
        select: names of the convolutions to change (``*`` matches text without a dot), subject to ``min_channels``; None
            selects every convolution, as in Composer. The paper uses the end of each residual branch, as in
            ``"layer*.*.conv3"``.

    Mutates: ``model``: the classes of the selected ``nn.Conv2d``, and one new module in each.

    Example:
        >>> import dtrain as dt
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1))
        >>> model = dt.surgery.squeeze_excite(model, latent_channels=0.25, min_channels=8)
        >>> [name for name, _ in model.named_parameters() if name.startswith("1")]
        ['1.weight', '1.bias', '1.squeeze_excite.reduce.weight', '1.squeeze_excite.expand.weight']

    Raises:
        ConfigError: nothing to change, an invalid argument, or a sharded model.

    Source: Hu et al. 2018, arXiv:1709.01507.

    Suggested values:
        ImageNet, SE-ResNet-50: ``latent_channels=0.0625`` (reduction 16) (Hu et al. 2018)
        ImageNet, ResNet-50, best speed for its accuracy: ``latent_channels=64``, ``min_channels=128`` (MosaicML Composer,
            method card of squeeze-and-excitation)
    When not to use: time counts more than accuracy: Composer's card reports about 25 % less throughput for 0.5 to 1.5 %
        accuracy. A pretrained model changes its outputs at once.
    """
    caller = "squeeze_excite"
    check_size_or_fraction(latent_channels, caller, "latent_channels")
    check_int(caller, "min_channels", min_channels, minimum=0)
    patterns = [select] if isinstance(select, str) else None if select is None else list(select)
    is_match = compile_patterns(patterns or [], caller=f"{caller}: names")
    check_plain_model(model, caller)
    convs = [name for name, module in modules_by_fqn(model) if isinstance(module, nn.Conv2d)]
    for pattern in patterns or []:
        if not any(map(compile_patterns([pattern], caller=f"{caller}: names"), convs)):
            raise ConfigError(f"{caller}: select has{pattern!r}, but no convolution matches. Correct the pattern.")

    def set_up(module: SqueezeExcite, name: str) -> None:
        conv = cast(nn.Conv2d, module)
        device, dtype = conv.weight.device, conv.weight.dtype
        module.squeeze_excite = SqueezeExcite2d(conv.out_channels, latent_channels, device=device, dtype=dtype)
        module.squeeze_excite.train(module.training)

    def is_selected(name: str, module: nn.Module) -> bool:
        if not isinstance(module, nn.Conv2d) or min(module.in_channels, module.out_channels) < min_channels:
            return False
        return patterns is None or is_match(name)

    return mix_in(model, SqueezeExcite, is_selected, set_up, caller=f"{caller} with {min_channels=}")


def standardize_weight(weight: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Return ``weight`` with mean 0 and variance 1 in each filter, differentiably.

    Formula: ``(weight - mean) / sqrt(variance + eps)``, both over all axes except the first, the variance without correction

    Args:
        weight: ``[filters, ...]``. Statistics of bfloat16 and float16 are computed in float32.
        eps: constant inside the root, as in the paper (Composer adds the constant to the root).

    Source: Qiao et al. 2019, arXiv:1903.10520, equations 6 and 7.

    Example:
        >>> import dtrain as dt
        >>> dt.surgery.standardize_weight(
        ...     torch.tensor([[1.0, 3.0], [-2.0, 6.0]]), eps=0.0
        ... ).tolist()
        [[-1.0, 1.0], [-1.0, 1.0]]
    """
    wide = weight if weight.dtype.itemsize >= 4 else weight.float()
    variance, mean = torch.var_mean(wide, dim=tuple(range(1, weight.ndim)), correction=0, keepdim=True)
    return ((wide - mean) * torch.rsqrt(variance + eps)).to(weight.dtype)


class WeightStandardized(Mixin):
    """Mixin of a convolution that computes with its standardized weight; the parameter does not change."""

    _weight_eps: float

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolve: Any = super()._conv_forward  # type: ignore[misc]
        return cast(Tensor, convolve(x, standardize_weight(weight, eps=self._weight_eps), bias))


def weight_standardization(model: nn.Module, *, n_last_layers_to_ignore: int = 0, eps: float = 1e-5) -> nn.Module:
    """Run the convolutions of ``model`` with standardized weights; return the model.

    Each forward standardizes the full weight (unsharded under FSDP2), so parameters, names and checkpoints do not change. Use
    the edit for models with norms between convolutions, which undo the change of scale.

    Formula: ``out = conv(x, standardize_weight(weight)) + bias``

    Args:
        model: plain module before ``shard_model``; on meta, too.
        n_last_layers_to_ignore: number of last convolutions, in the order of ``model.modules()``, to leave unchanged.
        eps: as in ``standardize_weight``.

    Mutates: ``model``: the classes of its ``Conv1d``, ``2d`` and ``3d``, except convolutions with one number per filter.

    Example:
        >>> import dtrain as dt
        >>> conv = nn.Conv1d(1, 1, 2, bias=False)
        >>> _ = conv.weight.data.copy_(torch.tensor([[[3.0, 7.0]]]))
        >>> model = dt.surgery.weight_standardization(conv, eps=0.0)
        >>> model(torch.tensor([[1.0, 2.0, 4.0]])).tolist()  # the filter is [-1, 1]
        [[1.0, 2.0]]

    Raises:
        ConfigError: no convolution to change, an invalid argument, or a sharded model.

    Source: Qiao et al. 2019, arXiv:1903.10520, section 3.

    Suggested values:
        COCO and ImageNet, ResNet-50 with group norm: all convolutions (Qiao et al. 2019, experiments)
        BiT, ResNet-50x1 to 152x4 with group norm: all convolutions (Kolesnikov et al. 2020, arXiv:1912.11370)
    When not to use: the batch per rank is large and the model has batch norm: the paper's gain is for small batches with group
        norm. A pretrained model computes something else afterwards.
    """
    caller = "weight_standardization"
    check_int(caller, "n_last_layers_to_ignore", n_last_layers_to_ignore, minimum=0)
    check_number(caller, "eps", eps, minimum=0, below=1)
    check_plain_model(model, caller)
    names = [name for name, module in modules_by_fqn(model) if isinstance(module, _CONVOLUTIONS)]
    selected = set(names[: max(0, len(names) - n_last_layers_to_ignore)])

    def set_up(module: WeightStandardized, name: str) -> None:
        module._weight_eps = float(eps)

    def is_selected(name: str, module: nn.Module) -> bool:
        return name in selected and isinstance(module, _CONVOLUTIONS) and module.weight[0].numel() > 1

    return mix_in(model, WeightStandardized, is_selected, set_up, caller=caller)
