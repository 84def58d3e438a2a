"""Tensor parallel MLP blocks with DTensor. All ranks see the same batch."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, HIDDEN, BATCH, STEPS, MAX_NORM = 12, 48, 24, 10, 0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def clip(params, max_norm):
    params = [p for p in params if p.grad is not None]
    norm = torch.stack([whole(p.grad).pow(2).sum() for p in params]).sum().sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in params:
        local(p.grad).mul_(scale)
    return norm


def main():
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(10)
    net = Net()
    for b in net.blocks:
        parallelize_module(b, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, foreach=False)
    g = torch.Generator().manual_seed(12)
    w = torch.randn(WIDTH, 2, generator=g)
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=g)
        y = (x @ w).sin() * 2
        loss = nn.functional.mse_loss(net(x), y)
        opt.zero_grad()
        loss.backward()
        norm = clip(list(net.parameters()), MAX_NORM)
        opt.step()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.8f} norm {norm.item():.7f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
