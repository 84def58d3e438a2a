"""Regression with early stopping on a held-out set."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

GLOBAL_BATCH, MAX_EPOCHS, PATIENCE, MIN_DELTA = 12, 14, 2, 0.01


class Wave(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.rand(n, 4, generator=g) * 4 - 2
        noise = (0.2 + self.x[:, :1].abs()) * torch.randn(n, 1, generator=g)
        self.y = (0.5 * self.x.sum(1, keepdim=True)).sin() + 0.4 * noise

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class EarlyStopping:
    def __init__(self):
        self.best, self.bad = float("inf"), 0

    def should_stop(self, value):
        if value < self.best - MIN_DELTA:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= PATIENCE


def validate(model, loader, share):
    """Mean squared error of the held-out set, the same number on every rank."""
    stats = torch.zeros(2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            stats += torch.stack([(model(x) - y).pow(2).sum(), torch.tensor(float(len(x)))])
    model.train()
    share(stats)
    return (stats[0] / stats[1]).item()


def main():
    parallel = "WORLD_SIZE" in os.environ
    if parallel:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if parallel else (0, 1)
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    model = DDP(net) if parallel else net
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    train, held = Wave(72, 1), Wave(60, 4)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=5)
    loader = DataLoader(train, GLOBAL_BATCH // world, sampler=sampler)
    val_loader = DataLoader(Subset(held, range(rank, len(held), world)), 10)
    stopper = EarlyStopping()

    def share(stats):
        if parallel:
            dist.all_reduce(stats)

    for epoch in range(MAX_EPOCHS):
        sampler.set_epoch(epoch)
        losses = []
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        train_loss = torch.stack(losses).mean()
        share(train_loss)
        val = validate(net, val_loader, share)
        if rank == 0:
            print(f"epoch {epoch} train {train_loss.item() / world:.8f} val {val:.8f}", flush=True)
        if stopper.should_stop(val):
            break
    if rank == 0:
        print(f"stopped after epoch {epoch}, best {stopper.best:.8f}")


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
