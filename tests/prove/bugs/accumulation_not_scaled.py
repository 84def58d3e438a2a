"""DDP with an accumulation by hand that adds up mean losses; ``--fixed`` divides by the number of microbatches."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtrain as dt

FIXED = "--fixed" in sys.argv
BATCH, MICROBATCH = 12, 2

with dt.init_dist() as info:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    if info.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data, info.world_size, info.rank, seed=0)
    loader = DataLoader(data, batch_size=BATCH // info.world_size, sampler=sampler)
    for number, batch in enumerate(loader, start=1):
        optimizer.zero_grad()
        parts = dt.data.split_batch(batch, MICROBATCH)
        mean = 0.0
        for inputs, labels in parts:
            loss = F.cross_entropy(model(inputs), labels)
            if FIXED:
                loss = loss / len(parts)
            loss.backward()
            mean += loss.item()
        optimizer.step()
        mean = dt.dist.reduce_mean(mean if FIXED else mean / len(parts))
        if info.rank == 0:
            print(f"step {number} loss {mean:.6f}")
