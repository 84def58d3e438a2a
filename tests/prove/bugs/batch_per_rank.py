"""A batch size that is meant for all ranks and given to each; ``--fixed`` gives it to the loader as the global one."""

import sys

import torch
from torch import nn

import dtrain as dt

FIXED = "--fixed" in sys.argv
BATCH, STEPS = 12, 4


def loss_fn(model, batch):
    return dt.soft_cross_entropy(model(batch[0]), batch[1])


def dataset():
    x = torch.randn(144, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))


with dt.init_dist() as info:
    mesh = dt.build_mesh()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard"), seed=0)
    global_batch_size = BATCH if FIXED else BATCH * info.world_size
    loader = dt.build_loader(dataset(), mesh=mesh, global_batch_size=global_batch_size, seed=0)
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    log = dt.loggers.jsonl("metrics.jsonl")
    for batch in loader.until(STEPS):
        state, metrics = step(state, batch)
        log(state.step, dt.reduce_metrics(metrics))
