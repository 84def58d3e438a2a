"""A small loop whose optimizer runs in backward; ``--bug`` multiplies gradients by the number of ranks."""

import sys

import torch
from torch import nn

import dtrain as dt


def loss_fn(model, batch):
    logits = model(batch[0])
    if "--bug" in sys.argv:
        logits.register_hook(lambda grad: grad * torch.distributed.get_world_size())
    return dt.soft_cross_entropy(logits, batch[1])


with dt.init_dist() as info:
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    mesh = dt.build_mesh()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = dt.materialize(dt.shard_model(model, mesh, blocks=(nn.Linear,)), seed=0)
    loader = dt.build_loader(torch.utils.data.TensorDataset(x, x[:, :4].argmax(1)), mesh=mesh, global_batch_size=12, seed=0)
    step = dt.step.optimizer_in_backward(
        loss_fn, batch_spec=dt.batch_spec(weight=lambda batch: len(batch[1])), microbatch_size=4
    )
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for batch in loader.until(4):
        state, metrics = step(state, batch)
        dt.reduce_metrics(metrics)
