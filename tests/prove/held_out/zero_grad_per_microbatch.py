"""An accumulation by hand that zeroes the gradient before each microbatch; ``--fixed`` zeroes it once a step."""

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
        for inputs, labels in parts:
            if not FIXED:
                optimizer.zero_grad()
            (F.cross_entropy(model(inputs), labels) / len(parts)).backward()
        optimizer.step()
        if info.rank == 0:
            print(f"step {number}")
