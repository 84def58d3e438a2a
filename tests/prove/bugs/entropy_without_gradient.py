"""DDP with an entropy of the mean assignment of all ranks, reduced without its gradient; ``--fixed`` reduces with it."""

import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives_with_grad
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv
BATCH = 12
warnings.filterwarnings("ignore", message=".*autograd kernel was not registered.*")


def mean_over_ranks(probabilities):
    mean = probabilities.mean(0)
    if FIXED:
        return collectives_with_grad.all_reduce(mean) / dist.get_world_size()
    mean = mean.clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


class Quantizer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.codes = nn.Linear(8, 5), nn.Linear(5, 8, bias=False)

    def forward(self, x):
        probabilities = (3 * self.encode(x)).softmax(1)
        return probabilities, self.codes(probabilities)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Quantizer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    for step in range(6):
        x = data[step * BATCH : (step + 1) * BATCH][rank::world_size]
        probabilities, decoded = model(x)
        mean = mean_over_ranks(probabilities)
        entropy = -(mean * mean.log()).sum()
        loss = (decoded - x).square().mean() - 0.5 * entropy
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown / world_size:.6f}")
    dist.destroy_process_group()


main()
