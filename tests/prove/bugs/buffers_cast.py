"""Mixed precision that casts the buffer of positions, in which bfloat16 has no 257; ``--fixed`` casts parameters only."""

import sys

import torch
from torch import nn

import dtrain as dt

FIXED = "--fixed" in sys.argv
VOCAB, LENGTH, STEPS = 16, 300, 4


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 16), nn.Linear(16, VOCAB)
        self.register_buffer("positions", torch.arange(LENGTH, dtype=torch.get_default_dtype()))

    def reset_parameters(self):
        self.positions.copy_(torch.arange(LENGTH))

    def forward(self, tokens):
        x = self.embed(tokens)
        angle = self.positions[: tokens.shape[1], None] * torch.logspace(0, -2, 8, device=tokens.device)
        x = x + torch.cat([angle.sin(), angle.cos()], dim=1).to(x.dtype)
        return self.head(self.hidden(x).tanh())


def loss_fn(model, batch):
    return dt.cross_entropy(model(batch[:, :-1]), batch[:, 1:])


with dt.init_dist():
    mesh = dt.build_mesh()
    with torch.device("meta"):
        model = LanguageModel()
    precision = dt.Precision(param="bf16", reduce="fp32", buffer=None if FIXED else "bf16")
    model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard", precision=precision), seed=0)
    data = torch.randint(VOCAB, (24, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    loader = dt.build_loader(data, mesh=mesh, global_batch_size=6, seed=0)
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    log = dt.loggers.jsonl("metrics.jsonl")
    for batch in loader.until(STEPS):
        state, metrics = step(state, batch)
        log(state.step, dt.reduce_metrics(metrics))
