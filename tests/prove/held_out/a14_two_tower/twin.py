"""Contrastive two-tower (CLIP-like) training; negatives come from all ranks."""
from dataclasses import dataclass
import math
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Args:
    batch: int = 24
    steps: int = 7
    lr: float = 0.3
    dim: int = 12


class TwoTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.img = nn.Sequential(nn.Conv2d(1, 6, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(54, dim))
        self.txt_emb = nn.EmbeddingBag(32, 16, mode="mean")
        self.txt = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, dim))
        self.log_scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, im, tx):
        a = F.normalize(self.img(im), dim=-1)
        b = F.normalize(self.txt(self.txt_emb(tx)), dim=-1)
        return a, b, self.log_scale.exp()


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.n = len(x)
        bufs = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(bufs, x.contiguous())
        return torch.cat(bufs)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        lo = dist.get_rank() * ctx.n
        return grad[lo:lo + ctx.n]


def clip_loss(a, b, scale):
    all_a, all_b = AllGather.apply(a), AllGather.apply(b)
    labels = dist.get_rank() * len(a) + torch.arange(len(a))
    li = F.cross_entropy(scale * a @ all_b.t(), labels)
    lt = F.cross_entropy(scale * b @ all_a.t(), labels)
    return (li + lt) / 2


def pairs(step, n):
    g = torch.Generator().manual_seed(6000 + step)
    key = torch.randint(0, 32, (n, 3), generator=g)
    im = 0.3 * torch.randn(n, 1, 8, 8, generator=g)
    for j in range(3):
        im[torch.arange(n), 0, key[:, j] // 8, key[:, j] % 8] += 2.0
    return im, key


if __name__ == "__main__":
    args = Args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100)
    model = DDP(TwoTower(args.dim))
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    n = args.batch // world
    for step in range(args.steps):
        im, tx = pairs(step, args.batch)
        a, b, scale = model(im[rank * n:rank * n + n], tx[rank * n:rank * n + n])
        loss = clip_loss(a, b, scale)
        opt.zero_grad()
        loss.backward()
        opt.step()
        dist.all_reduce(rep := loss.detach().clone())
        if rank == 0:
            print(f"step {step}  loss {rep.item() / world:.6f}  scale {scale.item():.4f}", flush=True)
    dist.destroy_process_group()
