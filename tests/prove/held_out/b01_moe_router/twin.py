"""Tiny mixture of experts on drawn data, dense routing, with a router z-loss (ST-MoE)."""
import torch
import torch.nn.functional as F
from torch import nn

import dtrain as dt

D, EXPERTS, CLASSES = 16, 4, 5
Z_COEF = 0.05


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(D, 32)
        self.down = nn.Linear(32, D)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(10, D)
        self.router = nn.Linear(D, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x):
        h = self.inp(x)
        scores = self.router(h)
        gates = scores.softmax(-1)
        mixed = torch.stack([e(h) for e in self.experts], -2)
        h = h + (gates[..., None] * mixed).sum(-2)
        return self.head(h), scores


def loss_fn(model, batch):
    x, y = batch
    logits, scores = model(x)
    ce = dt.cross_entropy(logits, y)
    z = scores.logsumexp(-1).pow(2)
    total = ce.total + Z_COEF * z.sum()
    return dt.LossSum(total=total, weight=ce.weight, aux={"z": (z.detach().sum(), len(z))})


def make_data(n=240):
    g = torch.Generator().manual_seed(11)
    x = torch.randn(n, 10, generator=g)
    w = torch.randn(10, CLASSES, generator=g)
    return torch.utils.data.TensorDataset(3 * x, (x @ w).argmax(1))


with dt.init_dist() as dist:
    torch.manual_seed(3)
    mesh = dt.build_mesh()
    model = dt.shard_model(MoE(), mesh, strategy="full_shard", blocks=(Expert,))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = dt.build_loader(make_data(), mesh=mesh, global_batch_size=24, seed=5)
    step = dt.compose_step(loss_fn, [dt.transforms.clip_by_norm(5.0)])
    state = step.init(model, opt, loader=loader)
    for batch in loader.until("8ba"):
        state, metrics = step(state, batch)
        m = dt.reduce_metrics(metrics)
        dist.print(f"{state.step} loss {m['loss']:.6f} z {m['z']:.6f}")
