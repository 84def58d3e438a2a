"""Mixed precision that clips the gradient while it is multiplied by the loss scale; ``--fixed`` takes the scale off before."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtrain as dt

FIXED = "--fixed" in sys.argv
BATCH = 12

with dt.init_dist() as info:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    if info.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data, info.world_size, info.rank, seed=0)
    loader = DataLoader(data, batch_size=BATCH // info.world_size, sampler=sampler)
    for number, (inputs, labels) in enumerate(loader, start=1):
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if FIXED:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        shown = dt.dist.reduce_mean(loss.detach())
        if info.rank == 0:
            print(f"step {number} loss {shown:.6f}")
