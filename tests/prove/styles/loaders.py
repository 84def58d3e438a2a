"""A correct loop by hand over two loaders of equal sizes at once; ``--next`` reads them by ``next`` and counts 1,000 steps."""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtrain as dt


def load(seed, share):
    data = TensorDataset(torch.randn(24, 8, generator=torch.Generator().manual_seed(seed)))
    return DataLoader(data, batch_size=share, sampler=DistributedSampler(data, seed=seed))


with dt.init_dist() as info:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loaders = [load(seed, 8 // info.world_size) for seed in (1, 2)]

    def train(left, right):
        optimizer.zero_grad()
        (model(torch.cat([left, right])).square().mean()).backward()
        optimizer.step()

    if "--next" not in sys.argv:
        for epoch in range(5):
            for loader in loaders:
                loader.sampler.set_epoch(epoch)
            for (left,), (right,) in zip(*loaders, strict=True):
                train(left, right)
    else:
        readers, epoch = [iter(loader) for loader in loaders], 0
        for _ in range(1000):
            try:
                batches = [next(reader)[0] for reader in readers]
            except StopIteration:
                epoch += 1
                for loader in loaders:
                    loader.sampler.set_epoch(epoch)
                readers = [iter(loader) for loader in loaders]
                batches = [next(reader)[0] for reader in readers]
            train(*batches)
