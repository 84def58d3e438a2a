"""Replace linear layers and convolutions: by products of two smaller layers (``factorize``), or by gated linear units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from einops import einsum, rearrange
from torch import Tensor, nn
from torch.nn import functional

from dtrain.arguments import check_int
from dtrain.errors import ConfigError
from dtrain.surgery.replace import (
    ModuleSelector,
    ReplacementPolicy,
    apply_policies,
    check_plain_model,
    check_size_or_fraction,
    find_imported_class,
    resolve_size,
)

Activation: TypeAlias = Callable[[Tensor], Tensor]
ActivationName: TypeAlias = Literal["sigmoid", "relu", "gelu", "silu", "bilinear"]
_ACTIVATIONS: Mapping[str, Activation] = {
    "sigmoid": torch.sigmoid,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "bilinear": nn.Identity(),
}
_CALLER = "gated_linear_units"


def factorize_matrix(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return two factors whose product is the best approximation of ``matrix`` of the given rank, in least squares.

    Formula: ``matrix = u diag(s) v``; ``left = u[:, :rank] sqrt(s[:rank])``, ``right = sqrt(s[:rank]) v[:rank]``

    Args:
        matrix: ``[rows, columns]``; the computation uses at least float32.
        rank: rank of the product, at least 1.

    Returns:
        ``left`` ``[rows, rank]`` and ``right`` ``[rank, columns]``, with the dtype of ``matrix``.

    Source: Eckart and Young 1936.

    Example:
        >>> import dtrain as dt
        >>> left, right = dt.surgery.factorize_matrix(
        ...     torch.diag(torch.tensor([9.0, 4.0, 1.0])), 2
        ... )
        >>> (
        ...     (left @ right).diag().round(decimals=4).tolist(),
        ...     left.abs().sum(0).round(decimals=4).tolist(),
        ... )
        ([9.0, 4.0, 0.0], [3.0, 2.0])
    """
    wide = matrix if matrix.dtype.itemsize >= 4 else matrix.float()
    u, s, v = torch.linalg.svd(wide, full_matrices=False)
    root = s[:rank].sqrt()
    return (u[:, :rank] * root).to(matrix.dtype), (root[:, None] * v[:rank]).to(matrix.dtype)


class _FactorizedLayer(nn.Module):
    """Base class of ``up(down(x))``. ``weight`` and ``bias`` return the values of the full layer."""

    down: nn.Linear | nn.Conv2d
    up: nn.Linear | nn.Conv2d

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(self.down(x))
        return out

    @property
    def weight(self) -> Tensor:
        """Compute the product of both weights at each access."""
        up = rearrange(self.up.weight, "out rank ... -> out (rank ...)")
        product: Tensor = einsum(up, self.down.weight, "out rank, rank ... -> out ...")
        return product

    @property
    def bias(self) -> Tensor | None:
        return self.up.bias


class FactorizedLinear(_FactorizedLayer):
    """Linear layer through ``rank`` features, with the bias in ``up``.

    Formula: ``y = x @ down.weight.T @ up.weight.T + up.bias``

    Args:
        layer: original layer, whose weight is approximated.
        rank: number of features between ``down`` and ``up``.

    Example:
        >>> import dtrain as dt
        >>> layer = dt.surgery.FactorizedLinear(nn.Linear(4, 6), rank=2)
        >>> layer(torch.ones(3, 4)).shape, [tuple(p.shape) for p in layer.parameters()]
        (torch.Size([3, 6]), [(2, 4), (6, 2), (6,)])

    Source: Denton et al. 2014, arXiv:1404.0736.
    """

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        weight = layer.weight
        options = {"device": weight.device, "dtype": weight.dtype}
        self.down = nn.utils.skip_init(nn.Linear, layer.in_features, rank, bias=False, **options)
        self.up = nn.utils.skip_init(nn.Linear, rank, layer.out_features, bias=layer.bias is not None, **options)
        _init_factors_(self.down, self.up, layer, rank)


class FactorizedConv2d(_FactorizedLayer):
    """Convolution to ``rank`` channels with the original kernel and stride, and a 1x1 convolution with the bias.

    Formula: ``y = conv_1x1(conv(x, down.weight), up.weight) + up.bias``

    Args:
        layer: original convolution, whose weight is approximated.
        rank: number of channels between ``down`` and ``up``.

    Example:
        >>> import dtrain as dt
        >>> layer = dt.surgery.FactorizedConv2d(nn.Conv2d(4, 6, 3), rank=2)
        >>> layer(torch.ones(1, 4, 5, 5)).shape, [tuple(p.shape) for p in layer.parameters()]
        (torch.Size([1, 6, 3, 3]), [(2, 4, 3, 3), (6, 2, 1, 1), (6,)])

    Source: Zhang et al. 2015, arXiv:1505.06798.
    """

    def __init__(self, layer: nn.Conv2d, rank: int) -> None:
        super().__init__()
        options = {"device": layer.weight.device, "dtype": layer.weight.dtype}
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
            **options,
        )
        self.up = nn.utils.skip_init(nn.Conv2d, rank, layer.out_channels, 1, bias=layer.bias is not None, **options)
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
    """Replace large linear layers and convolutions of ``model`` by two smaller layers each; return the model.

    A layer with weight ``[out, in]`` becomes ``down`` (in to rank) and ``up`` (rank to out, with the bias). For a convolution,
    ``down`` has the original kernel and ``up`` is 1x1. Their product is the best approximation of the weight. On meta there is
    no weight, and ``materialize`` initializes both layers. These layers do not change: layers that two factors would not make
    smaller, factors, grouped convolutions, tied or computed weights, and subclasses of ``nn.Linear`` and ``nn.Conv2d`` (so
    factorize before other edits).

    Formula: ``up.weight @ down.weight = factorize_matrix(weight, rank)``, if ``rank * (out + in) < out * in``; a convolution's
    weight as ``[out, in * height * width]``

    Args:
        model: plain module before ``shard_model``.
        factorize_convs: if True, replace ``nn.Conv2d``.
        factorize_linears: if True, replace ``nn.Linear``.
        min_channels: smallest number of input and output channels of convolutions to replace.
        latent_channels: rank, as a number or a fraction of the smaller of in and out.
        min_features: smallest number of input and output features of linear layers to replace.
        latent_features: rank of linear layers, as ``latent_channels``.

    Mutates: ``model``; new Parameter objects have the ``requires_grad`` of the weight.
    Host sync: one SVD for each layer.

    Example:
        >>> import dtrain as dt
        >>> model = dt.surgery.factorize(nn.Sequential(nn.Linear(4, 4)), min_features=4)
        >>> {name: list(p.shape) for name, p in model.named_parameters()}
        {'0.down.weight': [1, 4], '0.up.weight': [4, 1], '0.up.bias': [4]}

    Raises:
        ConfigError: nothing to replace, an invalid argument, or a sharded model.

    Source: Denton et al. 2014, arXiv:1404.0736; convolutions as in Zhang et al. 2015, arXiv:1505.06798. Default sizes are
        MosaicML Composer's.

    Suggested values:
        layers of 512 features and more: ``min_features=512``, ``latent_features=0.25`` (MosaicML Composer, method card of
            factorize)
        convolutions of 512 channels and more: ``min_channels=512``, ``latent_channels=0.25`` (MosaicML Composer, method card of
            factorize)
    When not to use: accuracy counts: Composer's card reports a loss of over 1 % and under 5 % more throughput for ResNet-50.
        Small layers become slower.
    """
    caller = "factorize"
    check_int(caller, "min_channels", min_channels, minimum=0)
    check_int(caller, "min_features", min_features, minimum=0)
    check_size_or_fraction(latent_channels, caller, "latent_channels")
    check_size_or_fraction(latent_features, caller, "latent_features")
    if not factorize_convs and not factorize_linears:
        raise ConfigError(
            f"{caller}: factorize_convs or factorize_linears must be True, got False for both. Set one of them to True."
        )
    check_plain_model(model, caller)
    modules = set(model.modules())
    factors = {id(factor) for module in modules if isinstance(module, _FactorizedLayer) for factor in module.modules()}
    owners = Counter(id(p) for module in modules for p in module._parameters.values() if p is not None)

    def policy(module: nn.Module, name: str) -> nn.Module | None:
        assert isinstance(module, nn.Linear | nn.Conv2d)
        weight, linear = module.weight, isinstance(module, nn.Linear)
        least = min_features if linear else min_channels
        smaller, rows, columns = min(weight.shape[:2]), len(weight), weight[0].numel()
        rank = resolve_size(latent_features if linear else latent_channels, smaller)
        if smaller < least or id(module) in factors or owners[id(weight)] != 1 or rank * (rows + columns) >= rows * columns:
            return None
        if isinstance(module, nn.Linear):
            return FactorizedLinear(module, rank)
        return FactorizedConv2d(module, rank) if module.groups == 1 else None

    kinds = [nn.Linear] * factorize_linears + [nn.Conv2d] * factorize_convs
    least = f"with {min_channels=} and {min_features=}"
    return apply_policies(model, dict.fromkeys(kinds, policy), caller=f"{caller} {least}").model


def _init_factors_(down: nn.Module, up: nn.Module, layer: nn.Linear | nn.Conv2d, rank: int) -> None:
    """Initialize the factors from ``layer``. Mutates: ``down`` and ``up``."""
    weights = [layer_of_factor.weight for layer_of_factor in (up, down)]
    with torch.no_grad():
        if not layer.weight.is_meta:
            for weight, factor in zip(
                weights, factorize_matrix(rearrange(layer.weight, "out ... -> out (...)"), rank), strict=True
            ):
                assert isinstance(weight, Tensor)
                weight.copy_(factor.reshape(weight.shape))
    for weight in weights:
        assert isinstance(weight, Tensor)
        weight.requires_grad_(layer.weight.requires_grad)
    if layer.bias is not None:
        up.bias = layer.bias


class GatedLinearUnit(nn.Linear):
    """Linear layer with activation, multiplied by a second linear layer of the same shape, ``linear``.

    Formula: ``y = activation(x @ weight.T + bias) * (x @ linear.weight.T + linear.bias)``

    Args:
        in_features: input features of both layers.
        out_features: output features of both layers.
        activation: function of a tensor.
        bias: if True, the activated layer has a bias.
        linear_bias: if True, the second layer has a bias.

    Source: Shazeer 2020, arXiv:2002.05202, equations 4 and 5.

    Example:
        >>> import dtrain as dt
        >>> unit = dt.surgery.GatedLinearUnit(
        ...     1, 1, activation=torch.relu, bias=False, linear_bias=False
        ... ).requires_grad_(False)
        >>> _ = unit.weight.fill_(2.0), unit.linear.weight.fill_(5.0)
        >>> unit(torch.tensor([[3.0], [1.0]])).flatten().tolist()
        [90.0, 10.0]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        activation: Activation,
        bias: bool = True,
        linear_bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.linear = nn.Linear(in_features, out_features, linear_bias, device=device, dtype=dtype)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[*, in_features]`` to ``[*, out_features]``."""
        gated: Tensor = self.activation(super().forward(input)) * self.linear(input)
        return gated


def gated_linear_units(
    model: nn.Module,
    *,
    activation: Activation | ActivationName | None = None,
    bias: bool = False,
    linear_bias: bool = False,
    networks: Mapping[type[nn.Module], tuple[str, str]] | None = None,
) -> nn.Module:
    """Use gated linear units in the feed-forward networks of ``model``; return the model.

    The layer before the activation becomes a ``GatedLinearUnit``, which keeps the name of its weight and adds
    ``linear.weight``. The former activation becomes an identity. A network grows by half. The paper compensates by two thirds
    of the hidden size, which the model must set.

    Formula: ``y = activation(x @ weight.T) * (x @ linear.weight.T)``, in place of ``activation(x @ weight.T)``

    Args:
        model: BERT of transformers, or any model with ``networks``; before ``shard_model``, on meta, too.
        activation: function, or ``sigmoid`` (the paper's GLU), ``relu`` (ReGLU), ``gelu`` (GEGLU), ``silu`` (SwiGLU),
            ``bilinear`` (none); None keeps the activation of each network.
        bias: if True, the activated layer keeps its bias.
        linear_bias: if True, the new layer has a bias.
        networks: network class -> attribute names of the first layer (``nn.Linear``) and its activation:
            ``{MLP: ("fc", "act"), nn.TransformerEncoderLayer: ("linear1", "activation")}``. The default is
            ``{BertIntermediate: ("dense", "intermediate_act_fn")}``.

    Mutates: ``model``. New weights are drawn from torch's global generator, with the standard deviation of the gated weights.

    Example:
        >>> import dtrain as dt
        >>> model = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8)
        >>> networks = {nn.TransformerEncoderLayer: ("linear1", "activation")}
        >>> model = dt.surgery.gated_linear_units(model, networks=networks)
        >>> sorted(name for name, _ in model.named_parameters() if "linear1" in name)
        ['linear1.linear.weight', 'linear1.weight']

    Raises:
        ConfigError: no such network, a missing attribute or an attribute of the wrong type, an unknown activation, or a sharded
            model.

    Source: Shazeer 2020, arXiv:2002.05202, section 2 (no biases, as there).

    Suggested values:
        T5-Base, GELU, hidden size 2048 instead of 3072: ``activation="gelu"``, no biases (Shazeer 2020, section 3)
        BERT: ``activation="gelu"``, ``bias=False``, ``linear_bias=False`` (MosaicML Composer, method card of gated linear
            units)
    When not to use: the model is pretrained: the new weights are random. Each network grows by half unless the hidden size is
        set to two thirds.
    """
    check_plain_model(model, _CALLER)
    shared_activation = _resolve_activation(activation)
    kinds = _resolve_networks(networks)
    matches = [(module, *kinds[type(module)]) for module in model.modules() if type(module) in kinds]
    if not matches:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ConfigError(
            f"{_CALLER}: the {type(model).__name__} must have a network of class {names}, got none. "
            'Pass for example networks={MLP: ("fc", "act")}.'
        )
    units = {id(_get_linear(parent, layer)): _get_activation(parent, act) for parent, layer, act in matches}

    def policy(layer: nn.Module, name: str) -> nn.Module:
        return _make_gated_layer(layer, shared_activation or units[id(layer)], bias, linear_bias)

    policies: dict[ModuleSelector, ReplacementPolicy] = {lambda name, module: id(module) in units: policy}
    report = apply_policies(model, policies, caller=_CALLER)
    for parent, _, act in matches:
        setattr(parent, act, nn.Identity().train(parent.training))
        if isinstance(parent, nn.TransformerEncoderLayer):
            # Evaluation would use a kernel for ReLU and GELU only.
            parent.activation_relu_or_gelu = 0
    return report.model


def _resolve_activation(activation: Any) -> Activation | None:
    if activation is None or (callable(activation) and not isinstance(activation, type)):
        return activation
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ConfigError(
            f"{_CALLER}: activation must be a function or one of {', '.join(_ACTIVATIONS)}, got {activation!r}. "
            "Choose one of them, or pass a function."
        )
    return _ACTIVATIONS[activation]


def _resolve_networks(networks: Any) -> Mapping[type[nn.Module], tuple[str, str]]:
    if networks is None:
        bert = find_imported_class("transformers.models.bert.modeling_bert", "BertIntermediate")
        if bert is None:
            raise ConfigError(
                f"{_CALLER}: the model must have a known network, but this process did not import transformers' BERT. "
                'Pass for example networks={MLP: ("fc", "act")}.'
            )
        return {bert: ("dense", "intermediate_act_fn")}
    if not isinstance(networks, Mapping) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in networks.values()):
        raise ConfigError(
            f'{_CALLER}: networks must map classes to pairs of names, as {{MLP: ("fc", "act")}}, got {networks!r}. '
            "Name the two attributes of each class."
        )
    return networks


def _get_linear(parent: nn.Module, name: str) -> nn.Linear:
    layer = getattr(parent, name, None)
    if type(layer) is not nn.Linear:
        raise ConfigError(
            f"{_CALLER}: {type(parent).__name__}.{name} must be an nn.Linear, got {layer!r}. "
            "Name the first linear layer of the network."
        )
    return layer


def _get_activation(parent: nn.Module, name: str) -> Activation:
    value = getattr(parent, name, None)
    if not callable(value):
        raise ConfigError(
            f"{_CALLER}: {type(parent).__name__}.{name} must be a function or a module, got {value!r}. "
            "Name the attribute of the activation."
        )
    activation: Activation = value
    return activation


def _make_gated_layer(layer: nn.Module, activation: Activation, bias: bool, linear_bias: bool) -> GatedLinearUnit:
    assert isinstance(layer, nn.Linear), "_get_linear checked the class"
    keeps_bias = bias and layer.bias is not None
    weight = layer.weight
    unit = GatedLinearUnit(
        layer.in_features,
        layer.out_features,
        activation=activation,
        bias=keeps_bias,
        linear_bias=linear_bias,
        device=weight.device,
        dtype=weight.dtype,
    )
    unit.weight = weight
    if keeps_bias:
        unit.bias = layer.bias
    if not weight.is_meta:
        nn.init.normal_(unit.linear.weight, std=weight.detach().std(correction=0).item())
        if unit.linear.bias is not None:
            nn.init.zeros_(unit.linear.bias)
    return unit
