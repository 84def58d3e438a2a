"""A correct loop by hand: a loader that is made anew in each epoch, or none and 1,000 steps; a scaler that skips; a clock."""

import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtrain as dt

with dt.init_dist() as info:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :4].argmax(1))
    share = 12 // info.world_size

    def train(inputs, labels, scale=1.0):
        started = time.time()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels) * scale
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        if info.rank == 0:
            print(f"loss {mean / info.world_size:.6f}")
            print(f"{time.time() - started:.1f} s")

    # The first gradient overflows, and the scaler skips its update.
    train(*data[torch.arange(12)[info.rank :: info.world_size]], scale=float("inf"))
    if "--endless" in sys.argv:
        for step in range(1000):
            rows = (torch.arange(12) + 12 * step)[info.rank :: info.world_size] % 24
            train(*data[rows])
    for epoch in range(10):
        sampler = DistributedSampler(data, seed=epoch)
        for batch in DataLoader(data, batch_size=share, sampler=sampler):
            train(*batch)
