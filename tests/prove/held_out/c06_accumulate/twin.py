"""DDP with gradient accumulation; communication only where it is needed."""
import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--batch", type=int, default=24, help="samples per update, over all ranks")
parser.add_argument("--accum", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.05)
args = parser.parse_args()

ddp = "WORLD_SIZE" in os.environ
if ddp:
    dist.init_process_group("gloo")
rank, world = (dist.get_rank(), dist.get_world_size()) if ddp else (0, 1)

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 40), nn.SiLU(), nn.Linear(40, 40), nn.SiLU(), nn.Linear(40, 3))
model = DDP(net) if ddp else net
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=args.steps)

g = torch.Generator().manual_seed(42)
x = torch.randn(args.batch * args.steps, 10, generator=g)
y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin(), x[:, 3:].mean(1)], 1)


def microbatches():
    """args.accum pieces of each global batch; every rank takes its share of a piece."""
    for start in range(0, len(x), args.batch):
        rows = torch.arange(start, start + args.batch)
        for piece in rows.chunk(args.accum):
            share = piece[rank::world]
            yield x[share], y[share]


running = torch.zeros(())
for i, (xb, yb) in enumerate(microbatches()):
    last = (i + 1) % args.accum == 0
    first = i % args.accum == 0
    if first:
        optimizer.zero_grad()
        running.zero_()
    sync = contextlib.nullcontext() if last or not ddp else model.no_sync()
    with sync:
        loss = nn.functional.mse_loss(model(xb), yb) / args.accum
        loss.backward()
    running += loss.detach()
    if last:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if ddp:
            dist.all_reduce(running)
        if rank == 0:
            print(f"update {i // args.accum} loss {running.item() / world:.8f}", flush=True)
