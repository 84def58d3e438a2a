"""DDP whose ranks divide the summed loss by their own number of tokens; ``--fixed`` divides by that of all ranks."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtrain as dt

FIXED = "--fixed" in sys.argv
VOCAB, LENGTH, BATCH = 32, 10, 12


def dataset():
    draw = torch.Generator().manual_seed(1)
    text = torch.randint(VOCAB, (48, LENGTH + 1), generator=draw)
    lengths = torch.randint(2, LENGTH + 1, (48, 1), generator=draw)
    labels = text[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100)
    return TensorDataset(text[:, :-1], labels)


def main():
    with dt.init_dist() as info:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, VOCAB))
        if info.world_size > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sampler = DistributedSampler(data := dataset(), info.world_size, info.rank, seed=0)
        loader = DataLoader(data, batch_size=BATCH // info.world_size, sampler=sampler)
        for number, (tokens, labels) in enumerate(loader, start=1):
            total = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
            count = (labels != -100).sum()
            if FIXED and info.world_size > 1:
                dist.all_reduce(count)
                count = count / info.world_size  # DDP takes the mean over ranks
            loss = total / count
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            shown = dt.dist.reduce_mean(loss.detach())
            if info.rank == 0:
                print(f"step {number} loss {shown:.6f}")


if __name__ == "__main__":
    main()
