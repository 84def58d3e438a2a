"""A correct meta-learning loop (MAML): tasks by rank, inner gradients through ``functional_call``, gradients summed by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.functional import mse_loss

TASKS, STEPS = 6, 6


def task(number):
    generator = torch.Generator().manual_seed(number)
    x, weight = torch.randn(10, 4, generator=generator), torch.randn(4, 1, generator=generator)
    return x[:5], x[:5] @ weight, x[5:], x[5:] @ weight


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(STEPS):
    optimizer.zero_grad()
    total = torch.zeros(())
    for number in range(step * TASKS + rank, (step + 1) * TASKS, world_size):
        x, y, x_test, y_test = task(number)
        params = dict(model.named_parameters())
        for _ in range(2):
            loss = mse_loss(functional_call(model, params, (x,)), y)
            gradients = torch.autograd.grad(loss, list(params.values()), create_graph=True)
            params = {name: param - 0.1 * g for (name, param), g in zip(params.items(), gradients, strict=True)}
        loss = mse_loss(functional_call(model, params, (x_test,)), y_test) / TASKS
        loss.backward()
        total += loss.detach()
    for param in model.parameters():
        dist.all_reduce(param.grad)
    optimizer.step()
    dist.all_reduce(total)
    if rank == 0:
        print(f"step {step}: meta loss {total.item():.5f}")
dist.destroy_process_group()
