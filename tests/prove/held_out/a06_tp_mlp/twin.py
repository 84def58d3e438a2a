# Residual MLP with hand-made tensor parallelism (Megatron style column/row split).
# All ranks see the whole batch; the hidden dimension is split.
import torch
import torch.distributed as dist
from torch import nn

D, HID, DEPTH, BS, NSTEP = 16, 36, 2, 18, 7


class CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


class SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class ColumnLinear(nn.Module):
    def __init__(self, n_in, n_out, rank, world):
        super().__init__()
        full = nn.Linear(n_in, n_out)  # same init everywhere, then keep our rows
        self.weight = nn.Parameter(full.weight.detach().chunk(world, 0)[rank].clone())
        self.bias = nn.Parameter(full.bias.detach().chunk(world, 0)[rank].clone())

    def forward(self, x):
        return CopyToGroup.apply(x) @ self.weight.t() + self.bias


class RowLinear(nn.Module):
    def __init__(self, n_in, n_out, rank, world):
        super().__init__()
        full = nn.Linear(n_in, n_out)
        self.weight = nn.Parameter(full.weight.detach().chunk(world, 1)[rank].clone())
        self.bias = nn.Parameter(full.bias.detach().clone())

    def forward(self, x):
        y = SumOverGroup.apply(x @ self.weight.t())
        return y + self.bias


class TPBlock(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = ColumnLinear(D, HID, rank, world)
        self.down = RowLinear(HID, D, rank, world)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(2024)
net = nn.Sequential(*[TPBlock(rank, world) for _ in range(DEPTH)], nn.Linear(D, 1))
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, NSTEP)
data_rng = torch.Generator().manual_seed(8)
w_true = torch.randn(D, 1, generator=data_rng)

for i in range(NSTEP):
    x = torch.randn(BS, D, generator=data_rng)
    y = torch.sin(x @ w_true)
    loss = ((net(x) - y) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    sched.step()
    if rank == 0:
        print("step", i, "mse", round(loss.item(), 6), "lr", round(sched.get_last_lr()[0], 7), flush=True)

dist.destroy_process_group()
