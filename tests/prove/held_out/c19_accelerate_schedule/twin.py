"""Accelerate: a classifier with warmup and cosine decay."""
import math

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH, EPOCHS, WARMUP = 24, 3, 3


def make_loader(world):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(96, 10, generator=g)
    y = (x[:, :3].sum(1) > 0).long() + (x[:, 3] > 0.5).long()
    order = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(x, y), batch_size=GLOBAL_BATCH // world, shuffle=True, generator=order)


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = make_loader(accelerator.num_processes)
    total = EPOCHS * 96 // GLOBAL_BATCH

    def factor(step):
        if step < WARMUP:
            return (step + 1) / WARMUP
        return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, total - WARMUP)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    step = 0
    for epoch in range(EPOCHS):
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            mean_loss = accelerator.reduce(loss.detach(), "mean")
            accelerator.print(f"epoch {epoch} step {step} loss {mean_loss.item():.8f}", flush=True)
            step += 1
    return accelerator


if __name__ == "__main__":
    main().end_training()
