"""An evaluation that drops the last batch of each rank; ``--fixed`` evaluates all samples."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import dtrain as dt

FIXED = "--fixed" in sys.argv
STEPS = 4


def loss_fn(model, batch):
    return dt.soft_cross_entropy(model(batch[0]), batch[1])


def dataset(samples, seed):
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :4].argmax(1))


with dt.init_dist() as info:
    mesh = dt.build_mesh()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard"), seed=0)
    loader = dt.build_loader(dataset(48, 1), mesh=mesh, global_batch_size=12, seed=0)
    held_out = dataset(38, 2)
    share = Subset(held_out, range(info.rank, len(held_out), info.world_size))
    test_loader = DataLoader(share, batch_size=4, drop_last=not FIXED)
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    log = dt.loggers.jsonl("metrics.jsonl")
    for batch in loader.until(STEPS):
        state, metrics = step(state, batch)
        log(state.step, dt.reduce_metrics(metrics))
    total = correct = count = 0.0
    with dt.shard.unshard_params(model), torch.no_grad():
        for x, labels in test_loader:
            logits = model(x)
            total += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            correct += (logits.argmax(1) == labels).sum().item()
            count += len(labels)
    total, correct, count = (dt.dist.reduce_sum(number) for number in (total, correct, count))
    log(state.step + 1, {"held_out_loss": total / count, "held_out_accuracy": correct / count})
