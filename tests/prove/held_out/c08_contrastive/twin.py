"""Two-view contrastive training with the negatives of all ranks."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

STEPS, GLOBAL_BATCH, DIM = 10, 24, 20

if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
RANK = dist.get_rank() if dist.is_initialized() else 0
WORLD = dist.get_world_size() if dist.is_initialized() else 1
LOCAL = GLOBAL_BATCH // WORLD


class Tower(nn.Module):
    def __init__(self, width=32, out=8):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, out))
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, a, b):
        z = F.normalize(self.net(torch.cat([a, b])), dim=-1)
        return *z.chunk(2), self.log_scale.exp()


def rows_of_all(z):
    """The embeddings of every rank, in the order of the ranks."""
    if WORLD == 1:
        return z
    parts = list(all_gather(z))
    parts[RANK] = z
    return torch.cat(parts)


def info_nce(za, zb, scale):
    target = torch.arange(LOCAL) + RANK * LOCAL
    ab = F.cross_entropy(scale * za @ rows_of_all(zb).T, target)
    ba = F.cross_entropy(scale * zb @ rows_of_all(za).T, target)
    return (ab + ba) / 2


def views(step):
    g = torch.Generator().manual_seed(step)
    base = torch.randn(GLOBAL_BATCH, DIM, generator=g)
    noise = 0.4 * torch.randn(2, GLOBAL_BATCH, DIM, generator=g)
    keep = slice(RANK * LOCAL, (RANK + 1) * LOCAL)
    return (base + noise[0])[keep], (base + noise[1])[keep]


torch.manual_seed(0)
model = Tower()
if dist.is_initialized():
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)

for step in range(STEPS):
    loss = info_nce(*model(*views(step)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(shown)
    if RANK == 0:
        print(f"step {step:2d}  loss {shown.item() / WORLD:.8f}", flush=True)
