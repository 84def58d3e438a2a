#!/usr/bin/env python
import argparse, glob, os, re
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--total-batch", type=int, default=30)
    p.add_argument("--iters", type=int, default=8)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--ckpt-dir", default="checkpoints")
    p.add_argument("--save-every", type=int, default=1)
    return p.parse_args()


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 8, 3, padding=1)
        self.n1 = nn.GroupNorm(2, 8)
        self.c2 = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.n2 = nn.GroupNorm(3, 12)
        self.fc = nn.Linear(12, 4)

    def forward(self, x):
        x = F.relu(self.n1(self.c1(x)))
        x = F.relu(self.n2(self.c2(x)))
        return self.fc(x.mean((2, 3)))


def batch_at(it, n):
    """n images with one bright quadrant, label = quadrant"""
    g = torch.Generator().manual_seed(500 + it)
    y = torch.randint(0, 4, (n,), generator=g)
    x = torch.randn(n, 1, 12, 12, generator=g) * 0.7
    for k in range(n):
        r, c = divmod(int(y[k]), 2)
        x[k, 0, 6 * r:6 * r + 6, 6 * c:6 * c + 6] += 1.0
    return x, y


def newest(folder):
    files = glob.glob(os.path.join(folder, "it*.pt"))
    return max(files, key=lambda f: int(re.search(r"it(\d+)", f).group(1)), default=None)


def main():
    a = parse()
    dist.init_process_group("gloo")
    rank, ws = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    model = DistributedDataParallel(ConvNet())
    optim = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=a.lr)
    first = 0

    path = newest(a.ckpt_dir)
    if path:
        ck = torch.load(path)
        model.module.load_state_dict(ck["model"])
        optim.load_state_dict(ck["optim"])
        first = ck["it"] + 1
        if rank == 0:
            print("resumed from", path)

    for it in range(first, a.iters):
        x, y = batch_at(it, a.total_batch)
        x, y = x[rank::ws], y[rank::ws]
        optim.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optim.step()

        m = torch.stack([loss.detach(), (logits.argmax(1) == y).to(loss.dtype).mean()])
        dist.all_reduce(m)
        m /= ws
        if rank == 0:
            print(f"iter {it}: loss {m[0].item():.6f} acc {m[1].item():.3f}", flush=True)

        if (it + 1) % a.save_every == 0:
            optim.consolidate_state_dict(to=0)
            if rank == 0:
                os.makedirs(a.ckpt_dir, exist_ok=True)
                tmp = os.path.join(a.ckpt_dir, "tmp")
                torch.save({"model": model.module.state_dict(), "optim": optim.state_dict(), "it": it}, tmp)
                os.replace(tmp, os.path.join(a.ckpt_dir, f"it{it}.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
