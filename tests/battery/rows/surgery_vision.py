"""Rows: edits of models for images."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import torch
from torch import nn

from battery.surgery_row import Points, SurgeryRow
from dtrain.surgery.convolutions import (
    blur_2d,
    blur_kernel,
    blur_pool,
    channels_last,
    squeeze_excite,
    standardize_weight,
    weight_standardization,
)
from dtrain.surgery.dropout import drop_rates, drop_samples, stochastic_depth
from dtrain.surgery.layers import factorize, factorize_matrix
from dtrain.surgery.normalization import ghost_batch_norm


class Block(nn.Module):
    """A residual block with its branch apart."""

    def __init__(self, channels: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), norm(channels), nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.branch(x)


class ResNet(nn.Module):
    """Small, with all that edits look for: strided convolutions, a max pool, residual blocks, norms, a linear head."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem, self.norm, self.pool = nn.Conv2d(2, 4, 3, padding=1), norm(4), nn.MaxPool2d(2)
        self.one, self.down, self.two = Block(4, norm), nn.Conv2d(4, 8, 3, stride=2, padding=1), Block(8, norm)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.norm(self.stem(x))))
        return self.head(self.two(self.down(self.one(x))).mean((2, 3)))


def grouped() -> nn.Module:
    """With norms that look at one sample at a time."""
    return ResNet(lambda channels: nn.GroupNorm(2, channels))


def batched() -> nn.Module:
    return ResNet(nn.BatchNorm2d)


IMAGES = ((2, 8, 8), None)
CONVS = ("stem", "one.branch.0", "one.branch.3", "down", "two.branch.0", "two.branch.3")


def convs(prefix: str) -> dict[str, str]:
    return dict.fromkeys(CONVS, f"{prefix}Conv2d")


# ---- numbers known by hand --------------------------------------------------------------------------------------------------


def _blurred() -> Points:
    spike = torch.zeros(1, 1, 5, 5)
    spike[0, 0, 2, 2] = 16.0
    pool = blur_pool(nn.Sequential(nn.MaxPool2d(2)))
    conv = nn.Conv2d(1, 1, 1, stride=2, bias=False)
    conv.weight.data.fill_(2.0)
    first = blur_pool(nn.Sequential(conv), min_channels=0)
    after = nn.Conv2d(1, 1, 1, stride=2, bias=False)
    after.weight.data.fill_(2.0)
    after = blur_pool(nn.Sequential(after), min_channels=0, blur_first=False)
    return [
        (blur_kernel(2), [[0.25, 0.25], [0.25, 0.25]]),
        (blur_kernel(5)[2] * 256, [6.0, 24.0, 36.0, 24.0, 6.0]),
        (blur_2d(spike)[0, 0, 1:4, 1:4], [[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]),
        (blur_2d(spike, stride=2)[0, 0], [[0.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 0.0]]),
        # Maxima of 2x2 windows of the spike are 16 in [1:3, 1:3] of 4x4; blurred 12 at (0, 0)'s neighbours, every second one.
        (pool(spike)[0, 0], [[1.0, 3.0], [3.0, 9.0]]),
        (first(spike)[0, 0, 1, 1], 8.0),
        (after(spike)[0, 0, 1, 1], 8.0),
    ]


def _factors() -> Points:
    matrix = torch.tensor([[3.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.5]])
    left, right = factorize_matrix(matrix, 1)
    linear = nn.Linear(4, 4)
    linear.weight.data.copy_(matrix)
    linear.bias.data.fill_(1.0)
    net = factorize(nn.Sequential(linear), min_features=4)
    conv = nn.Conv2d(4, 4, 1, stride=2, bias=False)
    conv.weight.data.copy_(matrix[..., None, None])
    small = factorize(nn.Sequential(conv), min_channels=4)
    picture = torch.ones(1, 4, 3, 3)
    return [
        (left @ right, torch.diag(torch.tensor([3.0, 0.0, 0.0, 0.0]))),
        (net(torch.tensor([[1.0, 5.0, 5.0, 5.0], [2.0, 0.0, 0.0, 0.0]])), [[4.0, 1.0, 1.0, 1.0], [7.0, 1.0, 1.0, 1.0]]),
        (small(picture)[0, :, 0, 0], [3.0, 0.0, 0.0, 0.0]),
        (list(small(picture).shape), [1, 4, 2, 2]),
    ]


def _ghosts() -> Points:
    norm = nn.BatchNorm1d(1, eps=1e-12, momentum=0.5)
    out = ghost_batch_norm(norm, ghost_batch_size=2)(torch.tensor([[0.0], [2.0], [10.0], [30.0]]))
    return [
        (out.flatten(), [-1.0, 1.0, -1.0, 1.0]),
        (norm.running_mean, [0.5 * (0.5 * 0.0 + 0.5 * 1.0) + 0.5 * 20.0]),  # means 1 and 20, one after the other
        (norm.running_var, [0.5 * (0.5 * 1.0 + 0.5 * 2.0) + 0.5 * 200.0]),  # unbiased variances 2 and 200
    ]


def _excited() -> Points:
    conv = nn.Conv2d(1, 2, 1, bias=False)
    conv.weight.data.copy_(torch.tensor([1.0, 2.0]).reshape(2, 1, 1, 1))
    net = squeeze_excite(nn.Sequential(conv), latent_channels=1, min_channels=1)
    net[0].squeeze_excite.reduce.weight.data.copy_(torch.tensor([[1.0, 1.0]]))
    net[0].squeeze_excite.expand.weight.data.copy_(torch.tensor([[0.0], [1.0]]))
    bright, dark = torch.tensor([[[[0.0, 2.0]]]]), torch.tensor([[[[0.0, -2.0]]]])
    gate = 1.0 / (1.0 + 2.718281828459045**-3.0)  # means 1 and 2, their sum 3
    return [
        (net(bright)[0, :, 0], [[0.0, 1.0], [0.0, 4.0 * gate]]),
        (net(dark)[0, :, 0], [[0.0, -1.0], [0.0, -2.0]]),  # the sum is negative, so both gates are sigmoid(0)
    ]


class Triple(nn.Module):
    """A block whose residual is twice its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def _dropped() -> Points:
    net = stochastic_depth(nn.Sequential(Triple(), Triple()), Triple, drop_rate=0.5)
    x = torch.tensor([[1.0]])
    outs = {round(net(x).item()) for _ in range(40)}
    branch = stochastic_depth(nn.Sequential(Triple()), Triple, drop_rate=0.25, kind="branch").eval()
    return [
        (drop_rates(0.2, 4), [0.05, 0.1, 0.15, 0.2]),
        (drop_samples(torch.ones(2, 2, 1), torch.tensor([True, False])).flatten(), [1.0, 1.0, 0.0, 0.0]),
        (sorted(outs), [1, 3, 9]),  # none, one or both of two blocks that triple
        (net.eval()(x), [[(1 + 0.75 * 2) * (1 + 0.5 * 2)]]),
        (branch(x), [[0.75 * 3]]),
    ]


def _standard() -> Points:
    conv = nn.Conv1d(1, 2, 2, bias=False)
    conv.weight.data.copy_(torch.tensor([[[1.0, 5.0]], [[7.0, 7.0]]]))
    out = weight_standardization(conv, eps=0.5)(torch.tensor([[[1.0, 2.0]]]))
    return [
        (standardize_weight(torch.tensor([[0.0, 0.0, 3.0]]), eps=0.0), [[-1 / sqrt(2), -1 / sqrt(2), 2 / sqrt(2)]]),
        (out[0, :, 0], [(-2.0 * 1 + 2.0 * 2) / sqrt(4.5), 0.0]),
    ]


def _last() -> Points:
    conv = channels_last(nn.Conv2d(2, 2, 1, bias=False))
    conv.weight.data.copy_(torch.tensor([[1.0, 1.0], [2.0, 0.0]])[..., None, None])
    out, large = conv(torch.tensor([[[[3.0, 4.0]], [[1.0, 0.0]]]])), conv(torch.zeros(3, 2, 5, 4))
    return [(out[0, :, 0], [[4.0, 4.0], [6.0, 8.0]]), (list(large.stride()), [5 * 4 * 2, 1, 4 * 2, 2])]


BLOCKS = (nn.Conv2d, nn.Linear)
ROWS: dict[str, SurgeryRow] = {
    "blur_pool": SurgeryRow(
        make=grouped,
        edit=lambda model: blur_pool(model, min_channels=4),
        changes={"pool": "BlurMaxPool2d", "down": "BlurConv2d"},
        inputs=IMAGES,
        of=("blur_pool",),
        points=_blurred,
        blocks=BLOCKS,
    ),
    "blur_pool-after": SurgeryRow(
        make=grouped,
        edit=lambda model: blur_pool(model, min_channels=4, blur_first=False, replace_maxpools=False, size=2, edge="zeros"),
        changes={"down": "BlurConv2d"},
        inputs=IMAGES,
        blocks=BLOCKS,
    ),
    "channels_last": SurgeryRow(
        make=grouped,
        edit=channels_last,
        changes=convs("ChannelsLast"),
        inputs=IMAGES,
        of=("channels_last",),
        points=_last,
        blocks=BLOCKS,
        initial=True,
    ),
    "factorize": SurgeryRow(
        make=grouped,
        edit=lambda model: factorize(model, min_channels=8, latent_channels=2, min_features=3, latent_features=0.4),
        changes={"two.branch.0": "FactorizedConv2d", "two.branch.3": "FactorizedConv2d", "head": "FactorizedLinear"},
        inputs=IMAGES,
        of=("factorize",),
        points=_factors,
        blocks=BLOCKS,
    ),
    "ghost_batch_norm": SurgeryRow(  # of four samples each, which are those of a rank
        make=batched,
        edit=lambda model: ghost_batch_norm(model, ghost_batch_size=4),
        changes=dict.fromkeys(("norm", "one.branch.1", "two.branch.1"), "GhostBatchNorm2d"),
        inputs=IMAGES,
        of=("ghost_batch_norm",),
        points=_ghosts,
        blocks=BLOCKS,
        initial=True,
    ),
    "ghost_batch_norm-of_ranks": SurgeryRow(  # of three at most, which two ranks cut into other groups than one does
        make=batched,
        edit=lambda model: ghost_batch_norm(model, ghost_batch_size=3),
        changes=dict.fromkeys(("norm", "one.branch.1", "two.branch.1"), "GhostBatchNorm2d"),
        inputs=IMAGES,
        blocks=BLOCKS,
        per_rank=True,
    ),
    "squeeze_excite": SurgeryRow(
        make=grouped,
        edit=lambda model: squeeze_excite(model, latent_channels=0.25, min_channels=8),
        changes=dict.fromkeys(("two.branch.0", "two.branch.3"), "SqueezeExciteConv2d"),
        inputs=IMAGES,
        of=("squeeze_excite",),
        points=_excited,
        blocks=BLOCKS,
    ),
    "stochastic_depth": SurgeryRow(
        make=grouped,
        edit=lambda model: stochastic_depth(model, Block),
        changes=dict.fromkeys(("one", "two"), "StochasticBlock"),
        inputs=IMAGES,
        of=("stochastic_depth",),
        points=_dropped,
        blocks=(Block,),
    ),
    "stochastic_depth-inside": SurgeryRow(  # units of sharding inside the blocks
        make=grouped,
        edit=lambda model: stochastic_depth(model, Block, distribution="uniform", seed=5),
        changes=dict.fromkeys(("one", "two"), "StochasticBlock"),
        inputs=IMAGES,
        blocks=BLOCKS,
    ),
    "stochastic_depth-branch": SurgeryRow(
        make=grouped,
        edit=lambda model: stochastic_depth(model, "*.branch", kind="branch"),
        changes=dict.fromkeys(("one.branch", "two.branch"), "StochasticSequential"),
        inputs=IMAGES,
        blocks="*.branch",
    ),
    "stochastic_depth-sample": SurgeryRow(
        make=grouped,
        edit=lambda model: stochastic_depth(model, Block, method="sample"),
        changes=dict.fromkeys(("one", "two"), "StochasticBlock"),
        inputs=IMAGES,
        blocks=(Block,),
        per_rank=True,
    ),
    "weight_standardization": SurgeryRow(
        make=grouped,
        edit=lambda model: weight_standardization(model, n_last_layers_to_ignore=1),
        changes={name: kind for name, kind in convs("WeightStandardized").items() if name != "two.branch.3"},
        inputs=IMAGES,
        of=("weight_standardization",),
        points=_standard,
        blocks=BLOCKS,
    ),
}
