"""Norms of parts of a batch, norms in the dtype of autocast, and norms that are written out and become torch's own."""

import copy

import pytest
import torch
from torch import nn

from dtrain.errors import ConfigError
from dtrain.surgery.normalization import (
    fused_layer_norm,
    ghost_batch_norm,
    ghost_batches,
    low_precision_group_norm,
    low_precision_layer_norm,
)


@pytest.mark.parametrize(
    ("samples", "size", "sizes"),
    [(8, 4, [4, 4]), (9, 4, [3, 3, 3]), (33, 32, [17, 16]), (5, 32, [5]), (1, 2, [1]), (0, 4, [0])],
)
def test_ghost_batches_are_few_and_evenly_sized(samples, size, sizes):
    assert [len(group) for group in ghost_batches(torch.zeros(samples, 3), size)] == sizes


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(3), (9, 3)),
        (nn.BatchNorm1d(3), (9, 3, 5)),
        (nn.BatchNorm2d(3), (9, 3, 4, 4)),
        (nn.BatchNorm3d(3), (9, 3, 2, 2, 2)),
    ],
    ids=["1d", "1d of sequences", "2d", "3d"],
)
def test_each_ghost_batch_is_normalised_separately(norm, shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    plain = type(norm)(3)
    expected = torch.cat([plain(group) for group in (x[:3], x[3:6], x[6:])])
    ghost = ghost_batch_norm(norm, ghost_batch_size=4)
    assert torch.equal(ghost(x), expected)
    assert torch.equal(ghost.running_mean, plain.running_mean)
    assert torch.equal(ghost.eval()(x), plain.eval()(x)), "evaluation is that of the plain norm"


def test_ghost_batches_returns_a_small_batch_whole():
    x, plain = torch.randn(4, 3), nn.BatchNorm1d(3)
    assert torch.equal(ghost_batch_norm(nn.BatchNorm1d(3))(x), plain(x))


@pytest.mark.parametrize("size", [1, 0, 2.0, True])
def test_invalid_ghost_batch_sizes_are_refused(size):
    with pytest.raises(ConfigError, match="ghost_batch_norm: ghost_batch_size must be an integer of at least 2, got"):
        ghost_batch_norm(nn.BatchNorm1d(3), ghost_batch_size=size)


CASES = {
    "layer norm": (low_precision_layer_norm, lambda: nn.LayerNorm(8)),
    "layer norm without weights": (low_precision_layer_norm, lambda: nn.LayerNorm(8, elementwise_affine=False)),
    "RMS norm": (low_precision_layer_norm, lambda: nn.RMSNorm(8, eps=1e-6)),
    "group norm": (low_precision_group_norm, lambda: nn.GroupNorm(2, 4)),
}
each_norm = pytest.mark.parametrize("name", CASES)


def edited(name):
    """Make a norm whose weights are not all 1, and its low-precision twin."""
    edit, make = CASES[name]
    norm = make()
    for param in norm.parameters():
        nn.init.normal_(param)
    return norm, edit(nn.Sequential(copy.deepcopy(norm)))[0]


@each_norm
def test_norm_computes_in_the_autocast_dtype(name):
    norm, low = edited(name)
    x = torch.randn(3, 4, 8)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        output = low(x)
    assert output.dtype == torch.bfloat16
    assert output.equal(copy.deepcopy(norm).bfloat16()(x.bfloat16()))
    torch.testing.assert_close(output.float(), norm(x), rtol=0.02, atol=0.02)  # eight bits of mantissa, three roundings


@each_norm
def test_norm_outside_autocast_equals_the_plain_norm(name):
    norm, low = edited(name)
    x = torch.randn(3, 4, 8)
    assert low(x).equal(norm(x))


@each_norm
def test_gradients_reach_float32_parameters(name):
    _, low = edited(name)
    x = torch.randn(3, 4, 8, requires_grad=True)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        low(x).float().square().sum().backward()
    assert all(param.grad is not None and param.grad.dtype == torch.float32 for param in (x, *low.parameters()))


@each_norm
def test_parameter_names_and_parameters_are_unchanged(name):
    edit, make = CASES[name]
    norm = make()
    low = edit(nn.Sequential(norm))[0]
    assert list(low.state_dict()) == list(norm.state_dict())
    assert all(one is other for one, other in zip(low.parameters(), norm.parameters(), strict=True))
    assert isinstance(low, type(norm))


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4)], ids=lambda norm: type(norm).__name__)
def test_meta_forward_infers_shapes(norm):
    model = nn.Sequential(norm).to("meta")
    edit = low_precision_group_norm if isinstance(norm, nn.GroupNorm) else low_precision_layer_norm
    assert edit(model)(torch.ones(2, 4, device="meta")).shape == (2, 4)


NOTICE = "fused_layer_norm: torch has no fused norm on a cpu. 1 norm became torch's unfused norms, with the same results"


class Written(nn.Module):
    """An RMS norm as many models have it, in float32 within."""

    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)


class Centred(Written):
    """A layer norm."""

    def __init__(self, dim):
        super().__init__(dim)
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        spread = (centred.square().mean(-1, keepdim=True) + self.variance_epsilon).sqrt()
        return centred / spread * self.weight + self.bias


class OneMore(Written):
    """As Gemma has it."""

    def forward(self, x):
        return super().forward(x) / self.weight * (1 + self.weight)


class WithoutEps(Written):
    """As some are: the number is there, and not used."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-8)


class Scaled(Written):
    """A module that is no norm, but looks like a norm."""

    def forward(self, x):
        return self.weight * x


class OfPairs(Written):
    """A module whose input is no tensor."""

    def forward(self, x):
        first, _ = x.pairs
        return first


@pytest.mark.parametrize(("kind", "becomes"), [(Written, nn.RMSNorm), (Centred, nn.LayerNorm)])
def test_handwritten_norm_becomes_a_torch_norm(kind, becomes):
    written = kind(6).eval()
    for param in written.parameters():
        nn.init.normal_(param)
    with pytest.warns(UserWarning, match=NOTICE):
        fused = fused_layer_norm(nn.Sequential(written))[0]
    x = torch.randn(3, 6)
    assert type(fused) is becomes
    assert fused.weight is written.weight
    assert not fused.training
    torch.testing.assert_close(fused(x), written(x))
    assert list(fused.state_dict()) == list(written.state_dict())


@pytest.mark.filterwarnings("ignore:fused_layer_norm")
def test_meta_norm_becomes_a_torch_norm():
    with torch.device("meta"):
        model = nn.Sequential(Written(6))
    fused = fused_layer_norm(model)[0]
    assert type(fused) is nn.RMSNorm
    assert fused.weight.is_meta


@pytest.mark.parametrize("kind", [OneMore, WithoutEps, Scaled, OfPairs])
def test_non_norm_modules_are_unchanged(kind):
    model = nn.Sequential(kind(6), nn.LayerNorm(6))
    before = list(model)
    with pytest.warns(UserWarning, match=r"the Sequential has no unfused norm and does not change. Its 1 nn.LayerNorm"):
        assert fused_layer_norm(model) is model
    assert list(model) == before


@pytest.mark.filterwarnings("ignore:fused_layer_norm:UserWarning")
def test_fused_norm_combines_with_low_precision_norm_under_autocast():
    model = low_precision_layer_norm(fused_layer_norm(nn.Sequential(Written(4))))
    with torch.autocast(
        torch.get_default_device().type, torch.bfloat16
    ):  # torch warns where it cannot fuse, which fails a test
        assert model(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("edit", [ghost_batch_norm, low_precision_layer_norm, low_precision_group_norm])
def test_model_without_a_supported_norm_is_refused(edit):
    with pytest.raises(ConfigError, match=f"{edit.__name__}: nothing to replace"):
        edit(nn.Sequential(nn.LocalResponseNorm(2)))
