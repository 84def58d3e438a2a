"""Click prediction: sparse embedding tables and a dense tower, two optimizers."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

USERS, ITEMS, GLOBAL_BATCH, STEPS = 40, 30, 24, 10


class ClickModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, 8, sparse=True)
        self.item = nn.Embedding(ITEMS, 8, sparse=True)
        self.tower = nn.Sequential(nn.Linear(17, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, user, item):
        u, i = self.user(user), self.item(item)
        return self.tower(torch.cat([u, i, (u * i).sum(1, keepdim=True)], 1)).squeeze(1)


def reduce_sparse(grad, world):
    """All ranks gather the rows of a sparse gradient."""
    grad = grad.coalesce()
    idx, val = grad.indices()[0], grad.values()
    parts = [None] * world
    dist.all_gather_object(parts, (idx, val))
    idx = torch.cat([p[0] for p in parts])
    val = torch.cat([p[1] for p in parts])
    return torch.sparse_coo_tensor(idx.unsqueeze(0), val, grad.shape).coalesce()


def sync_gradients(model, world):
    for p in model.parameters():
        if p.grad.is_sparse:
            p.grad = reduce_sparse(p.grad, world) / world
        else:
            dist.all_reduce(p.grad)
            p.grad /= world


def clicks():
    g = torch.Generator().manual_seed(6)
    n = GLOBAL_BATCH * STEPS
    user = torch.randint(0, USERS, (n,), generator=g)
    item = torch.randint(0, ITEMS, (n,), generator=g)
    liked = (user + item) % 3 == 0
    flip = torch.rand(n, generator=g) < 0.1
    return user, item, (liked ^ flip).float()


def main():
    distributed = "WORLD_SIZE" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    torch.manual_seed(4)
    model = ClickModel()
    tables = torch.optim.SGD([model.user.weight, model.item.weight], lr=2.0)
    tower = torch.optim.AdamW(model.tower.parameters(), lr=1e-2)
    columns = clicks()
    for step in range(STEPS):
        rows = slice(step * GLOBAL_BATCH + rank, (step + 1) * GLOBAL_BATCH, world)
        user, item, label = (c[rows] for c in columns)
        loss = F.binary_cross_entropy_with_logits(model(user, item), label)
        tables.zero_grad()
        tower.zero_grad()
        loss.backward()
        if distributed:
            sync_gradients(model, world)
            dist.all_reduce(loss.data)
        tables.step()
        tower.step()
        if rank == 0:
            print(f"step {step} logloss {loss.item() / world:.8f}", flush=True)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
