"""Squeeze-and-excitation: which convolutions, and the gate."""

import pytest
import torch
from torch import nn

from dtrain.errors import ConfigError
from dtrain.surgery.convolutions import SqueezeExcite2d, squeeze_excite


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 16, 1))


def changed(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "SqueezeExciteConv2d"]


def test_each_channel_has_one_gate_between_zero_and_one():
    torch.manual_seed(0)
    x = torch.randn(2, 32, 5, 5)
    gates = SqueezeExcite2d(32)(x) / x
    assert ((gates > 0) & (gates < 1)).all()
    torch.testing.assert_close(gates, gates[:, :, :1, :1].expand_as(gates))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"min_channels": 8}, ["1", "2"]),
        ({"min_channels": 8, "select": "2"}, ["2"]),
        ({"min_channels": 0, "select": ["0", "1"]}, ["0", "1"]),
    ],
)
def test_convolutions_are_chosen_by_channels_and_names(options, found):
    assert changed(squeeze_excite(net(), **options)) == found


@pytest.mark.parametrize(("latent", "rows"), [(1 / 16, 1), (0.5, 8), (5, 5)])
def test_latent_channels_accepts_a_number_or_a_fraction(latent, rows):
    assert squeeze_excite(net(), min_channels=8, latent_channels=latent)[2].squeeze_excite.reduce.out_features == rows


def test_new_weights_take_device_dtype_and_mode_of_the_model():
    model = squeeze_excite(net().to("meta", torch.bfloat16).eval(), min_channels=8)
    gate = model[1].squeeze_excite
    assert (gate.reduce.weight.is_meta, gate.expand.weight.dtype, gate.training) == (True, torch.bfloat16, False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"latent_channels": 0}, "latent_channels must be an integer >= 1 or a fraction"),
        ({"min_channels": 0.5}, "min_channels must be an integer of at least 0"),
        (
            {"min_channels": 99},
            r"with min_channels=99: nothing to replace: none of the 4 modules of the Sequential \(3 Conv2d",
        ),
        ({"min_channels": 0, "select": "stem"}, "select has'stem', but no convolution matches"),
        ({"min_channels": 0, "select": ["1", 7]}, "patterns of names must be text, got 7"),
    ],
)
def test_invalid_arguments_are_refused(options, said):
    with pytest.raises(ConfigError, match=f"squeeze_excite.*{said}"):
        squeeze_excite(net(), **options)


def test_latent_channels_below_one_is_refused():
    with pytest.raises(ConfigError, match="SqueezeExcite2d: latent_channels must be an integer >= 1"):
        SqueezeExcite2d(4, 0)
