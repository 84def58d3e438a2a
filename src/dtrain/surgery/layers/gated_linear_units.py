"""Replace the first layer of feed-forward networks by a gated linear unit: ``gated_linear_units``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from dtrain.errors import ConfigError
from dtrain.surgery.replace import ModuleSelector, ReplacementPolicy, apply_policies, check_plain_model, find_imported_class

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


_CALLER = "gated_linear_units"


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
