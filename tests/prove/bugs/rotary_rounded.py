"""A rotary embedding that rounds its frequencies to bfloat16 before they meet the positions; ``--fixed`` rounds the result."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import dtrain as dt

FIXED = "--fixed" in sys.argv
VOCAB, LENGTH, DIM, STEPS = 16, 300, 16, 4


class Rotary(nn.Module):
    """Turn pairs of features by angles that grow with the position."""

    def forward(self, x):
        exponent = torch.arange(0, DIM, 2, device=x.device, dtype=torch.get_default_dtype()) / DIM
        frequency = 10000.0**-exponent
        if not FIXED:
            frequency = frequency.to(x.dtype)
        positions = torch.arange(x.shape[1], device=x.device, dtype=frequency.dtype)
        angle = positions[:, None] * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, VOCAB)
        self.rotary = Rotary()

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.head(x + F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True))


def loss_fn(model, batch):
    return dt.cross_entropy(model(batch[:, :-1]), batch[:, 1:])


with dt.init_dist():
    mesh = dt.build_mesh()
    with torch.device("meta"):
        model = LanguageModel()
    precision = dt.Precision(param="bf16", reduce="fp32")
    model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard", precision=precision), seed=0)
    data = torch.randint(VOCAB, (24, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    loader = dt.build_loader(data, mesh=mesh, global_batch_size=6, seed=0)
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    log = dt.loggers.jsonl("metrics.jsonl")
    for batch in loader.until(STEPS):
        state, metrics = step(state, batch)
        log(state.step, dt.reduce_metrics(metrics))
