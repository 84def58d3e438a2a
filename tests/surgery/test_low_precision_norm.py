"""Norms in the dtype of autocast, and norms that are written out."""

import copy

import pytest
import torch
from torch import nn

from dtrain.errors import ConfigError
from dtrain.surgery.normalization import low_precision_group_norm, low_precision_layer_norm

CASES = {
    "layer norm": (low_precision_layer_norm, lambda: nn.LayerNorm(8)),
    "layer norm without weights": (low_precision_layer_norm, lambda: nn.LayerNorm(8, elementwise_affine=False)),
    "RMS norm": (low_precision_layer_norm, lambda: nn.RMSNorm(8, eps=1e-6)),
    "group norm": (low_precision_group_norm, lambda: nn.GroupNorm(2, 4)),
}
each = pytest.mark.parametrize("name", CASES)


def edited(name):
    """A norm whose weights are no ones, and its low-precision twin."""
    edit, make = CASES[name]
    norm = make()
    for param in norm.parameters():
        nn.init.normal_(param)
    return norm, edit(nn.Sequential(copy.deepcopy(norm)))[0]


@each
def test_norm_computes_in_the_autocast_dtype(name):
    norm, low = edited(name)
    x = torch.randn(3, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = low(x)
    assert found.dtype == torch.bfloat16
    assert found.equal(copy.deepcopy(norm).bfloat16()(x.bfloat16()))
    torch.testing.assert_close(found.float(), norm(x), rtol=0.02, atol=0.02)  # eight bits of mantissa, three roundings


@each
def test_norm_outside_autocast_equals_the_plain_norm(name):
    norm, low = edited(name)
    x = torch.randn(3, 4, 8)
    assert low(x).equal(norm(x))


@each
def test_gradients_reach_float32_parameters(name):
    _, low = edited(name)
    x = torch.randn(3, 4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        low(x).float().square().sum().backward()
    assert all(param.grad is not None and param.grad.dtype == torch.float32 for param in (x, *low.parameters()))


@each
def test_parameter_names_and_parameters_are_unchanged(name):
    edit, make = CASES[name]
    norm = make()
    low = edit(nn.Sequential(norm))[0]
    assert list(low.state_dict()) == list(norm.state_dict())
    assert all(one is other for one, other in zip(low.parameters(), norm.parameters(), strict=True))
    assert isinstance(low, type(norm))


@pytest.mark.parametrize(
    ("edit", "name"), [(edit, edit.__name__) for edit in (low_precision_layer_norm, low_precision_group_norm)]
)
def test_model_without_a_supported_norm_is_refused(edit, name):
    with pytest.raises(ConfigError, match=f"{name}: nothing to replace"):
        edit(nn.Sequential(nn.BatchNorm1d(2)))


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4)], ids=lambda norm: type(norm).__name__)
def test_meta_forward_infers_shapes(norm):
    model = nn.Sequential(norm).to("meta")
    edit = low_precision_group_norm if isinstance(norm, nn.GroupNorm) else low_precision_layer_norm
    assert edit(model)(torch.ones(2, 4, device="meta")).shape == (2, 4)
