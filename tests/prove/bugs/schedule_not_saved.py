"""DDP whose resume begins the warm-up of the rate again; ``--fixed`` continues the schedule."""

import os
import sys
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtrain as dt

FIXED = "--fixed" in sys.argv
BATCH, WARMUP = 12, 10
CHECKPOINT = Path("checkpoint.pt")

with dt.init_dist() as info:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    done = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    last = done - 1 if FIXED else -1
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP), last_epoch=last)
    ddp = DistributedDataParallel(model) if info.world_size > 1 else model
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data, info.world_size, info.rank, seed=0)
    loader = DataLoader(data, batch_size=BATCH // info.world_size, sampler=sampler)
    for number, (inputs, labels) in islice(enumerate(loader, start=1), done, None):
        loss = F.cross_entropy(ddp(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = dt.dist.reduce_mean(loss.detach())
        if info.rank == 0:
            print(f"step {number} loss {shown:.6f} lr {scheduler.get_last_lr()[0]:.4f}")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": number}, "new.pt")
            os.replace("new.pt", CHECKPOINT)
        scheduler.step()
