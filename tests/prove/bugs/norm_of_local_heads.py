"""Ranks that compute some heads each, and keep the gradient of a norm that all heads share; ``--fixed`` sums it over ranks."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dtrain as dt

FIXED = "--fixed" in sys.argv
HEADS, DIM = 6, 2


class Copy(torch.autograd.Function):
    """Identity whose gradient is the sum over ranks, of which each has that of its heads."""

    forward = staticmethod(lambda context, x: x.view_as(x))
    backward = staticmethod(lambda context, grad: total(grad))


class Sum(torch.autograd.Function):
    """Sum over ranks. The gradient of the sum is equal on all ranks."""

    forward = staticmethod(lambda context, x: total(x))
    backward = staticmethod(lambda context, grad: grad)


def total(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


class Heads(nn.Module):
    def __init__(self, info):
        super().__init__()
        self.own = torch.arange(HEADS).chunk(info.world_size)[info.rank]
        self.query, self.out = nn.Parameter(torch.randn(HEADS, 8, DIM)), nn.Parameter(torch.randn(HEADS, DIM, 8))
        self.norm = nn.RMSNorm(DIM)

    def forward(self, x):
        query = self.norm(torch.einsum("bi,hid->bhd", Copy.apply(x), self.query[self.own]))
        return Sum.apply(torch.einsum("bhd,hdo->bo", query.tanh(), self.out[self.own]))


with dt.init_dist() as info:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Heads(info), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=12)
    for number, (inputs, labels) in enumerate(loader, start=1):
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        for param in [model[1].query, model[1].out, *[model[1].norm.weight] * FIXED]:
            dist.all_reduce(param.grad)
        optimizer.step()
        if info.rank == 0:
            print(f"step {number} loss {loss:.6f}")
