"""DDP with a contrastive loss whose gather stops the gradient; ``--fixed`` gathers with it."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtrain as dt

FIXED = "--fixed" in sys.argv
BATCH = 12


def gather(rows):
    if FIXED:
        return dt.dist.all_gather_with_grad(rows)
    if not dist.is_initialized():
        return rows
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows)
    parts[dist.get_rank()] = rows
    return torch.cat(parts)


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x, y):
        return F.normalize(self.left(x)), F.normalize(self.right(y))


with dt.init_dist() as info:
    torch.manual_seed(0)
    model = TwoTowers()
    if info.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, noise = torch.randn(2, 48, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x + 0.3 * noise)
    sampler = DistributedSampler(data, info.world_size, info.rank, seed=0)
    loader = DataLoader(data, batch_size=BATCH // info.world_size, sampler=sampler)
    for number, (left, right) in enumerate(loader, start=1):
        queries, keys = model(left, right)
        labels = torch.arange(len(queries)) + info.rank * len(queries)
        loss = F.cross_entropy(10 * queries @ gather(keys).T, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = dt.dist.reduce_mean(loss.detach())
        if info.rank == 0:
            print(f"step {number} loss {shown:.6f}")
