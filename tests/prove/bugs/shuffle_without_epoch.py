"""DDP that does not tell its sampler the epoch, so all epochs have one order; ``--fixed`` tells it."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtrain as dt

FIXED = "--fixed" in sys.argv
BATCH, EPOCHS = 12, 2

with dt.init_dist() as info:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    if info.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data, info.world_size, info.rank, seed=0)
    loader = DataLoader(data, batch_size=BATCH // info.world_size, sampler=sampler)
    for epoch in range(EPOCHS):
        if FIXED:
            sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = F.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            shown = dt.dist.reduce_mean(loss.detach())
            if info.rank == 0:
                print(f"epoch {epoch} loss {shown:.6f} first sample {inputs[0, 0]:.6f}")
