"""DDP beside a loss with a parameter of its own, which no rank shares; ``--fixed`` averages the gradient of that, too."""

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


class CosineLoss(nn.Module):
    """Cross entropy of cosines between embeddings and the centers of classes."""

    def __init__(self, classes, dim):
        super().__init__()
        self.centers, self.scale = nn.Parameter(torch.randn(classes, dim)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x, labels):
        return F.cross_entropy(self.scale.exp() * F.normalize(x) @ F.normalize(self.centers).T, labels)


with dt.init_dist() as info:
    torch.manual_seed(0)
    model, criterion = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6)), CosineLoss(4, 6)
    if info.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(data, info.world_size, info.rank, seed=0)
    loader = DataLoader(data, batch_size=BATCH // info.world_size, sampler=sampler)
    for number, (inputs, labels) in enumerate(loader, start=1):
        loss = criterion(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        if FIXED and info.world_size > 1:
            for param in criterion.parameters():
                dist.all_reduce(param.grad)
                param.grad /= info.world_size
        optimizer.step()
        shown = dt.dist.reduce_mean(loss.detach())
        if info.rank == 0:
            print(f"step {number} loss {shown:.6f}")
