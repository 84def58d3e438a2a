# Matrix factorisation with BPR loss (implicit feedback). Own batch sampler, sparse-ish data in memory.
import os, torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import Dataset, DataLoader, Sampler

N_USERS, N_ITEMS = 40, 60


class Clicks(Dataset):
    def __init__(self, n=96, seed=4):
        g = torch.Generator().manual_seed(seed)
        self.u = torch.randint(0, N_USERS, (n,), generator=g)
        self.pos = (self.u + torch.randint(0, 5, (n,), generator=g)) % N_ITEMS
        self.neg = torch.randint(0, N_ITEMS, (n,), generator=g)

    def __len__(self):
        return self.u.numel()

    def __getitem__(self, i):
        return self.u[i], self.pos[i], self.neg[i]


class ShardedBatchSampler(Sampler):
    """Shuffles once per epoch, cuts into global batches, returns this rank's part of each."""

    def __init__(self, n, global_batch, rank, world, seed=0):
        self.n, self.gb, self.rank, self.world, self.seed = n, global_batch, rank, world, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.n // self.gb

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.n, generator=g).tolist()
        for b in range(len(self)):
            batch = order[b * self.gb:(b + 1) * self.gb]
            yield batch[self.rank::self.world]


class MF(torch.nn.Module):
    def __init__(self, k=8):
        super().__init__()
        self.user = torch.nn.Embedding(N_USERS, k)
        self.item = torch.nn.Embedding(N_ITEMS, k)
        self.bias = torch.nn.Embedding(N_ITEMS, 1)
        for e in (self.user, self.item, self.bias):
            torch.nn.init.normal_(e.weight, std=0.1)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1) + self.bias(i).squeeze(-1)


def sync(module, world):
    flat = torch.cat([p.grad.flatten() for p in module.parameters()])
    dist.all_reduce(flat)
    flat /= world
    k = 0
    for p in module.parameters():
        p.grad.copy_(flat[k:k + p.numel()].view_as(p))
        k += p.numel()


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(77)
    data = Clicks()
    sampler = ShardedBatchSampler(len(data), 48, rank, world, seed=5)
    loader = DataLoader(data, batch_sampler=sampler)
    model = MF()
    opt = torch.optim.Adagrad(model.parameters(), lr=0.1)

    n_steps = 0
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for u, p, n in loader:
            diff = model(u, p) - model(u, n)
            reg = 1e-3 * (model.user(u).pow(2).sum(-1) + model.item(p).pow(2).sum(-1)).mean()
            loss = -F.logsigmoid(diff).mean() + reg
            opt.zero_grad()
            loss.backward()
            sync(model, world)
            opt.step()
            s = torch.stack([loss.detach(), (diff > 0).to(loss.dtype).mean()]) / world
            dist.all_reduce(s)
            if rank == 0:
                print(f"epoch {epoch} step {n_steps} bpr {s[0].item():.6f} auc {s[1].item():.4f}", flush=True)
            n_steps += 1
    dist.destroy_process_group()


main()
