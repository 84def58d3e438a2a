"""FSDP2 with an optimizer that orthogonalizes the rank's rows of a gradient; ``--fixed`` orthogonalizes the whole gradient."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtrain as dt

FIXED = "--fixed" in sys.argv
BATCH = 12


class Orthogonal(torch.optim.Optimizer):
    """Descend along a matrix with almost orthonormal rows or columns."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                local, update = local_of(param), orthogonal(local_of(param.grad))
                if FIXED and isinstance(param, DTensor):
                    whole = orthogonal(param.grad.full_tensor())
                    update = distribute_tensor(whole, param.device_mesh, param.placements).to_local()
                local -= group["lr"] * update


def local_of(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def orthogonal(matrix):
    matrix = matrix / matrix.norm()
    for _ in range(5):
        matrix = 1.5 * matrix - 0.5 * matrix @ matrix.T @ matrix
    return matrix


with dt.init_dist() as info:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Tanh(), nn.Linear(12, 6, bias=False))
    if info.world_size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (info.world_size,)))
    optimizer = Orthogonal(model.parameters(), lr=0.05)
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :6].argmax(1))
    sampler = DistributedSampler(data, info.world_size, info.rank, seed=0)
    loader = DataLoader(data, batch_size=BATCH // info.world_size, sampler=sampler)
    for number, (inputs, labels) in enumerate(loader, start=1):
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = dt.dist.reduce_mean(loss.detach())
        if info.rank == 0:
            print(f"step {number} loss {shown:.6f}")
