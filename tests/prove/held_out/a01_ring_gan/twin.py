"""Toy GAN: eight Gaussians on a ring, generator and discriminator both under DDP."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH = 48        # over all ranks
NZ = 6
STEPS = 6
SEED = 7


def mlp(i, o, h=32):
    return nn.Sequential(nn.Linear(i, h), nn.LeakyReLU(0.2), nn.Linear(h, h), nn.LeakyReLU(0.2), nn.Linear(h, o))


def ring(step):
    g = torch.Generator().manual_seed(SEED * 1000 + step)
    k = torch.randint(0, 8, (BATCH,), generator=g)
    centers = torch.stack([torch.cos(k * math.pi / 4), torch.sin(k * math.pi / 4)], 1)
    return 2.0 * centers + 0.05 * torch.randn(BATCH, 2, generator=g)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    per_rank = BATCH // world

    torch.manual_seed(SEED)
    gen, disc = DDP(mlp(NZ, 2)), DDP(mlp(2, 1))
    g_opt = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.999))
    d_opt = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.999))
    noise_rng = torch.Generator().manual_seed(SEED)

    def noise():
        z = torch.randn(BATCH, NZ, generator=noise_rng)
        return z[rank * per_rank:(rank + 1) * per_rank]

    for step in range(STEPS):
        real = ring(step)[rank * per_rank:(rank + 1) * per_rank]

        # discriminator
        with torch.no_grad():
            fake = gen(noise())
        out = disc(torch.cat([real, fake]))
        target = torch.cat([torch.ones(per_rank, 1), torch.zeros(per_rank, 1)])
        d_loss = F.binary_cross_entropy_with_logits(out, target)
        d_opt.zero_grad()
        d_loss.backward()
        d_opt.step()

        # generator
        g_out = disc(gen(noise()))
        g_loss = F.binary_cross_entropy_with_logits(g_out, torch.ones_like(g_out))
        g_opt.zero_grad()
        g_loss.backward()
        g_opt.step()

        stats = torch.stack([d_loss.detach(), g_loss.detach()])
        dist.all_reduce(stats)
        stats /= world
        if rank == 0:
            print(f"step {step} d_loss {stats[0].item():.6f} g_loss {stats[1].item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
