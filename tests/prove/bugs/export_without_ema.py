"""A script that evaluates the averaged weights and exports the raw ones; ``--fixed`` exports the evaluated ones."""

import sys
from contextlib import nullcontext

import torch
from safetensors.torch import save_file
from torch import nn

import dtrain as dt

FIXED = "--fixed" in sys.argv
STEPS = 4


def loss_fn(model, batch):
    return dt.soft_cross_entropy(model(batch[0]), batch[1])


def dataset(samples, seed):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))


with dt.init_dist() as info:
    mesh = dt.build_mesh()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard"), seed=0)
    loader = dt.build_loader(dataset(48, 1), mesh=mesh, global_batch_size=12, seed=0)
    test_loader = dt.build_loader(dataset(36, 2), mesh=mesh, global_batch_size=12, seed=0, shuffle=False)
    step = dt.compose_step(loss_fn, [dt.transforms.ema(0.9)])
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    log = dt.loggers.jsonl("metrics.jsonl")
    for batch in loader.until(STEPS):
        state, metrics = step(state, batch)
        log(state.step, dt.reduce_metrics(metrics))
    with dt.transforms.use_average(state, "ema"):
        loss = dt.reduce_metrics(dt.evaluate(model, test_loader, loss_fn))["loss"]
    log(state.step + 1, {"held_out_loss": loss})
    with dt.transforms.use_average(state, "ema") if FIXED else nullcontext():
        weights = {name: whole.clone() for name, whole in dt.full_params(state)}
    if info.rank == 0:
        save_file(weights, "model.safetensors")
