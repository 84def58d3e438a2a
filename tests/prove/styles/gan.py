"""A correct GAN of two models and optimizers; ``--penalty`` trains the critic three times a step, with a gradient penalty."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
generator = DDP(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8)))
critic = DDP(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.999))
data = TensorDataset(torch.randn(24, 8, generator=torch.Generator().manual_seed(1)) + 1)
loader = DataLoader(data, batch_size=12 // world_size, sampler=DistributedSampler(data))
draws = torch.Generator().manual_seed(2)
parts = {"g": generator.module, "d": critic.module, "optimizer_g": optimizer_g, "optimizer_d": optimizer_d}


def noise(*shape):
    """Draw for the whole batch, and take this rank's rows."""
    return torch.randn(12, *shape, generator=draws)[rank::world_size]


def penalty(real, fake):
    mix = torch.rand(12, 1, generator=draws)[rank::world_size]
    x = (mix * real + (1 - mix) * fake).requires_grad_()
    (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return 10 * (grad.norm(dim=1) - 1).square().mean()


def train_critic(real):
    optimizer_d.zero_grad()
    fake = generator(noise(3)).detach()
    if "--penalty" in sys.argv:
        loss = critic(fake).mean() - critic(real).mean() + penalty(real, fake)
        loss.backward()
    else:
        loss = bce(critic(real), torch.ones(len(real), 1))
        loss.backward()
        loss_fake = bce(critic(fake), torch.zeros(len(real), 1))
        loss_fake.backward()
    optimizer_d.step()


start = 0
if os.path.exists("gan.pt"):
    saved = torch.load("gan.pt")
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    draws.set_state(saved["draws"])
    start = saved["epoch"]
for epoch in range(start, 10):
    loader.sampler.set_epoch(epoch)
    for (real,) in loader:
        for _ in range(3 if "--penalty" in sys.argv else 1):
            train_critic(real)
        optimizer_g.zero_grad()
        output = critic(generator(noise(3)))
        loss = -output.mean() if "--penalty" in sys.argv else bce(output, torch.ones_like(output))
        loss.backward()
        optimizer_g.step()
    if rank == 0:
        with torch.no_grad():
            sample = generator.module(torch.ones(4, 3))
        print(f"epoch {epoch}: mean {sample.mean():.4f}")
        saved = {name: part.state_dict() for name, part in parts.items()}
        torch.save(saved | {"draws": draws.get_state(), "epoch": epoch + 1}, "gan.tmp")
        os.replace("gan.tmp", "gan.pt")
    dist.barrier()
dist.destroy_process_group()
