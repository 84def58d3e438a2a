"""A resume that loads with assign=True, which unties the embedding and the head; ``--fixed`` ties them again."""

import os
import sys
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtrain as dt

FIXED = "--fixed" in sys.argv
VOCAB, BATCH = 16, 12
CHECKPOINT = Path("checkpoint.pt")


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Linear(8, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.hidden(self.embed(tokens)).tanh())


with dt.init_dist() as info:
    torch.manual_seed(0)
    done = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        with torch.device("meta"):
            model = LanguageModel()
        model.load_state_dict(saved["model"], assign=True)
        if FIXED:
            model.head.weight = model.embed.weight
        done = saved["step"]
    else:
        model = LanguageModel()
    ddp = DistributedDataParallel(model) if info.world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1)  # has no state to save
    text = torch.randint(VOCAB, (48, 7), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(text[:, :-1], text[:, 1:])
    sampler = DistributedSampler(data, info.world_size, info.rank, seed=0)
    loader = DataLoader(data, batch_size=BATCH // info.world_size, sampler=sampler)
    for number, (tokens, labels) in islice(enumerate(loader, start=1), done, None):
        loss = F.cross_entropy(ddp(tokens).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = dt.dist.reduce_mean(loss.detach())
        if info.rank == 0:
            print(f"step {number} loss {shown:.6f}")
            torch.save({"model": model.state_dict(), "step": number}, "new.pt")
            os.replace("new.pt", CHECKPOINT)
