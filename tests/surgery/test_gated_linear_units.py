"""Gated linear units in models of one's own; BERT is tested beside."""

import pytest
import torch
from torch import nn

from dtrain.errors import ConfigError
from dtrain.surgery.layers import GatedLinearUnit, gated_linear_units


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


NETWORKS = {MLP: ("up", "act")}


def test_gated_linear_unit_matches_the_papers_formula():
    model = gated_linear_units(nn.Sequential(MLP(), MLP()), activation="silu", networks=NETWORKS)
    layer, x = model[1], torch.randn(3, 4)
    hidden = nn.functional.silu(x @ layer.up.weight.T) * (x @ layer.up.linear.weight.T)
    torch.testing.assert_close(layer(x), layer.down(hidden))
    assert [type(block.up) for block in model] == [GatedLinearUnit, GatedLinearUnit]


def test_activation_of_the_feedforward_network_is_kept():
    layer = gated_linear_units(MLP(), networks=NETWORKS, bias=True)
    assert isinstance(layer.up.activation, nn.GELU)
    assert isinstance(layer.act, nn.Identity)


@pytest.mark.parametrize(("bias", "linear_bias"), [(False, False), (True, False), (False, True), (True, True)])
def test_gated_linear_units_set_the_requested_biases(bias, linear_bias):
    before = MLP()
    weight, kept = before.up.weight, before.up.bias
    layer = gated_linear_units(before, networks=NETWORKS, bias=bias, linear_bias=linear_bias).up
    assert layer.weight is weight
    assert layer.bias is (kept if bias else None)
    assert (layer.linear.bias is not None) is linear_bias
    assert not linear_bias or not layer.linear.bias.any()


def test_new_modules_take_mode_and_dtype_of_the_model():
    layer = gated_linear_units(MLP().double().eval(), networks=NETWORKS).up
    assert {param.dtype for param in layer.parameters()} == {torch.float64}
    assert not any(module.training for module in layer.modules())


def test_meta_model_stays_on_meta():
    with torch.device("meta"):
        model = MLP()
    assert all(param.is_meta for param in gated_linear_units(model, networks=NETWORKS).parameters())


def test_torch_encoder_layer_is_gated_in_evaluation():
    """It has a kernel of its own for evaluation, which knows no gates."""
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.0, batch_first=True)
    gated_linear_units(layer, networks={nn.TransformerEncoderLayer: ("linear1", "activation")})
    x = torch.randn(2, 3, 4)
    trained = layer(x).detach()
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), trained)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "swish", "networks": NETWORKS}, "activation must be a function or one of sigmoid, .* got 'swish'"),
        ({"activation": nn.GELU, "networks": NETWORKS}, "activation must be a function or one of"),
        ({"networks": {MLP: "up"}}, "networks must map classes to pairs of names, .* got "),
        ({"networks": {MLP: ("act", "act")}}, r"MLP\.act must be an nn.Linear, got GELU"),
        ({"networks": {MLP: ("up", "gelu")}}, r"MLP\.gelu must be a function or a module, got None"),
        ({"networks": {nn.Conv2d: ("up", "act")}}, "the MLP must have a network of class Conv2d, got none"),
    ],
)
def test_invalid_arguments_are_refused_and_change_nothing(options, message):
    model = MLP()
    before = list(model.modules())
    with pytest.raises(ConfigError, match=message):
        gated_linear_units(model, **options)
    assert list(model.modules()) == before


def test_networks_must_be_given_without_transformers(monkeypatch):
    monkeypatch.setattr("dtrain.surgery.layers.find_imported_class", lambda module, name: None)
    with pytest.raises(
        ConfigError, match="the model must have a known network, but this process did not import transformers' BERT"
    ):
        gated_linear_units(MLP())
