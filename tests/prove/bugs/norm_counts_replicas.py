"""Clipping by a norm that adds up the squares of all ranks, also of replicated layers; ``--fixed`` counts these once."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtrain as dt

FIXED = "--fixed" in sys.argv
BATCH, MAX_NORM = 12, 0.1

with dt.init_dist() as info:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    if info.world_size > 1:
        fully_shard(model[0], mesh=init_device_mesh("cpu", (info.world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data, info.world_size, info.rank, seed=0)
    loader = DataLoader(data, batch_size=BATCH // info.world_size, sampler=sampler)
    for number, (inputs, labels) in enumerate(loader, start=1):
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        square = torch.zeros(())
        for grad in [param.grad for param in model.parameters()]:
            if isinstance(grad, DTensor):
                square += grad.to_local().square().sum()
            else:
                dist.all_reduce(grad)
                grad /= info.world_size
                square += grad.square().sum() / (info.world_size if FIXED else 1)
        dist.all_reduce(square)
        for param in model.parameters():
            param.grad *= (MAX_NORM / square.sqrt()).clamp(max=1.0)
        optimizer.step()
        shown = dt.dist.reduce_mean(loss.detach())
        if info.rank == 0:
            print(f"step {number} loss {shown:.6f}")
