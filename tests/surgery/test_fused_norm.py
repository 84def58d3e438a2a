"""Norms that are written out become torch's own, where they are the same."""

import pytest
import torch
from torch import nn

from dtrain.surgery.normalization import fused_layer_norm, low_precision_layer_norm

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
    """No norm at all, but looks like one."""

    def forward(self, x):
        return self.weight * x


class OfPairs(Written):
    """Takes something else than a tensor."""

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
    with torch.autocast("cpu", torch.bfloat16):  # torch warns where it cannot fuse, which fails a test
        assert model(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
