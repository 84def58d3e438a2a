"""A resume that restores the loader's position and skips the trained batches once more; ``--fixed`` restores it only."""

import sys

import torch
from torch import nn

import dtrain as dt

FIXED = "--fixed" in sys.argv
BATCH, STEPS = 12, 4


def loss_fn(model, batch):
    return dt.soft_cross_entropy(model(batch[0]), batch[1])


def dataset():
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))


with dt.init_dist():
    mesh = dt.build_mesh()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard"), seed=0)
    loader = dt.build_loader(dataset(), mesh=mesh, global_batch_size=BATCH, seed=0)
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader=loader)
    state = dt.load_sharded("ckpt", state, missing_ok=True)
    if state.restored is not None and not FIXED:
        loader.skip(state.step * BATCH)
    log = dt.loggers.jsonl("metrics.jsonl")
    for batch in loader.until("2ep"):
        if state.step == STEPS:
            break
        state, metrics = step(state, batch)
        log(state.step, dt.reduce_metrics(metrics))
        dt.save_sharded("ckpt", state)
