"""Edits of convolutions and pools: blurs, gates, standardized filters, and the memory format."""

import pytest
import torch
from torch import nn

import dtrain as dt
from dtrain.dist.dtensor import to_local
from dtrain.errors import ConfigError
from dtrain.shard.materialize import materialize
from dtrain.surgery.convolutions import (
    SqueezeExcite2d,
    blur_2d,
    blur_kernel,
    blur_pool,
    channels_last,
    squeeze_excite,
    standardize_weight,
    weight_standardization,
)

LAST = torch.channels_last


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1))


def formats(model: nn.Module, x: torch.Tensor) -> list[bool]:
    seen = []
    for module in model:
        module.register_forward_hook(lambda module, given, out: seen.append(out.is_contiguous(memory_format=LAST)))
    model(x)
    return seen


def test_activations_are_channels_last_and_parameters_are_not():
    model = channels_last(net())
    assert formats(net(), torch.randn(2, 3, 8, 8)) == [False] * 5
    assert formats(model, torch.randn(2, 3, 8, 8)) == [True] * 5
    assert all(param.is_contiguous() for param in model.parameters())


def test_values_match_the_plain_model_also_for_one_image():
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(channels_last(net())(x), net()(x))
    picture = channels_last(nn.Conv2d(3, 4, 3))
    assert picture(x[0]).shape == (4, 6, 6)


def sharded() -> list[bool]:
    # FSDP2 stores weights contiguous, in any format they had.
    model = dt.shard_model(net().to(memory_format=LAST), dt.build_mesh(), blocks=nn.Conv2d)
    assert all(to_local(param).is_contiguous() for param in model.parameters())
    model = dt.shard_model(channels_last(net()), dt.build_mesh(), blocks=nn.Conv2d)
    return formats(model, torch.randn(2, 3, 8, 8))


def test_sharded_model_computes_in_channels_last(ranks):
    assert ranks(2).run(sharded) == [[True] * 5] * 2


def convolutions() -> nn.Module:
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
    ("options", "expected"),
    [
        ({"min_channels": 8}, ["1", "2"]),
        ({"min_channels": 8, "select": "2"}, ["2"]),
        ({"min_channels": 0, "select": ["0", "1"]}, ["0", "1"]),
    ],
)
def test_convolutions_are_chosen_by_channels_and_names(options, expected):
    assert changed(squeeze_excite(convolutions(), **options)) == expected


@pytest.mark.parametrize(("latent", "rows"), [(1 / 16, 1), (0.5, 8), (5, 5)])
def test_latent_channels_accepts_a_number_or_a_fraction(latent, rows):
    assert squeeze_excite(convolutions(), min_channels=8, latent_channels=latent)[2].squeeze_excite.reduce.out_features == rows


def test_new_weights_take_device_dtype_and_mode_of_the_model():
    model = squeeze_excite(convolutions().to("meta", torch.bfloat16).eval(), min_channels=8)
    gate = model[1].squeeze_excite
    assert (gate.reduce.weight.is_meta, gate.expand.weight.dtype, gate.training) == (True, torch.bfloat16, False)


def test_filters_have_mean_zero_and_variance_one():
    torch.manual_seed(0)
    weight = standardize_weight(5 + 3 * torch.randn(4, 3, 3, 3, dtype=torch.float64), eps=0.0)
    torch.testing.assert_close(weight.mean((1, 2, 3)), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(weight.var((1, 2, 3), correction=0), torch.ones(4, dtype=torch.float64))


def test_low_precision_weights_keep_dtype_with_float32_statistics():
    weight = torch.tensor([[300.0, 301.0, 302.0, 303.0]]).half()
    assert standardize_weight(weight).dtype == torch.float16
    expected = torch.tensor([[-3.0, -1.0, 1.0, 3.0]]) / 5**0.5
    torch.testing.assert_close(standardize_weight(weight).float(), expected, rtol=1e-3, atol=1e-3)


def test_gradient_flows_through_the_statistics():
    weight = torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(standardize_weight, (weight,))


@pytest.mark.parametrize("conv", [nn.Conv1d(2, 3, 2), nn.Conv2d(2, 3, 2), nn.Conv3d(2, 3, 2)], ids=["1d", "2d", "3d"])
def test_output_is_invariant_to_filter_scale_and_shift(conv):
    torch.manual_seed(0)  # filters whose variance is near 0 are not invariant: eps is added to it
    torch.nn.init.normal_(conv.weight)
    net = weight_standardization(conv).eval()
    x = torch.randn(1, 2, *[4] * (conv.weight.ndim - 2))
    before = net(x)
    with torch.no_grad():
        conv.weight.mul_(3.0).add_(2.0)
    torch.testing.assert_close(net(x), before, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("ignored", "expected"), [(0, ["0", "2"]), (1, ["0", "2"]), (2, ["0"])])
def test_last_layers_may_be_skipped(ignored, expected):
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1, groups=2))
    model = weight_standardization(model, n_last_layers_to_ignore=ignored)
    assert [name for name, module in model.named_modules() if type(module).__name__ == "WeightStandardizedConv2d"] == expected
    assert list(model.state_dict()) == [f"{layer}.{key}" for layer in (0, 2, 3) for key in ("weight", "bias")]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7])
def test_kernel_sums_to_one_and_keeps_constant_images(size):
    assert blur_kernel(size).sum() == 1
    for edge in ("replicate", "reflect"):
        out = blur_2d(torch.full((1, 2, 9, 9), 3.0), kernel=blur_kernel(size), edge=edge)
        assert torch.equal(out, torch.full((1, 2, 9, 9), 3.0))


def test_zero_padding_reduces_edge_values():
    out = blur_2d(torch.ones(1, 1, 3, 3), edge="zeros")
    assert (16 * out[0, 0]).tolist() == [[9, 12, 9], [12, 16, 12], [9, 12, 9]]


@pytest.mark.parametrize("side", [7, 8, 9])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.MaxPool2d(2),
        lambda: nn.MaxPool2d(3, stride=2, padding=1),
        lambda: nn.MaxPool2d(3, stride=(3, 1), dilation=2),
        lambda: nn.Conv2d(16, 4, 3, stride=2, padding=1),
        lambda: nn.Conv2d(16, 4, (3, 1), stride=(2, 3), padding=(1, 0), groups=4),
        lambda: nn.Conv2d(16, 4, 1, stride=2, padding_mode="circular"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_output_shapes_are_unchanged(make, side, size, first):
    x = torch.randn(2, 16, side, side + 1)
    assert blur_pool(nn.Sequential(make()), size=size, blur_first=first)(x).shape == make()(x).shape


@pytest.mark.parametrize(
    "left",
    [
        nn.MaxPool2d(3, stride=1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, return_indices=True),
        nn.Conv2d(16, 4, 3),
        nn.Conv2d(15, 4, 3, stride=2),
        nn.AvgPool2d(2),
        nn.ConvTranspose2d(16, 4, 3, stride=2),
    ],
    ids=["pool at every place", "ceil mode", "indices", "conv at every place", "few channels", "average", "transposed"],
)
def test_unsupported_modules_are_unchanged(left):
    with pytest.raises(ConfigError, match="blur_pool with min_channels=16: nothing to replace"):
        blur_pool(nn.Sequential(left))


def test_blur_pool_can_skip_convolutions_or_pools():
    model = blur_pool(nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 4, 3, stride=2)), replace_convs=False)
    assert [type(module).__name__ for module in model] == ["BlurMaxPool2d", "Conv2d"]


def test_second_edit_is_refused():
    with pytest.raises(ConfigError, match="nothing to replace"):
        blur_pool(blur_pool(nn.Sequential(nn.MaxPool2d(2))))


def test_single_image_and_low_precision_inputs_are_accepted():
    model = blur_pool(nn.Sequential(nn.Conv2d(16, 4, 3, stride=2), nn.MaxPool2d(2)))
    assert model(torch.randn(16, 9, 9)).shape == (4, 2, 2)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        assert model(torch.randn(1, 16, 9, 9)).dtype == torch.bfloat16
    assert model.bfloat16()(torch.randn(1, 16, 9, 9).bfloat16()).dtype == torch.bfloat16


def test_kernel_of_a_meta_model_is_created_on_materialization():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(16, 4, 3, stride=2), nn.MaxPool2d(2))
    model = materialize(blur_pool(model, size=5), seed=0)
    assert torch.equal(model[0].blur_kernel, blur_kernel(5))
    assert torch.equal(model[1].blur_kernel, blur_kernel(5))


@pytest.mark.parametrize(
    ("edit", "options", "said"),
    [
        (squeeze_excite, {"latent_channels": 0}, "latent_channels must be an integer >= 1 or a fraction"),
        (squeeze_excite, {"min_channels": 0.5}, "min_channels must be an integer of at least 0"),
        (
            squeeze_excite,
            {"min_channels": 99},
            r"with min_channels=99: nothing to replace: none of the 4 modules of the Sequential \(3 Conv2d",
        ),
        (squeeze_excite, {"min_channels": 0, "select": "stem"}, "select has'stem', but no convolution matches"),
        (squeeze_excite, {"min_channels": 0, "select": ["1", 7]}, "patterns of names must be text, got 7"),
        (
            weight_standardization,
            {"n_last_layers_to_ignore": -1},
            "n_last_layers_to_ignore must be an integer of at least 0, got -1",
        ),
        (weight_standardization, {"n_last_layers_to_ignore": 1}, "nothing to replace"),
        (weight_standardization, {"eps": -1.0}, "eps must be a finite number at least 0 and below 1, got -1.0"),
        (weight_standardization, {"eps": None}, "eps must be a finite number at least 0 and below 1, got None"),
        (blur_pool, {"size": 1}, "size must be an integer from 2 to 15, got 1"),
        (blur_pool, {"size": 3.0}, "size must be an integer"),
        (blur_pool, {"edge": "mirror"}, "edge must be 'replicate', 'reflect' or 'zeros', got 'mirror'"),
        (blur_pool, {"replace_convs": False, "replace_maxpools": False}, "must be True, got False for both"),
        (blur_pool, {"min_channels": -1}, "min_channels must be an integer of at least 0, got -1"),
        (channels_last, {}, "nothing to replace"),
    ],
)
def test_invalid_arguments_are_refused(edit, options, said):
    models = {
        squeeze_excite: convolutions(),
        weight_standardization: nn.Conv2d(2, 2, 3),
        blur_pool: nn.MaxPool2d(2),
        channels_last: nn.Linear(2, 2),
    }
    with pytest.raises(ConfigError, match=f"{edit.__name__}.*{said}"):
        edit(models[edit] if edit is squeeze_excite else nn.Sequential(models[edit]), **options)


def test_latent_channels_below_one_is_refused():
    with pytest.raises(ConfigError, match="SqueezeExcite2d: latent_channels must be an integer >= 1"):
        SqueezeExcite2d(4, 0)
