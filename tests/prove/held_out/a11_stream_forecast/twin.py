"""Forecast the next value of noisy seasonal series. Data come as a stream (IterableDataset, two workers)."""
import itertools
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

GLOBAL_BATCH = 24
WINDOW = 20
WORKERS = 2
STEPS = 8


class SeasonStream(IterableDataset):
    """Endless windows; the global batch number decides what a window looks like."""

    def __init__(self, rank, world, seed=0):
        self.rank, self.world, self.seed = rank, world, seed

    def window(self, index):
        g = torch.Generator().manual_seed(self.seed + index)
        period = 4 + 8 * torch.rand(1, generator=g)
        phase = 2 * math.pi * torch.rand(1, generator=g)
        t = torch.arange(WINDOW + 1)
        s = torch.sin(2 * math.pi * t / period + phase) + 0.1 * torch.randn(WINDOW + 1, generator=g)
        return s[:-1], s[-1:]

    def __iter__(self):
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        for batch in itertools.count(first, stride):
            base = batch * GLOBAL_BATCH
            for k in range(self.rank, GLOBAL_BATCH, self.world):
                yield self.window(base + k)


class CausalConv(nn.Module):
    def __init__(self, cin, cout, dilation):
        super().__init__()
        self.pad = dilation
        self.conv = nn.Conv1d(cin, cout, 2, dilation=dilation)

    def forward(self, x):
        return torch.relu(self.conv(nn.functional.pad(x, (self.pad, 0))))


class TCN(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stack = nn.Sequential(CausalConv(1, width, 1), CausalConv(width, width, 2), CausalConv(width, width, 4))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(self.stack(x[:, None])[:, :, -1])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    model = nn.parallel.DistributedDataParallel(TCN())
    opt = torch.optim.Adamax(model.parameters(), lr=8e-3)
    loss_fn = nn.HuberLoss()
    loader = DataLoader(SeasonStream(rank, world), batch_size=GLOBAL_BATCH // world, num_workers=WORKERS)

    for step, (x, y) in enumerate(itertools.islice(loader, STEPS)):
        pred = model(x)
        loss = loss_fn(pred, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        both = torch.stack([loss.detach(), (pred.detach() - y).abs().mean()])
        dist.all_reduce(both)
        both /= world
        if rank == 0:
            print(f"step {step} huber {both[0].item():.6f} mae {both[1].item():.6f}", flush=True)
    del loader
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
