"""Standardize the filters of convolutions to mean 0 and variance 1: ``weight_standardization``."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from dtrain.arguments import check_int, check_number
from dtrain.fqn import modules_by_fqn
from dtrain.surgery.replace import Mixin, add_mixin, apply_policies, check_plain_model

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


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

    def policy(module: nn.Module, name: str) -> nn.Module | None:
        standardized = add_mixin(module, WeightStandardized)
        if standardized is not None:
            standardized._weight_eps = float(eps)
        return standardized

    def is_selected(name: str, module: nn.Module) -> bool:
        return name in selected and isinstance(module, _CONVOLUTIONS) and module.weight[0].numel() > 1

    return apply_policies(model, {is_selected: policy}, caller=caller).model
