"""DDP whose incomplete last accumulation of an epoch leaks into the next epoch; ``--fixed`` leaves those samples out."""

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtrain as dt

FIXED = "--fixed" in sys.argv
BATCH, MICROBATCH, EPOCHS = 24, 2, 4
CHECKPOINT = Path("checkpoint.pt")

with dt.init_dist() as info:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    begin = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["epoch"]
    ddp = DistributedDataParallel(model) if info.world_size > 1 else model
    x = torch.randn(36, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :4].argmax(1))  # an epoch is one and a half batches
    sampler = DistributedSampler(data, info.world_size, info.rank, seed=0)
    loader = DataLoader(data, batch_size=MICROBATCH, sampler=sampler)
    accumulate = BATCH // MICROBATCH // info.world_size
    for epoch in range(begin, EPOCHS):
        sampler.set_epoch(epoch)
        for index, (inputs, labels) in enumerate(loader):
            if FIXED and index >= len(loader) // accumulate * accumulate:
                break
            loss = F.cross_entropy(ddp(inputs), labels) / accumulate
            loss.backward()
            if (index + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        if info.rank == 0:
            print(f"epoch {epoch} weight {model[0].weight.norm():.6f}")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, "new.pt")
            os.replace("new.pt", CHECKPOINT)
