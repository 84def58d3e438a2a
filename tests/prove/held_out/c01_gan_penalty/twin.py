"""WGAN-GP on a ring of Gaussians."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

GLOBAL_BATCH, STEPS, CRITIC_ITERS, LAMBDA = 24, 10, 2, 10.0

distributed = "WORLD_SIZE" in os.environ
if distributed:
    dist.init_process_group("gloo")
rank = dist.get_rank() if distributed else 0
world = dist.get_world_size() if distributed else 1
local = GLOBAL_BATCH // world
mine = slice(rank * local, (rank + 1) * local)

torch.manual_seed(7)


def mlp(i, o):
    hidden = [nn.Linear(i, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU()]
    return nn.Sequential(*hidden, nn.Linear(32, o, bias=False))


gen, critic = mlp(4, 2), mlp(2, 1)
gen_core, critic_core = gen, critic
if distributed:
    gen, critic = DDP(gen), DDP(critic)
opt_g = torch.optim.Adam(gen.parameters(), lr=2e-3, betas=(0.5, 0.9))
opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
stream = torch.Generator().manual_seed(11)


def draw_real():
    angle = torch.randint(0, 8, (GLOBAL_BATCH,), generator=stream) * (torch.pi / 4)
    centre = torch.stack([angle.cos(), angle.sin()], 1) * 2
    return (centre + 0.05 * torch.randn(GLOBAL_BATCH, 2, generator=stream))[mine]


def draw_latent():
    return torch.randn(GLOBAL_BATCH, 4, generator=stream)[mine]


def mean_over_ranks(value):
    value = value.detach().clone()
    if distributed:
        dist.all_reduce(value)
    return (value / world).item()


for step in range(STEPS):
    for _ in range(CRITIC_ITERS):
        real = draw_real()
        with torch.no_grad():
            fake = gen_core(draw_latent())
        eps = torch.rand(GLOBAL_BATCH, 1, generator=stream)[mine]
        mix = (eps * real + (1 - eps) * fake).requires_grad_()
        score_real, score_fake, score_mix = critic(torch.cat([real, fake, mix])).chunk(3)
        grad = torch.autograd.grad(score_mix.sum(), mix, create_graph=True)[0]
        penalty = (grad.norm(dim=1) - 1).pow(2).mean()
        loss_d = score_fake.mean() - score_real.mean() + LAMBDA * penalty
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()

    loss_g = -critic_core(gen(draw_latent())).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()

    d, gp, g = (mean_over_ranks(v) for v in (loss_d, penalty, loss_g))
    if rank == 0:
        print(f"step {step} critic {d:.8f} penalty {gp:.8f} generator {g:.8f}", flush=True)
