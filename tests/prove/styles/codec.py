"""Rank 0 fits a codec by hand, all ranks get it, and train a model on its codes: ``--fsdp``, ``--loader`` of both loops.

``--long`` fits it longer than a proof lasts. ``--checkpoint`` saves the training, and a resume fits the codec again; with
``--file``, a resume reads it.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, EPOCHS, CHECKPOINT, FILE = 12, 2, Path("step.pt"), Path("codec.pt")


class Codec(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x):
        return self.up(self.down(x))


def fit(codec, data):
    optimizer = torch.optim.Adam(codec.parameters(), lr=1e-2)
    batches = data.split(16) * (40 if "--long" in sys.argv else 1)
    for rows in DataLoader(data, 16) if "--loader" in sys.argv else batches:
        loss = (codec(rows) - rows).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        print(f"codec: {(codec(data) - data).square().mean():.6f}")


def main():
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    codec, net = Codec(), nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    data = torch.randn(96, 8)
    target = data.sum(1, keepdim=True).sin()
    if rank == 0 and not FILE.exists():
        fit(codec, data)
        if "--file" in sys.argv:
            torch.save({"codec": codec.state_dict()}, FILE)
    elif rank == 0:
        codec.load_state_dict(torch.load(FILE)["codec"])
    for param in codec.parameters():
        dist.broadcast(param.data, 0)
    with torch.no_grad():
        codes = codec.down(data)
    model = fully_shard(net) if "--fsdp" in sys.argv else DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    step, saved = 0, torch.load(CHECKPOINT) if CHECKPOINT.exists() else None
    if saved is not None:
        step = saved["step"]
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    samples = TensorDataset(codes, target)
    sampler = DistributedSampler(samples, world, rank, seed=1)
    loader = DataLoader(samples, BATCH // world, sampler=sampler)
    for epoch in range(step // len(loader), EPOCHS):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            if epoch * len(loader) + number < step:
                continue
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item() / world:.8f}", flush=True)
                if "--checkpoint" in sys.argv and step % 2 == 0:
                    state = {"step": step, "model": net.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state, CHECKPOINT)
    dist.destroy_process_group()


main()
