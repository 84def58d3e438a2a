"""A mixture of experts with a top-2 router and a load-balancing loss."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

EXPERTS, TOP_K, DIM, GLOBAL_BATCH, STEPS, BALANCE = 4, 2, 12, 24, 10, 0.2


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def average(t):
    """Mean over the ranks, without gradient."""
    t = t.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(t)
    return t / world_size()


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)

    def forward(self, x):
        probs = self.gate(x).softmax(-1)
        weight, chosen = probs.topk(TOP_K, -1)
        used = F.one_hot(chosen, EXPERTS).sum(1).float()
        share = average(used.mean(0) / TOP_K)
        balance = EXPERTS * (share * probs.mean(0)).sum()
        return weight / weight.sum(-1, keepdim=True), chosen, balance, share


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router()
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, 24) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, 24, DIM) * 0.2)
        self.head = nn.Linear(DIM, 1)

    def forward(self, x):
        weight, chosen, balance, share = self.router(x)
        every = torch.einsum("bd,edh->beh", x, self.up).relu()
        every = torch.einsum("beh,ehd->bed", every, self.down)
        picked = every.gather(1, chosen.unsqueeze(-1).expand(-1, -1, DIM))
        mixed = x + (weight.unsqueeze(-1) * picked).sum(1)
        return self.head(mixed).squeeze(-1), balance, share


def data(step):
    g = torch.Generator().manual_seed(77 + step)
    x = torch.randn(GLOBAL_BATCH, DIM, generator=g) + 1.5 * torch.randint(0, 2, (GLOBAL_BATCH, 1), generator=g)
    return x, (x[:, 0] * x[:, 1]).tanh() + x[:, 2].abs()


def main():
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    world = world_size()
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(5)
    model = MoE()
    if dist.is_initialized():
        model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, y = (t.view(world, -1, *t.shape[1:])[rank] for t in data(step))
        out, balance, share = model(x)
        task = F.huber_loss(out, y)
        loss = task + BALANCE * balance
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        task, balance, load = average(task), average(balance), average(share)
        if rank == 0:
            load = " ".join(f"{v:.4f}" for v in load.tolist())
            print(f"[{step}] task={task:.7f} balance={balance:.7f} load={load}", flush=True)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
