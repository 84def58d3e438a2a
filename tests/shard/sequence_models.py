"""Small models that treat a sequence in many ways, exactly and not exactly under context parallelism, and a plain reference."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as imported_by_name

from dtrain.losses import cross_entropy
from dtrain.typing import LossSum

SEQ, VOCAB, WIDTH, BATCH = 16, 11, 12, 3


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, **{"is_causal": True, **options})


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    length = q.shape[-2]
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(torch.ones(length, length).triu(1) > 0, -1e9)
    return scores.softmax(-1) @ v


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: torch.where(i >= j, score, -1e9))


def mask(q: Tensor) -> Tensor:
    return torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()


ATTENTION = {
    "sdpa": attend,
    "scale": lambda q, k, v: attend(q, k, v, scale=0.7),
    "grouped queries": lambda q, k, v: attend(q, k[:, :1], v[:, :1], enable_gqa=True),
    "by hand": by_hand,
    "flex": flex,
    "imported by name": lambda q, k, v: imported_by_name(q, k, v, is_causal=True),
    "over heads": lambda q, k, v: attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2),
    "mask": lambda q, k, v: attend(q, k, v, is_causal=False, attn_mask=mask(q)),
    "mask of floats": lambda q, k, v: attend(q, k, v, is_causal=False, attn_mask=torch.zeros(1, 1, q.shape[2], q.shape[2])),
    "not causal": lambda q, k, v: attend(q, k, v, is_causal=False),
    "dropout": lambda q, k, v: attend(q, k, v, dropout_p=0.5),
    "three dims": lambda q, k, v: attend(q[:, 0], k[:, 0], v[:, 0])[:, None].expand_as(q),
    "short keys": lambda q, k, v: attend(q, k[:, :, :2], v[:, :, :2]),
}


class Attention(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv, self.out = kind, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).unbind(2))
        return x + self.out(ATTENTION[self.kind](q, k, v).transpose(1, 2).flatten(2))


class MultiHead(nn.Module):
    """torch's own layer. It attends by hand if it returns weights."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.need_weights, self.layer = need_weights, nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return x + self.layer(x, x, x, attn_mask=causal, is_causal=True, need_weights=self.need_weights)[0]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.layer(x, src_mask=causal, is_causal=True)


class Positions(nn.Module):
    """Learned positions: counted from 0, taken from the batch, or from a table of the model."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table = kind, nn.Embedding(SEQ, WIDTH)
        self.register_buffer("waves", torch.linspace(0, 3, 2 * SEQ)[:, None].sin() * torch.ones(WIDTH))

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        if self.kind == "buffer":
            return x + self.waves[: x.shape[1]]
        return x + self.table(torch.arange(x.shape[1]) if self.kind == "counted" else position_ids)


class Over(nn.Module):
    """A layer that mixes positions without attention, or that does not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv, self.rnn = nn.Conv1d(WIDTH, WIDTH, 3), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "convolution":
            return x + self.conv(functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        if self.kind == "recurrent":
            return x + self.rnn(x)[0]
        if self.kind == "cumulative sum":
            return x + x.cumsum(1) / SEQ
        if self.kind == "shift":
            return x + functional.pad(x, (0, 0, 1, 0))[:, :-1]
        if self.kind == "mean over positions":
            return x + x.mean(1, keepdim=True)
        if self.kind == "position-wise convolution":
            return x + functional.conv1d(x.transpose(1, 2), self.conv.weight[:, :, :1]).transpose(1, 2)
        return functional.dropout(x, 0.5, self.training) if self.kind == "dropout layer" else x


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind == "encoder":
            self.layer = Encoder()
        elif kind in ("heads", "weights of heads"):
            self.layer = MultiHead(kind == "weights of heads")
        else:
            self.layer = nn.Linear(WIDTH, WIDTH) if kind == "without attention" else Attention(kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Net(nn.Module):
    """Return a model; ``kind`` names its special property."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed, self.positions, self.over = kind, nn.Embedding(VOCAB, WIDTH), Positions(kind), Over(kind)
        layers = kind if kind in (*ATTENTION, "heads", "weights of heads", "encoder", "without attention") else "sdpa"
        self.first, self.second = Block("sdpa" if kind == "mix" else layers), Block("by hand" if kind == "mix" else layers)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        x = self.positions(self.embed(ids), position_ids)
        x = self.second(self.first(self.over(x)))
        return self.head(x.mean(1) if self.kind == "classifier" else x)


def loss_fn(net: nn.Module, batch: dict) -> LossSum:
    kind, labels = net.kind, batch["labels"]
    logits = net(batch["ids"], batch["position_ids"])
    if kind == "classifier":
        return LossSum(total=functional.cross_entropy(logits, labels[:, 0].clamp(min=0), reduction="sum"), weight=len(labels))
    if kind == "labels shifted inside":
        return cross_entropy(logits[:, :-1], labels[:, 1:])
    if kind == "mean of each sequence":
        losses = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        counts = (labels != -100).sum(1).clamp(min=1)
        return LossSum(total=(losses.sum(1) / counts).sum(), weight=len(labels))
    if kind == "last position":
        return LossSum(total=functional.cross_entropy(logits[:, -1], batch["ids"][:, -1], reduction="sum"), weight=len(labels))
    return cross_entropy(logits, labels)


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Net(kind).double()


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[:, 3:5] = -100  # parts of a sequence have different numbers of labels
    return {"ids": ids[:, :-1].clone(), "labels": labels, "position_ids": torch.arange(SEQ).repeat(BATCH, 1)}
