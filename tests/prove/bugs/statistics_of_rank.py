"""A normalizer whose running statistics are those of the rank's own samples; ``--fixed`` averages them over ranks."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtrain as dt

FIXED = "--fixed" in sys.argv
BATCH = 12


class Normalizer(nn.Module):
    """Divide by the running mean of squares, before the batch is added to it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("square", torch.ones(8))

    def forward(self, x):
        y = x / self.square.sqrt()
        square = x.square().mean(0)
        if FIXED:
            square = dt.dist.reduce_mean(square)
        self.square.lerp_(square, 0.3)
        return y


with dt.init_dist() as info:
    torch.manual_seed(0)
    model = nn.Sequential(Normalizer(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data, info.world_size, info.rank, seed=0)
    loader = DataLoader(data, batch_size=BATCH // info.world_size, sampler=sampler)
    for number, (inputs, labels) in enumerate(loader, start=1):
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= info.world_size
        optimizer.step()
        shown = dt.dist.reduce_mean(loss.detach())
        if info.rank == 0:
            print(f"step {number} loss {shown:.6f}")
