"""An accuracy that is rank 0's own; ``--fixed`` adds up those of all ranks."""

import sys

import torch
from torch import nn

import dtrain as dt

FIXED = "--fixed" in sys.argv
STEPS = 4


def loss_fn(model, batch):
    return dt.soft_cross_entropy(model(batch[0]), batch[1])


def dataset(samples, seed):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))


with dt.init_dist():
    mesh = dt.build_mesh()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard"), seed=0)
    loader = dt.build_loader(dataset(48, 1), mesh=mesh, global_batch_size=12, seed=0)
    test_loader = dt.build_loader(dataset(36, 2), mesh=mesh, global_batch_size=12, seed=0, shuffle=False)
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    log = dt.loggers.jsonl("metrics.jsonl")
    for batch in loader.until(STEPS):
        state, metrics = step(state, batch)
        correct = count = 0
        with dt.eval_mode(model):
            for x, labels in test_loader.one_epoch():
                correct += (model(x).argmax(1) == labels).sum().item()
                count += len(labels)
        if FIXED:
            correct, count = dt.dist.reduce_sum(correct), dt.dist.reduce_sum(count)
        log(state.step, dt.reduce_metrics(metrics) | {"held_out_accuracy": correct / count})
