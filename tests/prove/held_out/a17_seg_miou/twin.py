"""Tiny U-Net on synthetic blobs, mean IoU on a validation set every other step."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset

CLASSES = 3


class Blobs(Dataset):
    def __init__(self, n, seed):
        self.n, self.seed = n, seed

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 10_000 + i)
        yy, xx = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
        mask = torch.zeros(16, 16, dtype=torch.long)
        for c in (1, 2):
            cy, cx = (torch.randint(3, 13, (1,), generator=g) for _ in range(2))
            rad = torch.randint(2, 6, (1,), generator=g)
            mask[(yy - cy) ** 2 + (xx - cx) ** 2 <= rad ** 2] = c
        img = mask[None] * 0.5 + 0.2 * torch.randn(1, 16, 16, generator=g)
        return img, mask


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.ReLU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = block(1, 8), block(8, 16), block(24, 8)
        self.out = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x):
        s = self.a(x)
        d = self.b(F.max_pool2d(s, 2))
        return self.out(self.c(torch.cat([s, F.interpolate(d, scale_factor=2)], 1)))


@torch.no_grad()
def validate(model, loader):
    model.eval()
    inter, union = torch.zeros(CLASSES), torch.zeros(CLASSES)
    for img, mask in loader:
        pred = model(img).argmax(1)
        for c in range(CLASSES):
            inter[c] += ((pred == c) & (mask == c)).sum()
            union[c] += ((pred == c) | (mask == c)).sum()
    model.train()
    dist.all_reduce(inter)
    dist.all_reduce(union)
    return (inter / union.clamp(min=1)).mean()


def run(cfg):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    net = UNet()
    ddp = DistributedDataParallel(net)
    opt = torch.optim.AdamW(ddp.parameters(), lr=cfg.lr)
    train = Blobs(cfg.batch * cfg.steps, 1)
    val_set = Blobs(12, 2)
    val = DataLoader(Subset(val_set, range(rank, len(val_set), world)), batch_size=2)
    # rank r takes every world-th image, so a step sees the same images on any number of ranks
    loader = DataLoader(Subset(train, range(rank, len(train), world)), batch_size=cfg.batch // world)

    for step, (img, mask) in enumerate(loader, 1):
        loss = F.cross_entropy(ddp(img), mask)
        opt.zero_grad()
        loss.backward()
        opt.step()
        dist.all_reduce(show := loss.detach() / world)
        line = f"step {step} loss {show.item():.6f}"
        if step % 2 == 0:
            line += f" val_miou {validate(net, val).item():.5f}"
        if rank == 0:
            print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=12)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--lr", type=float, default=2e-2)
    p.add_argument("--seed", type=int, default=0)
    run(p.parse_args())
