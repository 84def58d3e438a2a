"""Expert parallelism whose experts add up the gradients of all ranks' samples, beside an average; ``--fixed`` divides these."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtrain as dt

FIXED = "--fixed" in sys.argv
EXPERTS, BATCH = 6, 12


class Experts(nn.Module):
    """Each rank computes its experts for the rows of all ranks."""

    def __init__(self, info):
        super().__init__()
        self.router, self.weight = nn.Linear(8, EXPERTS), nn.Parameter(torch.randn(EXPERTS, 8, 8))
        self.info, self.own = info, torch.arange(EXPERTS).chunk(info.world_size)[info.rank]

    def forward(self, x):
        rows, gates = (dt.dist.all_gather_with_grad(part) for part in (x, self.router(x).softmax(-1)))
        outputs = torch.einsum("bi,eio,be->bo", rows, self.weight[self.own], gates[:, self.own])
        return all_reduce(outputs).chunk(self.info.world_size)[self.info.rank]


with dt.init_dist() as info:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Experts(info), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data, info.world_size, info.rank, seed=0)
    for number, (inputs, labels) in enumerate(DataLoader(data, BATCH // info.world_size, sampler=sampler), start=1):
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            if FIXED or param is not model[2].weight:
                param.grad /= info.world_size
        optimizer.step()
        shown = dt.dist.reduce_mean(loss.detach())
        if info.rank == 0:
            print(f"step {number} loss {shown:.6f}")
