"""Sharpness-aware minimisation on a noisy spiral."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

GLOBAL_BATCH, STEPS, RHO = 24, 10, 0.1

if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
parallel = dist.is_initialized()
rank, world = (dist.get_rank(), dist.get_world_size()) if parallel else (0, 1)


class SAM:
    def __init__(self, params, base, rho):
        self.params, self.base, self.rho = list(params), base, rho
        self.moved = []

    @torch.no_grad()
    def ascend(self):
        norm = torch.stack([p.grad.norm() for p in self.params]).norm()
        self.moved = [p.grad * (self.rho / (norm + 1e-12)) for p in self.params]
        for p, e in zip(self.params, self.moved):
            p.add_(e)
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p, e in zip(self.params, self.moved):
            p.sub_(e)
        self.base.step()
        self.base.zero_grad()


def average_gradients(model):
    if parallel:
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world


def spiral(step):
    g = torch.Generator().manual_seed(90 + step)
    arm = torch.randint(0, 2, (GLOBAL_BATCH,), generator=g)
    r = torch.rand(GLOBAL_BATCH, generator=g) * 2 + 0.3
    a = 2.5 * r + torch.pi * arm
    x = torch.stack([r * a.cos(), r * a.sin()], 1) + 0.05 * torch.randn(GLOBAL_BATCH, 2, generator=g)
    return x[rank::world], arm[rank::world]


torch.manual_seed(19)
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
sam = SAM(model.parameters(), base, RHO)
for step in range(STEPS):
    x, y = spiral(step)
    losses = []
    for move in (sam.ascend, sam.descend):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        average_gradients(model)
        move()
        losses.append(loss.detach())
    shown = torch.stack(losses) / world
    if parallel:
        dist.all_reduce(shown)
    if rank == 0:
        print(f"step {step} loss {shown[0]:.8f} at the ascended weights {shown[1]:.8f}", flush=True)
if parallel:
    dist.destroy_process_group()
