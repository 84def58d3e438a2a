# Small transformer encoder trained with FSDP2 (fully_shard) on a "which half has more ones" task.
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclass
class Config:
    global_batch: int = 24
    seq_len: int = 12
    d_model: int = 24
    n_layers: int = 2
    lr: float = 0.05
    max_grad_norm: float = 0.25
    steps: int = 6
    seed: int = 1234


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.att = nn.MultiheadAttention(d, 3, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        y = self.ln1(x)
        x = x + self.att(y, y, y, need_weights=False)[0]
        return x + self.ff(self.ln2(x))


class Encoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(2, cfg.d_model)
        self.pos = nn.Parameter(torch.randn(cfg.seq_len, cfg.d_model) * 0.1)
        self.blocks = nn.ModuleList(Block(cfg.d_model) for _ in range(cfg.n_layers))
        self.out = nn.Linear(cfg.d_model, 2)

    def forward(self, ids):
        x = self.tok(ids) + self.pos
        for b in self.blocks:
            x = b(x)
        return self.out(x.mean(1))


def get_batch(cfg, step, rank, world):
    g = torch.Generator().manual_seed(cfg.seed + step)
    ids = torch.randint(0, 2, (cfg.global_batch, cfg.seq_len), generator=g)
    half = cfg.seq_len // 2
    y = (ids[:, :half].sum(1) > ids[:, half:].sum(1)).long()
    n = cfg.global_batch // world
    return ids[rank * n:(rank + 1) * n], y[rank * n:(rank + 1) * n]


def clip_gradients(params, max_norm):
    sq = torch.zeros(())
    for p in params:
        sq += p.grad.to_local().pow(2).sum()
    dist.all_reduce(sq)
    norm = sq.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in params:
        p.grad.to_local().mul_(scale)
    return norm


def main():
    cfg = Config()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(cfg.seed)
    model = Encoder(cfg)
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    params = list(model.parameters())
    opt = torch.optim.SGD(params, lr=cfg.lr, momentum=0.9)
    crit = nn.CrossEntropyLoss()

    for step in range(cfg.steps):
        ids, y = get_batch(cfg, step, rank, world)
        loss = crit(model(ids), y)
        loss.backward()
        clip_gradients(params, cfg.max_grad_norm)
        opt.step()
        opt.zero_grad()
        avg = loss.detach().clone()
        dist.all_reduce(avg)
        if rank == 0:
            print(f"[{step}] loss={avg.item() / world:.6f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
