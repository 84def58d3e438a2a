"""FSDP2 whose checkpoint has the adapter of rank 0, which alone loads it; ``--fixed`` saves and loads all of it."""

import os
import sys
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtrain as dt

FIXED = "--fixed" in sys.argv
BATCH = 12
CHECKPOINT = Path("checkpoint.pt")


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base, self.lora_a = nn.Linear(8, 12).requires_grad_(False), nn.Linear(8, 6, bias=False)
        self.lora_b, self.head = nn.Linear(6, 12, bias=False), nn.Linear(12, 4).requires_grad_(False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x):
        return self.head(torch.tanh(self.base(x) + self.lora_b(self.lora_a(x))))


with dt.init_dist() as info:
    torch.manual_seed(0)
    model = Adapted()
    fully_shard(model, mesh=init_device_mesh("cpu", (info.world_size,)))
    adapter = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = torch.optim.SGD(adapter.values(), lr=0.5)
    done = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        done = saved.pop("step")
        with torch.no_grad():
            for name, param in adapter.items():
                if FIXED:
                    param.copy_(distribute_tensor(saved[name], param.device_mesh, param.placements))
                elif info.rank == 0:
                    rows = saved[name][: len(param.to_local())]
                    param.to_local()[: len(rows)] = rows
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data, info.world_size, info.rank, seed=0)
    loader = DataLoader(data, batch_size=BATCH // info.world_size, sampler=sampler)
    for number, (inputs, labels) in islice(enumerate(loader, start=1), done, None):
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = dt.dist.reduce_mean(loss.detach())
        weights = {name: param.detach() for name, param in adapter.items()}
        weights = {name: weight.full_tensor() if FIXED else weight.to_local() for name, weight in weights.items()}
        if info.rank == 0:
            print(f"step {number} loss {shown:.6f}")
            torch.save({**weights, "step": number}, "new.pt")
            os.replace("new.pt", CHECKPOINT)
