"""Low-rank factorisation: the chosen layers, the error, and the kept attributes."""

import pytest
import torch
from torch import nn

from dtrain.errors import ConfigError
from dtrain.shard.materialize import materialize
from dtrain.surgery.layers import factorize, factorize_matrix
from dtrain.surgery.replace import resolve_size


def test_error_equals_the_norm_of_dropped_singular_values():
    torch.manual_seed(0)
    matrix = torch.randn(6, 9, dtype=torch.float64)
    singular = torch.linalg.svdvals(matrix)
    for rank in range(1, 6):
        left, right = factorize_matrix(matrix, rank)
        error = (matrix - left @ right).square().sum()
        assert error.item() == pytest.approx(singular[rank:].square().sum().item(), rel=1e-10)
        assert torch.allclose(left.norm(dim=0), right.norm(dim=1)), "both factors have the same scale"


def test_low_precision_is_factorised_in_float32():
    matrix = torch.diag(torch.tensor([4.0, 1.0])).bfloat16()
    left, right = factorize_matrix(matrix, 1)
    assert left.dtype == torch.bfloat16
    assert (left @ right).tolist() == [[4.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(8, 12, 3, stride=2, padding=1, dilation=2),
        nn.Conv2d(8, 12, (3, 1), padding="same", padding_mode="circular", bias=False),
    ],
    ids=["strided", "circular"],
)
def test_a_convolution_of_low_rank_is_computed_exactly(conv):
    torch.manual_seed(0)
    with torch.no_grad():
        low = torch.randn(12, 2) @ torch.randn(2, conv.weight[0].numel())
        conv.weight.copy_(low.reshape(conv.weight.shape))
    x = torch.randn(2, 8, 9, 9)
    expected = conv(x)
    net = factorize(nn.Sequential(conv), min_channels=8, latent_channels=2)
    torch.testing.assert_close(net(x), expected, rtol=1e-4, atol=1e-4)
    assert net[0].up.bias is conv.bias


@pytest.mark.parametrize(
    "left",
    [
        nn.Linear(7, 9),
        nn.Conv2d(7, 9, 3),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.MultiheadAttention(8, 2),  # its out_proj is never called, only its weight is read
    ],
    ids=["few features", "few channels", "groups", "attention"],
)
def test_unsupported_modules_are_unchanged(left):
    with pytest.raises(ConfigError, match="factorize with min_channels=8 and min_features=8: nothing to replace"):
        factorize(nn.Sequential(left), min_features=8, min_channels=8)


def test_factorize_skips_layers_without_savings():
    with pytest.raises(ConfigError, match="nothing to replace"):
        factorize(nn.Sequential(nn.Linear(8, 8)), min_features=8, latent_features=4)  # 4 * 16 = 8 * 8
    assert factorize(nn.Sequential(nn.Linear(8, 8)), min_features=8, latent_features=3)[0].down.out_features == 3


def test_tied_weight_is_not_factorized():
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 8), "head": nn.Linear(8, 8, bias=False), "other": nn.Linear(8, 8)})
    model["head"].weight = model["embedding"].weight
    factorize(model, min_features=8)
    assert type(model["head"]) is nn.Linear
    assert type(model["other"]).__name__ == "FactorizedLinear"


def test_shared_layer_stays_shared():
    layer = nn.Linear(8, 8)
    model = factorize(nn.Sequential(layer, layer), min_features=8)
    assert model[0] is model[1]


def test_frozen_weights_stay_frozen_and_global_generator_is_unchanged():
    model = nn.Sequential(nn.Linear(8, 8)).requires_grad_(False)
    torch.manual_seed(1)
    factorize(model, min_features=8)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))
    assert not any(p.requires_grad for p in model.parameters())


def test_factorized_weight_is_the_full_product():
    x = torch.randn(2, 3, 512)
    layer = nn.TransformerEncoderLayer(512, 4, dim_feedforward=512, batch_first=True).eval()
    model = factorize(layer)  # torch's layer reads these weights where it does not train
    assert type(model.linear1).__name__ == "FactorizedLinear"
    with torch.no_grad():
        fast = model(x)
    torch.testing.assert_close(fast, model(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.linear1(x), nn.functional.linear(x, model.linear1.weight, model.linear1.bias))
    conv = factorize(nn.Sequential(nn.Conv2d(8, 8, 3)), min_channels=8)[0]
    picture = torch.randn(1, 8, 5, 5)
    torch.testing.assert_close(conv(picture), nn.functional.conv2d(picture, conv.weight, conv.bias))


def test_factorize_can_skip_convolutions_or_linears():
    model = nn.Sequential(nn.Linear(8, 8), nn.Conv2d(8, 8, 3))
    factorize(model, min_features=8, min_channels=8, factorize_linears=False)
    assert [type(module).__name__ for module in model] == ["Linear", "FactorizedConv2d"]


def test_factors_of_a_meta_model_are_initialized_on_materialization():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8))
    model = materialize(factorize(model, min_features=8), seed=0)
    assert model[0].down.weight.std() > 0
    assert model(torch.ones(1, 8, device=model[0].down.weight.device)).isfinite().all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_channels": 1.5}, "min_channels must be an integer of at least 0, got 1.5"),
        ({"min_features": -1}, "min_features must be an integer of at least 0"),
        ({"latent_channels": 1.0}, "latent_channels must be an integer >= 1 or a fraction .* got 1.0"),
        ({"latent_features": 0}, "latent_features must be an integer >= 1"),
        ({"factorize_convs": False, "factorize_linears": False}, "must be True, got False for both"),
    ],
)
def test_invalid_arguments_are_refused(options, said):
    with pytest.raises(ConfigError, match=f"factorize: .*{said}"):
        factorize(nn.Sequential(nn.Linear(512, 512)), **options)


def test_non_module_objects_are_refused():
    with pytest.raises(ConfigError, match=r"factorize: model must be a torch.nn.Module, got str"):
        factorize("model")


@pytest.mark.parametrize(("value", "of", "size"), [(64, 8, 64), (0.25, 8, 2), (0.25, 7, 1), (0.01, 7, 1)])
def test_sizes_are_numbers_or_fractions(value, of, size):
    assert resolve_size(value, of) == size


def test_second_factorization_is_refused_with_the_size_limits():
    model = factorize(nn.Sequential(nn.Linear(16, 16)), min_features=4)
    with pytest.raises(
        ConfigError, match=r"factorize with min_channels=512 and min_features=4: nothing to replace: none of the 4 mod"
    ):
        factorize(model, min_features=4)
    assert list(model.state_dict()) == ["0.down.weight", "0.up.weight", "0.up.bias"]
