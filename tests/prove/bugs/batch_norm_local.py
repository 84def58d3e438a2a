"""A classifier with batch norm, whose statistics are those of a rank's microbatch; ``--fixed`` normalizes each sample."""

import sys
from functools import partial

import torch
from torch import nn

import dtrain as dt

FIXED = "--fixed" in sys.argv
STEPS = 4


def norm(features):
    return nn.GroupNorm(4, features) if FIXED else nn.BatchNorm1d(features)


def loss_fn(model, batch):
    return dt.soft_cross_entropy(model(batch[0]), batch[1])


def dataset():
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))


with dt.init_dist():
    mesh = dt.build_mesh()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), norm(16), nn.ReLU(), nn.Linear(16, 16), norm(16), nn.ReLU(), nn.Linear(16, 4))
    model = dt.materialize(dt.shard_model(model, mesh, strategy="replicate"), seed=0)
    loader = dt.build_loader(dataset(), mesh=mesh, global_batch_size=12, seed=0)
    step = dt.compose_step(loss_fn, grad=partial(dt.microbatch_step, microbatch_size=4))
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    log = dt.loggers.jsonl("metrics.jsonl")
    for batch in loader.until(STEPS):
        state, metrics = step(state, batch)
        log(state.step, dt.reduce_metrics(metrics))
