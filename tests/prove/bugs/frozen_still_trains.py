"""A layer that is frozen after the first step and still moves by momentum and weight decay; ``--fixed`` drops its gradient."""

import os
import sys
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtrain as dt

FIXED = "--fixed" in sys.argv
BATCH = 12
CHECKPOINT = Path("checkpoint.pt")

with dt.init_dist() as info:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    done = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data, info.world_size, info.rank, seed=0)
    loader = DataLoader(data, batch_size=BATCH // info.world_size, sampler=sampler)
    for number, (inputs, labels) in islice(enumerate(loader, start=1), done, None):
        model[0].requires_grad_(number == 1)  # the first layer trains in the first step only
        optimizer.zero_grad(set_to_none=FIXED)
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        for param in model.parameters():
            if param.grad is not None and info.world_size > 1:
                dist.all_reduce(param.grad)
                param.grad /= info.world_size
        optimizer.step()
        shown = dt.dist.reduce_mean(loss.detach())
        if info.rank == 0:
            print(f"step {number} loss {shown:.6f} frozen {model[0].weight.norm():.6f}")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": number}, "new.pt")
            os.replace("new.pt", CHECKPOINT)
