"""Classes mixed into modules: one for each pair, copied and pickled, combined."""

import copy
import pickle

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.errors import ConfigError
from dtrain.surgery.attention.alibi import alibi
from dtrain.surgery.class_swap import add_mixin
from dtrain.surgery.layers.blur_pool import Blur, blur_pool
from dtrain.surgery.layers.channels_last import ChannelsLast, channels_last
from dtrain.surgery.layers.squeeze_excite import squeeze_excite
from dtrain.surgery.layers.weight_standardization import WeightStandardized, standardize_weight, weight_standardization
from dtrain.surgery.normalization.low_precision_norm import low_precision_layer_norm


def made() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, stride=2, padding=1))
    model = squeeze_excite(weight_standardization(blur_pool(model, min_channels=4)), min_channels=4, latent_channels=2)
    return channels_last(model).eval()


def test_add_mixin_reuses_one_class_per_module_class():
    one, two = nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)
    assert add_mixin(one, ChannelsLast)
    assert add_mixin(two, ChannelsLast)
    assert type(one) is type(two)
    assert type(one).__name__ == "ChannelsLastConv2d"
    assert isinstance(one, nn.Conv2d)


def test_add_mixin_keeps_a_mixed_module():
    module = nn.Conv2d(1, 1, 1)
    add_mixin(module, ChannelsLast)
    kind = type(module)
    assert not add_mixin(module, ChannelsLast)
    assert type(module) is kind


def test_combined_edits_keep_parameter_names():
    model = made()
    assert type(model[0]).__name__ == "ChannelsLastSqueezeExciteWeightStandardizedBlurConv2d"
    assert isinstance(model[0], Blur)
    assert isinstance(model[0], WeightStandardized)
    names = ["0.weight", "0.bias", "0.squeeze_excite.reduce.weight", "0.squeeze_excite.expand.weight"]
    assert list(model.state_dict()) == names
    x = torch.randn(2, 4, 8, 8)
    padded = nn.functional.pad(x, (1, 1, 1, 1), mode="replicate")
    blurred = nn.functional.avg_pool2d(nn.functional.avg_pool2d(padded, 2, 1), 2, 1)
    out = nn.functional.conv2d(blurred, standardize_weight(model[0].weight), model[0].bias, stride=2, padding=1)
    torch.testing.assert_close(model(x), model[0].squeeze_excite(out))


def test_copies_and_pickles_compute_the_same():
    model, x = made(), torch.randn(2, 4, 8, 8)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert type(again[0]) is type(model[0])
        assert torch.equal(again(x), model(x))
    assert copy.deepcopy(model)[0].weight is not model[0].weight


def test_repr_shows_the_settings():
    text = repr(blur_pool(nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 1, 3, stride=2))))
    assert (
        "BlurMaxPool2d(kernel_size=2, stride=(1, 1), padding=0, dilation=1, ceil_mode=False, blur=3 after, stride=(2, 2))"
        in text
    )
    assert "blur=3 first" in text


class Attention(nn.Module):
    heads, is_causal = 2, True

    def forward(self, x, attention_mask=None):
        return attention_mask


def test_attention_with_alibi_biases_can_be_pickled():
    model, x = alibi(nn.Sequential(Attention()), attentions={Attention: "heads"}), torch.ones(1, 3, 8)
    assert isinstance(model[0], Attention)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


class Counted(nn.Conv2d):
    """Says for itself what is pickled."""

    def __getstate__(self):
        return {**self.__dict__, "pickled": True}


def test_pickling_uses_getstate_of_the_module():
    again = pickle.loads(pickle.dumps(channels_last(Counted(1, 1, 1))))
    assert isinstance(again, ChannelsLast)
    assert again.pickled


def test_parametrized_modules_refuse_pickling():
    conv = nn.utils.parametrizations.weight_norm(channels_last(nn.Conv2d(1, 1, 1)))
    with pytest.raises(RuntimeError, match="Serialization of parametrized modules"):
        pickle.dumps(conv)


def test_compiled_module_uses_the_swapped_class():
    model = nn.Sequential(nn.LayerNorm(4))
    model[0].compile(backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.ones(2, 4)).dtype == torch.float32
        low_precision_layer_norm(model)
        assert model(torch.ones(2, 4)).dtype == torch.bfloat16


@pytest.mark.parametrize("edit", [low_precision_layer_norm, lambda model: blur_pool(model, min_channels=1)])
def test_swap_class_refuses_a_module_with_its_own_forward(edit):
    model = nn.Sequential(nn.LayerNorm(4), nn.Conv2d(4, 4, 3, stride=2))
    before = [type(module) for module in model]
    dt.memory.checkpoint_activations(model, blocks=(nn.LayerNorm, nn.Conv2d))
    with pytest.raises(ConfigError, match=r"surgery: a (LayerNorm|Conv2d) has its own forward, which would hide"):
        edit(model)
    assert [type(module) for module in model] == before
