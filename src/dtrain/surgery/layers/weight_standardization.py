"""Weight standardisation: filters of mean 0 and variance 1."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.fqn import modules_by_fqn
from dtrain.surgery.class_swap import Mixin, add_mixin
from dtrain.surgery.replace import check_non_negative_int, check_plain_model, replace_modules

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def standardize_weight(weight: Tensor, *, eps: float = 1e-5) -> Tensor:
    """``weight`` with mean 0 and variance 1 in each filter, differentiable.

    Formula: ``(weight - mean) / sqrt(variance + eps)``, both over all axes but the first, the variance without correction

    Args:
        weight: ``[filters, ...]``. Of bfloat16 and float16 statistics are taken in float32.
        eps: inside the root, as in the paper (Composer adds it to the root).

    Source: Qiao et al. 2019, arXiv:1903.10520, equations 6 and 7.

    Example:
        >>> standardize_weight(torch.tensor([[1.0, 3.0], [-2.0, 6.0]]), eps=0.0).tolist()
        [[-1.0, 1.0], [-1.0, 1.0]]
    """
    wide = weight if weight.dtype.itemsize >= 4 else weight.float()
    variance, mean = torch.var_mean(wide, dim=tuple(range(1, weight.ndim)), correction=0, keepdim=True)
    return ((wide - mean) * torch.rsqrt(variance + eps)).to(weight.dtype)


class WeightStandardized(Mixin):
    """Mixed into a convolution: it computes with its standardised weight; the parameter stays what it is."""

    _weight_eps: float

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolve: Any = super()._conv_forward  # type: ignore[misc]
        return cast(Tensor, convolve(x, standardize_weight(weight, eps=self._weight_eps), bias))


def weight_standardization(model: nn.Module, *, n_last_layers_to_ignore: int = 0, eps: float = 1e-5) -> nn.Module:
    """Have the convolutions of ``model`` compute with standardised weights; return the model.

    Each forward standardises the whole weight that it was given (under FSDP2 the gathered one), so the parameter, its name, and
    what is saved stay the plain ones. For models with norms between convolutions, which undo the change of scale.

    Formula: ``out = conv(x, standardize_weight(weight)) + bias``

    Args:
        model: a plain module, before ``shard_model``; on meta, too.
        n_last_layers_to_ignore: so many of the last convolutions, in the order of ``model.modules()``, stay as they are.
        eps: as in ``standardize_weight``.

    Mutates: ``model``: the classes of its ``Conv1d``, ``2d`` and ``3d``; those whose filters have one number each stay.

    Raises:
        ConfigError: no convolution to change, another count or ``eps``, a model that is sharded already.

    Source: Qiao et al. 2019, arXiv:1903.10520, section 3.

    Example:
        >>> conv = nn.Conv1d(1, 1, 2, bias=False)
        >>> _ = conv.weight.data.copy_(torch.tensor([[[3.0, 7.0]]]))
        >>> weight_standardization(conv, eps=0.0)(torch.tensor([[1.0, 2.0, 4.0]])).tolist()  # the filter is [-1, 1]
        [[1.0, 2.0]]
    """
    where = "weight_standardization"
    check_non_negative_int(n_last_layers_to_ignore, where, "n_last_layers_to_ignore")
    if not isinstance(eps, int | float) or not 0 <= eps < 1:
        raise ConfigError(f"{where}: needs 0 <= eps < 1, got {eps=}")
    check_plain_model(model, where)
    found = [name for name, module in modules_by_fqn(model) if isinstance(module, _CONVOLUTIONS)]
    chosen = set(found[: max(0, len(found) - n_last_layers_to_ignore)])

    def standardized(module: nn.Module, name: str) -> nn.Module | None:
        if not add_mixin(module, WeightStandardized):
            return None
        assert isinstance(module, WeightStandardized)
        module._weight_eps = float(eps)
        return module

    def wanted(name: str, module: nn.Module) -> bool:
        return name in chosen and isinstance(module, _CONVOLUTIONS) and module.weight[0].numel() > 1

    return replace_modules(model, {wanted: standardized}, caller=where).model
