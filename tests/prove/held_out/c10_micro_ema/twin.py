"""Imbalanced classes, weighted loss, accumulated microbatches, and averaged weights for evaluation."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

p = argparse.ArgumentParser()
p.add_argument("--micro-batch-size", type=int, default=2, help="samples of one rank in one forward")
p.add_argument("--global-batch-size", type=int, default=24)
p.add_argument("--steps", type=int, default=10)
p.add_argument("--ema", type=float, default=0.9)
args = p.parse_args()

if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
multi = dist.is_initialized()
rank = dist.get_rank() if multi else 0
world = dist.get_world_size() if multi else 1

torch.manual_seed(13)
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(args.ema))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def sample(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), n, replacement=True, generator=g)
    centre = torch.tensor([[0.0, 0, 0, 0, 0, 0], [1, 1, 0, 0, -1, 0], [0, -1, 1, 1, 0, 1]])
    return centre[y] + 0.7 * torch.randn(n, 6, generator=g), y


class_weight = torch.tensor([0.5, 1.5, 3.0])
val_x, val_y = sample(300, 999)


def sum_over_ranks(t):
    if multi:
        dist.all_reduce(t)
    return t


def validate():
    averaged.eval()
    with torch.no_grad():
        return F.cross_entropy(averaged(val_x), val_y, weight=class_weight).item()


for step in range(args.steps):
    x, y = sample(args.global_batch_size, step)
    norm = class_weight[y].sum()
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]
    optimizer.zero_grad()
    total = torch.zeros(())
    for xb, yb in zip(x.split(args.micro_batch_size), y.split(args.micro_batch_size)):
        loss = F.cross_entropy(model(xb), yb, weight=class_weight, reduction="sum") / norm
        loss.backward()
        total += loss.detach()
    for q in model.parameters():
        sum_over_ranks(q.grad)
    optimizer.step()
    averaged.update_parameters(model)
    total = sum_over_ranks(total).item()
    if rank == 0:
        print(f"step {step} loss {total:.8f} ema_val {validate():.8f}", flush=True)

if multi:
    dist.destroy_process_group()
