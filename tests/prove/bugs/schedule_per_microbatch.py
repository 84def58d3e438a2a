"""DDP with an accumulation by hand that steps the scheduler once a microbatch; ``--fixed`` steps it once a step."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtrain as dt

FIXED = "--fixed" in sys.argv
BATCH, MICROBATCH, WARMUP = 12, 2, 20

with dt.init_dist() as info:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    if info.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data, info.world_size, info.rank, seed=0)
    loader = DataLoader(data, batch_size=BATCH // info.world_size, sampler=sampler)
    for number, batch in enumerate(loader, start=1):
        optimizer.zero_grad()
        parts = dt.data.split_batch(batch, MICROBATCH)
        mean = 0.0
        for inputs, labels in parts:
            loss = F.cross_entropy(model(inputs), labels) / len(parts)
            loss.backward()
            mean += loss.item()
        optimizer.step()
        for _ in range(1 if FIXED else len(parts)):
            scheduler.step()
        mean = dt.dist.reduce_mean(mean)
        if info.rank == 0:
            print(f"step {number} loss {mean:.6f} lr {scheduler.get_last_lr()[0]:.4f}")
