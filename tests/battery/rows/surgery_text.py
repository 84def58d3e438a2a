"""Rows: edits of models for text."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn import functional

from battery.surgery_row import Points, SurgeryRow, scalar
from dtrain.surgery.attention import alibi, alibi_bias, alibi_slopes
from dtrain.surgery.dropout import drop_by_masks, gyro_dropout
from dtrain.surgery.layers import GatedLinearUnit, gated_linear_units
from dtrain.surgery.normalization import fused_layer_norm, low_precision_group_norm, low_precision_layer_norm

LENGTH, TOKENS, DIM = 6, 11, 8


class Attention(nn.Module):
    """Two heads, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.is_causal = 2, True
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (projection.unflatten(-1, (self.heads, -1)).transpose(1, 2) for projection in self.qkv(x).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask, is_causal=attention_mask is None
        )  # fmt: skip
        return self.out(attended.transpose(1, 2).flatten(2))


class RMS(nn.Module):
    """Written out."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-5
        self.weight = nn.Parameter(torch.empty(DIM))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, 0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Text(nn.Module):
    """Tokens and places, attention, a network with dropout, norms of each kind."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, DIM), nn.Embedding(LENGTH, DIM)
        self.attention = Attention()
        self.norm, self.rms, self.groups = nn.LayerNorm(DIM), RMS(), nn.GroupNorm(2, DIM)
        self.up, self.act, self.drop, self.down = nn.Linear(DIM, 12), nn.GELU(), nn.Dropout(dropout), nn.Linear(12, DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = self.norm(x + self.attention(x, attention_mask=None))
        x = self.rms(x + self.down(self.drop(self.act(self.up(x)))))
        return self.groups(x.transpose(1, 2))


class Encoder(nn.Module):
    """Tokens, and torch's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, DIM)
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.tokens(ids))


def _alibi_points() -> Points:
    """Press et al. 2022, section 3: eight heads have slopes 1/2, 1/4, ..., 1/256."""
    return [
        (alibi_slopes(8), torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256])),
        (alibi_bias(8, 3)[0].abs(), torch.tensor([[0.0, 0.5, 1.0], [0.5, 0.0, 0.5], [1.0, 0.5, 0.0]])),
        (alibi_bias(8, 1, 4)[1], torch.tensor([[-0.75, -0.5, -0.25, -0.0]])),
    ]


def _gated_points() -> Points:
    """(3 * 2 + 1) * (3 * 5), and nothing where the activated half is below 0."""
    unit = GatedLinearUnit(1, 1, activation=torch.relu, linear_bias=False)
    with torch.no_grad():
        unit.weight.fill_(2.0), unit.bias.fill_(1.0), unit.linear.weight.fill_(5.0)
        return [(unit(torch.tensor([3.0])), torch.tensor([105.0])), (unit(torch.tensor([-3.0])).abs(), torch.tensor([0.0]))]


def _gyro_points() -> Points:
    """Half of two features each, for half of the samples."""
    masks = torch.tensor([[True, False], [False, True]])
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    return [
        (drop_by_masks(x, masks, 0.5), torch.tensor([[2.0, 0.0], [6.0, 0.0], [0.0, 12.0]])),
        (drop_by_masks(x[:2], masks, 0.75), torch.tensor([[4.0, 0.0], [0.0, 16.0]])),
    ]


def _layer_norm_points() -> Points:
    """1, 2, 3 less their mean, by the root of 2/3; in bfloat16, which has eight bits, 1.2247 is 1.2266; 1.001 is 1.

    The numbers are those of the CPU's kernel. A GPU's rounds at other places.
    """
    norm = low_precision_layer_norm(nn.Sequential(nn.LayerNorm(3, eps=0.0, device="cpu")))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        rows = (torch.tensor([first, 2.0, 3.0], device="cpu") for first in (1.0, 1.001))
        low, rounded = (norm(row).double() for row in rows)
    expected = torch.tensor([-1.2265625, 0.0, 1.2265625], dtype=torch.float64)
    return [(low, expected), (rounded, expected)]


def _group_norm_points() -> Points:
    """Groups of two channels: 1 and 3, and the same of 1.001, which is 1 in bfloat16; by the CPU's kernel."""
    norm = low_precision_group_norm(nn.Sequential(nn.GroupNorm(2, 4, eps=0.0, device="cpu")))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        normed = norm(torch.tensor([[[1.0], [3.0], [1.001], [3.0]]], device="cpu")).double().flatten()
    expected = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    return [(normed[:2], expected), (normed[2:], expected)]


def _fused_points() -> Points:
    """3 and 4 have a mean square of 12.5, to which eps is added."""
    model = _fused(nn.Sequential(RMS())).double()
    with torch.no_grad():
        model[0].weight.fill_(2.0)
        normed = model(torch.tensor([3.0, 4.0] * 4, dtype=torch.float64))
    return [(normed[0], scalar(6 / 12.50001**0.5)), (normed[1], scalar(8 / 12.50001**0.5))]


def _fused(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fused_layer_norm: torch has no fused norm on a cpu")
        return fused_layer_norm(model)


_INPUTS = ((LENGTH,), TOKENS)
_BLOCKS = (nn.Linear, nn.Embedding)

ROWS: dict[str, SurgeryRow] = {
    "alibi": SurgeryRow(
        make=Text,
        edit=lambda model: alibi(model, attentions={Attention: "heads"}, positions="places"),
        changes={"attention": "AlibiAttention", "places": "ZeroPositionEmbedding"},
        inputs=_INPUTS,
        of=("alibi",),
        points=_alibi_points,
        blocks=_BLOCKS,
    ),
    "alibi-of-torch": SurgeryRow(
        make=Encoder,
        edit=lambda model: alibi(model, attentions={nn.MultiheadAttention: "num_heads"}),
        changes={"layer.self_attn": "AlibiMultiheadAttention"},
        inputs=_INPUTS,
        blocks=(nn.TransformerEncoderLayer,),
    ),
    "gated_linear_units": SurgeryRow(
        make=Text,
        edit=lambda model: gated_linear_units(model, activation="silu", networks={Text: ("up", "act")}),
        changes={"up": "GatedLinearUnit", "act": "Identity"},
        inputs=_INPUTS,
        of=("gated_linear_units",),
        points=_gated_points,
        blocks=_BLOCKS,
    ),
    "gated_linear_units-of-torch": SurgeryRow(
        make=Encoder,
        edit=lambda model: gated_linear_units(
            model, bias=True, linear_bias=True, networks={nn.TransformerEncoderLayer: ("linear1", "activation")}
        ),
        changes={"layer.linear1": "GatedLinearUnit"},
        inputs=_INPUTS,
        blocks=(nn.TransformerEncoderLayer,),
    ),
    "gyro_dropout": SurgeryRow(
        make=lambda: Text(0.3),
        edit=lambda model: gyro_dropout(model, sigma=8, tau=2),
        changes={"drop": "GyroDropout"},
        inputs=_INPUTS,
        of=("gyro_dropout",),
        points=_gyro_points,
        blocks=_BLOCKS,
        per_rank=True,
        initial=True,
    ),
    "low_precision_layer_norm": SurgeryRow(
        make=Text,
        edit=low_precision_layer_norm,
        changes={"norm": "LowPrecisionLayerNorm"},
        inputs=_INPUTS,
        of=("low_precision_layer_norm",),
        points=_layer_norm_points,
        blocks=_BLOCKS,
        initial=True,
    ),
    "low_precision_group_norm": SurgeryRow(
        make=Text,
        edit=low_precision_group_norm,
        changes={"groups": "LowPrecisionGroupNorm"},
        inputs=_INPUTS,
        of=("low_precision_group_norm",),
        points=_group_norm_points,
        blocks=_BLOCKS,
        initial=True,
    ),
    "fused_layer_norm": SurgeryRow(
        make=Text,
        edit=_fused,
        changes={"rms": "RMSNorm"},
        inputs=_INPUTS,
        of=("fused_layer_norm",),
        points=_fused_points,
        blocks=_BLOCKS,
        initial=True,
    ),
}
