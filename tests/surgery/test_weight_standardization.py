"""Weight standardisation: filters, which convolutions, gradients."""

import pytest
import torch
from torch import nn

from dtrain.errors import ConfigError
from dtrain.surgery.convolutions import standardize_weight, weight_standardization


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


@pytest.mark.parametrize(("ignored", "found"), [(0, ["0", "2"]), (1, ["0", "2"]), (2, ["0"])])
def test_last_layers_may_be_skipped(ignored, found):
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1, groups=2))
    model = weight_standardization(model, n_last_layers_to_ignore=ignored)
    assert [name for name, module in model.named_modules() if type(module).__name__ == "WeightStandardizedConv2d"] == found
    assert list(model.state_dict()) == [f"{layer}.{key}" for layer in (0, 2, 3) for key in ("weight", "bias")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"n_last_layers_to_ignore": -1}, "n_last_layers_to_ignore must be an integer of at least 0, got -1"),
        ({"n_last_layers_to_ignore": 1}, "nothing to replace"),
        ({"eps": -1.0}, "eps must be a finite number at least 0 and below 1, got -1.0"),
        ({"eps": None}, "eps must be a finite number at least 0 and below 1, got None"),
    ],
)
def test_invalid_arguments_are_refused(options, said):
    with pytest.raises(ConfigError, match=f"weight_standardization: .*{said}"):
        weight_standardization(nn.Sequential(nn.Conv2d(2, 2, 3)), **options)
