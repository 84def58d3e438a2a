"""A correct loop with Lightning Fabric: its loaders, ``no_backward_sync``, checkpoints and a resume, a metric over ranks."""

import os
import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), strategy="ddp")
fabric.launch()
fabric.seed_everything(1)
accumulation = 2 if "--accumulate" in sys.argv else 1
x = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
data = TensorDataset(x, x[:, :4].argmax(1))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
state = {"model": model, "optimizer": optimizer, "epoch": 0}
if os.path.exists("last.txt"):
    with open("last.txt") as file:
        fabric.load(file.read(), state)
for epoch in range(state["epoch"], 6):
    # Fabric sets the epoch of a sampler to the number of passes of this process, which a resume begins again.
    sampler = DistributedSampler(data, fabric.world_size, fabric.global_rank, seed=epoch)
    loader = DataLoader(data, batch_size=12 // accumulation // fabric.world_size, sampler=sampler)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
    for number, (inputs, labels) in enumerate(loader, 1):
        is_last = number % accumulation == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            fabric.backward(loss / accumulation)
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
    fabric.print(f"epoch {epoch}: loss {mean:.5f}")
    state["epoch"] = epoch + 1
    fabric.save(f"epoch-{epoch}.ckpt", state)
    if fabric.is_global_zero:
        with open("last.txt", "w") as file:
            file.write(f"epoch-{epoch}.ckpt")
    fabric.barrier()
