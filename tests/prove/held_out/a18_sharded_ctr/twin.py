# Click prediction, DLRM style: embedding rows live on different ranks, the MLPs are replicated.
import torch
import torch.distributed as dist
from torch import nn

ROWS, DIM, FIELDS, BATCH, STEPS = 60, 8, 3, 36, 8


class ShardedLookup(torch.autograd.Function):
    """ids: (n, fields) of this rank. Row i lives on rank i % world at local position i // world."""

    @staticmethod
    def forward(ctx, table, ids):
        rank, world = dist.get_rank(), dist.get_world_size()
        bufs = [torch.empty_like(ids) for _ in range(world)]
        dist.all_gather(bufs, ids.contiguous())
        every = torch.stack(bufs)                              # world, n, fields
        own = every % world == rank
        local = torch.where(own, every // world, 0)
        vec = table[local] * own[..., None]
        dist.all_reduce(vec)
        ctx.save_for_backward(local, own)
        ctx.rows = table.shape
        return vec[rank]

    @staticmethod
    def backward(ctx, grad):
        local, own = ctx.saved_tensors
        world = dist.get_world_size()
        bufs = [torch.empty_like(grad) for _ in range(world)]
        dist.all_gather(bufs, grad.contiguous())
        g = torch.stack(bufs) * own[..., None] / world
        out = grad.new_zeros(ctx.rows)
        out.index_add_(0, local.flatten(), g.flatten(0, 2))
        return out, None


class ShardedEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        full = torch.randn(ROWS, DIM) * 0.7
        self.table = nn.Parameter(full[dist.get_rank()::dist.get_world_size()].clone())

    def forward(self, ids):
        return ShardedLookup.apply(self.table, ids)


class TopNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, DIM))
        self.top = nn.Sequential(nn.Linear(DIM + 6, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, dense, emb):
        d = self.bottom(dense)
        z = torch.cat([emb, d[:, None]], 1)
        inter = z @ z.transpose(1, 2)
        i, j = torch.triu_indices(FIELDS + 1, FIELDS + 1, 1)
        return self.top(torch.cat([d, inter[:, i, j]], 1))[:, 0]


def clicks(step):
    g = torch.Generator().manual_seed(300 + step)
    dense = torch.randn(BATCH, 4, generator=g)
    ids = torch.randint(0, ROWS // FIELDS, (BATCH, FIELDS), generator=g) + torch.arange(FIELDS) * (ROWS // FIELDS)
    p = torch.sigmoid(dense[:, 0] + (ids[:, 0] % 5 - 2.0))
    return dense, ids, torch.bernoulli(p, generator=g)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    emb = ShardedEmbedding()
    top = nn.parallel.DistributedDataParallel(TopNet())
    opt = torch.optim.SGD([{"params": top.parameters(), "lr": 0.1}, {"params": emb.parameters(), "lr": 8.0}])
    bce = nn.BCEWithLogitsLoss()
    for step in range(STEPS):
        dense, ids, y = (t.chunk(world)[rank] for t in clicks(step))
        loss = bce(top(dense, emb(ids)), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        logloss = loss.detach().clone()
        dist.all_reduce(logloss)
        if rank == 0:
            print(f"step {step} logloss {logloss.item() / world:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
