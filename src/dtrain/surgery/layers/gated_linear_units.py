"""Feed-forward networks whose hidden units are gated: a product of two linear maps, one of them activated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from dtrain.errors import ConfigError
from dtrain.surgery.replace import ModuleSelector, ReplacementPolicy, check_plain_model, find_imported_class, replace_modules

Activation: TypeAlias = Callable[[Tensor], Tensor]
ActivationName: TypeAlias = Literal["sigmoid", "relu", "gelu", "silu", "bilinear"]

_ACTIVATIONS: Mapping[str, Activation] = {
    "sigmoid": torch.sigmoid,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "bilinear": nn.Identity(),
}


class GatedLinearUnit(nn.Linear):
    """A linear layer and its activation, multiplied by a second linear layer of the same shape, ``linear``.

    Formula: ``y = activation(x @ weight.T + bias) * (x @ linear.weight.T + linear.bias)``

    Args:
        in_features: of both.
        out_features: of both.
        activation: a function of a tensor.
        bias: whether the activated layer has one.
        linear_bias: whether the other one has.

    Source: Shazeer 2020, arXiv:2002.05202, equations 4 and 5.

    Example:
        >>> unit = GatedLinearUnit(1, 1, activation=torch.relu, bias=False, linear_bias=False).requires_grad_(False)
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
        """``[*, in_features]`` -> ``[*, out_features]``."""
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
    """The model with gated linear units in its feed-forward networks.

    The layer before the activation becomes a ``GatedLinearUnit``, which keeps its weight under its name and adds
    ``linear.weight``; what stood for the activation passes on what it gets. A network is half as large again: the paper makes
    up for that by two thirds of the hidden size, which is the model's to choose.

    Formula: ``y = activation(x @ weight.T) * (x @ linear.weight.T)``, in place of ``activation(x @ weight.T)``

    Args:
        model: a BERT of transformers, or anything with ``networks``; before ``shard_model``, on meta, too.
        activation: a function, or ``sigmoid`` (the paper's GLU), ``relu`` (ReGLU), ``gelu`` (GEGLU), ``silu`` (SwiGLU),
            ``bilinear`` (none). None keeps that of each network.
        bias: whether the activated layer keeps its bias.
        linear_bias: whether the new layer has one.
        networks: by class, the names of the attributes that are the first layer (``nn.Linear``) and its activation:
            ``{MLP: ("fc", "act"), nn.TransformerEncoderLayer: ("linear1", "activation")}``. By default
            ``{BertIntermediate: ("dense", "intermediate_act_fn")}``.

    Mutates: ``model``. The new weights are drawn from torch's global generator, with the spread of those that they gate.

    Raises:
        ConfigError: no such network, an attribute that is not there or no linear layer or function, an unknown activation, a
            model that is sharded already.

    Source: Shazeer 2020, arXiv:2002.05202, section 2 (no biases, as there).

    Example:
        >>> model = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8)
        >>> layers = {nn.TransformerEncoderLayer: ("linear1", "activation")}
        >>> sorted(name for name, _ in gated_linear_units(model, networks=layers).named_parameters() if "linear1" in name)
        ['linear1.linear.weight', 'linear1.weight']
    """
    check_plain_model(model, _WHERE)
    chosen = _resolve_activation(activation)
    kinds = _resolve_networks(networks)
    found = [(module, *kinds[type(module)]) for module in model.modules() if type(module) in kinds]
    if not found:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ConfigError(
            f"{_WHERE}: no network to gate in this {type(model).__name__}: no {names} in it; for another model say which, "
            'networks={MLP: ("fc", "act")}'
        )
    units = {id(_get_linear(parent, layer)): _get_activation(parent, act) for parent, layer, act in found}

    def gated(layer: nn.Module, name: str) -> nn.Module:
        return _make_gated_layer(layer, chosen or units[id(layer)], bias, linear_bias)

    policies: dict[ModuleSelector, ReplacementPolicy] = {lambda name, module: id(module) in units: gated}
    done = replace_modules(model, policies, caller=_WHERE)
    for parent, _, act in found:
        setattr(parent, act, nn.Identity().train(parent.training))
        if isinstance(parent, nn.TransformerEncoderLayer):
            parent.activation_relu_or_gelu = 0  # or evaluation would take a kernel that knows those two only
    return done.model


_WHERE = "gated_linear_units"


def _resolve_activation(given: Any) -> Activation | None:
    if given is None or (callable(given) and not isinstance(given, type)):
        return given
    if not isinstance(given, str) or given not in _ACTIVATIONS:
        raise ConfigError(f"{_WHERE}: activation is a function or one of {', '.join(_ACTIVATIONS)}, got {given!r}")
    return _ACTIVATIONS[given]


def _resolve_networks(given: Any) -> Mapping[type[nn.Module], tuple[str, str]]:
    if given is None:
        bert = find_imported_class("transformers.models.bert.modeling_bert", "BertIntermediate")
        if bert is None:
            raise ConfigError(
                f"{_WHERE}: no network to gate: transformers' BERT is not in this process; for another model say which, "
                'networks={MLP: ("fc", "act")}'
            )
        return {bert: ("dense", "intermediate_act_fn")}
    if not isinstance(given, Mapping) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in given.values()):
        raise ConfigError(f'{_WHERE}: networks is by class a pair of names, {{MLP: ("fc", "act")}}, got {given!r}')
    return given


def _get_linear(parent: nn.Module, name: str) -> nn.Linear:
    layer = getattr(parent, name, None)
    if type(layer) is not nn.Linear:
        raise ConfigError(f"{_WHERE}: {type(parent).__name__}.{name} must be an nn.Linear, it is {layer!r}")
    return layer


def _get_activation(parent: nn.Module, name: str) -> Activation:
    found = getattr(parent, name, None)
    if not callable(found):
        raise ConfigError(f"{_WHERE}: {type(parent).__name__}.{name} must be a function or a module, it is {found!r}")
    activation: Activation = found
    return activation


def _make_gated_layer(layer: nn.Module, activation: Activation, bias: bool, linear_bias: bool) -> GatedLinearUnit:
    assert isinstance(layer, nn.Linear), "looked at above"
    keeps = bias and layer.bias is not None
    weight = layer.weight
    made = GatedLinearUnit(
        layer.in_features,
        layer.out_features,
        activation=activation,
        bias=keeps,
        linear_bias=linear_bias,
        device=weight.device,
        dtype=weight.dtype,
    )
    made.weight = weight
    if keeps:
        made.bias = layer.bias
    if not weight.is_meta:
        nn.init.normal_(made.linear.weight, std=weight.detach().std(correction=0).item())
        if made.linear.bias is not None:
            nn.init.zeros_(made.linear.bias)
    return made
