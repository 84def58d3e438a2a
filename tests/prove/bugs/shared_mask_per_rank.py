"""Layers that are dropped by chance, others on each rank; ``--fixed`` drops the same layers on all ranks."""

import sys

import torch
from torch import nn

import dtrain as dt

FIXED = "--fixed" in sys.argv
LAYERS, STEPS = 4, 4


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(LAYERS))
        self.keep = [True] * LAYERS  # layers that take part in this step

    def forward(self, x):
        x = self.stem(x)
        for layer, keep in zip(self.layers, self.keep, strict=True):
            x = x + keep * layer(x).tanh()
        return self.head(x)


def loss_fn(model, batch):
    return dt.soft_cross_entropy(model(batch[0]), batch[1])


def dataset():
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))


with dt.init_dist() as info:
    mesh = dt.build_mesh()
    with torch.device("meta"):
        model = Residual()
    model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard"), seed=0)
    loader = dt.build_loader(dataset(), mesh=mesh, global_batch_size=12, seed=0)
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    log = dt.loggers.jsonl("metrics.jsonl")
    for batch in loader.until(STEPS):
        rank = 0 if FIXED else info.rank
        draw = torch.Generator().manual_seed(1000 * rank + state.step)
        model.keep = (torch.rand(LAYERS, generator=draw) < 0.5).tolist()
        state, metrics = step(state, batch)
        log(state.step, dt.reduce_metrics(metrics))
