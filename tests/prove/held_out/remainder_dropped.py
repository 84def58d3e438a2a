"""Each rank takes every n-th sample of a list that was cut to a multiple of n; ``--fixed`` cuts nothing that ranks need."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dtrain as dt

FIXED = "--fixed" in sys.argv
BATCH, SAMPLES = 12, 50

with dt.init_dist() as info:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    if info.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(2))
    # Blocks of one rank instead of turns of all ranks: the global batch has other samples.
    share = (
        order[info.rank :: info.world_size]
        if FIXED
        else order[: SAMPLES // info.world_size * info.world_size].chunk(info.world_size)[info.rank]
    )
    size = BATCH // info.world_size
    for begin in range(0, 4 * size, size):
        inputs = x[share[begin : begin + size]]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), inputs[:, :4].argmax(1)).backward()
        optimizer.step()
