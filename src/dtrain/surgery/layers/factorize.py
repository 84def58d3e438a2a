"""Low-rank factorisation: one linear map as two smaller ones."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError
from dtrain.surgery.replace import (
    check_non_negative_int,
    check_plain_model,
    check_size_or_fraction,
    replace_modules,
    resolve_size,
)


def factorize_matrix(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Two factors whose product is, of all matrices of this rank, nearest to ``matrix`` in least squares.

    Formula: ``matrix = u diag(s) v``; ``left = u[:, :rank] sqrt(s[:rank])``, ``right = sqrt(s[:rank]) v[:rank]``

    Args:
        matrix: ``[rows, columns]``, computed with in float32 at least.
        rank: at least 1.

    Returns:
        ``left`` ``[rows, rank]`` and ``right`` ``[rank, columns]``, of the dtype of ``matrix``.

    Source: Eckart and Young 1936.

    Example:
        >>> left, right = factorize_matrix(torch.diag(torch.tensor([9.0, 4.0, 1.0])), 2)
        >>> (left @ right).diag().round(decimals=4).tolist(), left.abs().sum(0).round(decimals=4).tolist()
        ([9.0, 4.0, 0.0], [3.0, 2.0])
    """
    wide = matrix if matrix.dtype.itemsize >= 4 else matrix.float()
    u, s, v = torch.linalg.svd(wide, full_matrices=False)
    root = s[:rank].sqrt()
    return (u[:, :rank] * root).to(matrix.dtype), (root[:, None] * v[:rank]).to(matrix.dtype)


class _FactorizedLayer(nn.Module):
    """``up(down(x))``. Code that reads ``weight`` and ``bias`` of a layer, instead of calling it, sees those of the whole."""

    down: nn.Linear | nn.Conv2d
    up: nn.Linear | nn.Conv2d

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(self.down(x))
        return out

    @property
    def weight(self) -> Tensor:
        """The product of both weights, computed when it is asked for."""
        down = self.down.weight
        whole: Tensor = self.up.weight.flatten(1) @ down.flatten(1)
        return whole.reshape(-1, *down.shape[1:])

    @property
    def bias(self) -> Tensor | None:
        return self.up.bias


class FactorizedLinear(_FactorizedLayer):
    """A linear layer through ``rank`` features, with the bias in ``up``."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        weight = layer.weight
        how = {"device": weight.device, "dtype": weight.dtype}
        self.down = nn.utils.skip_init(nn.Linear, layer.in_features, rank, bias=False, **how)
        self.up = nn.utils.skip_init(nn.Linear, rank, layer.out_features, bias=layer.bias is not None, **how)
        _init_factors_(self.down, self.up, layer, rank)


class FactorizedConv2d(_FactorizedLayer):
    """A convolution to ``rank`` channels, with the kernel and stride of the whole, and one of 1x1, with the bias."""

    def __init__(self, layer: nn.Conv2d, rank: int) -> None:
        super().__init__()
        how = {"device": layer.weight.device, "dtype": layer.weight.dtype}
        self.down = nn.utils.skip_init(
            nn.Conv2d,
            layer.in_channels,
            rank,
            layer.kernel_size,
            stride=layer.stride,
            padding=layer.padding,
            dilation=layer.dilation,
            padding_mode=layer.padding_mode,
            bias=False,
            **how,
        )
        self.up = nn.utils.skip_init(nn.Conv2d, rank, layer.out_channels, 1, bias=layer.bias is not None, **how)
        _init_factors_(self.down, self.up, layer, rank)


def factorize(
    model: nn.Module,
    *,
    factorize_convs: bool = True,
    factorize_linears: bool = True,
    min_channels: int = 512,
    latent_channels: int | float = 0.25,
    min_features: int = 512,
    latent_features: int | float = 0.25,
) -> nn.Module:
    """Replace large linear layers and convolutions of ``model`` by two smaller ones each; return the model.

    A layer of weight ``[out, in]`` becomes ``down`` (in to rank) and ``up`` (rank to out, with the bias); of a convolution,
    ``down`` has its kernel and ``up`` is 1x1. Their product is the matrix of that rank nearest to the weight; on meta, where
    there is none, ``materialize`` draws both. Left alone: layers for which two would not be smaller, factors, grouped
    convolutions, weights that are tied or computed, and subclasses of ``nn.Linear`` and ``nn.Conv2d`` (so factorise before
    other edits).

    Formula: ``up.weight @ down.weight = factorize_matrix(weight, rank)``, if ``rank * (out + in) < out * in``; a convolution's
    weight as ``[out, in * height * width]``

    Args:
        model: a plain module, before ``shard_model``.
        factorize_convs: replace ``nn.Conv2d``.
        factorize_linears: replace ``nn.Linear``.
        min_channels: convolutions with fewer channels, in or out, stay.
        latent_channels: the rank, as a number or as a fraction of the smaller of in and out.
        min_features: linear layers with fewer features, in or out, stay.
        latent_features: as ``latent_channels``.

    Mutates: ``model``; the new Parameter objects require gradients as the weight did.
    Host sync: an SVD for each layer, once.

    Raises:
        ConfigError: nothing to replace, an argument that cannot be right, a model that is sharded already.

    Source: Denton et al. 2014, arXiv:1404.0736; the form of convolutions is that of Zhang et al. 2015, arXiv:1505.06798. Sizes
        are MosaicML Composer's.

    Example:
        >>> net = factorize(nn.Sequential(nn.Linear(4, 4)), min_features=4)
        >>> {name: list(p.shape) for name, p in net.named_parameters()}
        {'0.down.weight': [1, 4], '0.up.weight': [4, 1], '0.up.bias': [4]}
    """
    where = "factorize"
    check_non_negative_int(min_channels, where, "min_channels")
    check_non_negative_int(min_features, where, "min_features")
    check_size_or_fraction(latent_channels, where, "latent_channels")
    check_size_or_fraction(latent_features, where, "latent_features")
    if not factorize_convs and not factorize_linears:
        raise ConfigError(f"{where}: neither factorize_convs nor factorize_linears, so there is nothing to do")
    check_plain_model(model, where)
    modules = set(model.modules())
    parts = {id(part) for module in modules if isinstance(module, _FactorizedLayer) for part in module.modules()}
    owners = Counter(id(p) for module in modules for p in module._parameters.values() if p is not None)

    def low_rank(module: nn.Module, name: str) -> nn.Module | None:
        assert isinstance(module, nn.Linear | nn.Conv2d)
        weight, linear = module.weight, isinstance(module, nn.Linear)
        least = min_features if linear else min_channels
        smaller, rows, columns = min(weight.shape[:2]), len(weight), weight[0].numel()
        rank = resolve_size(latent_features if linear else latent_channels, smaller)
        if smaller < least or id(module) in parts or owners[id(weight)] != 1 or rank * (rows + columns) >= rows * columns:
            return None
        if isinstance(module, nn.Linear):
            return FactorizedLinear(module, rank)
        return FactorizedConv2d(module, rank) if module.groups == 1 else None

    kinds = [nn.Linear] * factorize_linears + [nn.Conv2d] * factorize_convs
    least = f"with {min_channels=} and {min_features=}"
    return replace_modules(model, dict.fromkeys(kinds, low_rank), caller=f"{where} {least}").model


def _init_factors_(down: nn.Module, up: nn.Module, layer: nn.Linear | nn.Conv2d, rank: int) -> None:
    """Give the factors the values of ``layer``. Mutates: ``down`` and ``up``."""
    weights = [each.weight for each in (up, down)]
    with torch.no_grad():
        if not layer.weight.is_meta:
            for weight, factor in zip(weights, factorize_matrix(layer.weight.flatten(1), rank), strict=True):
                assert isinstance(weight, Tensor)
                weight.copy_(factor.reshape(weight.shape))
    for weight in weights:
        assert isinstance(weight, Tensor)
        weight.requires_grad_(layer.weight.requires_grad)
    if layer.bias is not None:
        up.bias = layer.bias
