"""Classification of token sequences, with label smoothing."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler

PAD, VOCAB, CLASSES, GLOBAL_BATCH, EPOCHS = 0, 30, 3, 12, 2


class GlobalBatches(Sampler):
    """Cuts one shuffled order into global batches; yields this rank's part of each."""

    def __init__(self, n, rank, world, seed=0):
        self.n, self.rank, self.world, self.seed, self.epoch = n, rank, world, seed, 0

    def __len__(self):
        return self.n // GLOBAL_BATCH

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed * 1000 + self.epoch)
        order = torch.randperm(self.n, generator=g).tolist()
        for b in range(len(self)):
            yield order[b * GLOBAL_BATCH : (b + 1) * GLOBAL_BATCH][self.rank :: self.world]


def sentences(n):
    g = torch.Generator().manual_seed(31)
    out = []
    for _ in range(n):
        label = int(torch.randint(0, CLASSES, (1,), generator=g))
        length = int(torch.randint(3, 25, (1,), generator=g))
        ids = torch.randint(1, VOCAB, (length,), generator=g)
        ids[torch.rand(length, generator=g) < 0.4] = 1 + label
        out.append((ids, label))
    return out


def collate(items):
    ids = pad_sequence([i for i, _ in items], batch_first=True, padding_value=PAD)
    return ids, ids != PAD, torch.tensor([label for _, label in items])


class TextClassifier(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.mix = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))
        self.out = nn.Linear(width, CLASSES)

    def forward(self, ids, mask):
        h = self.mix(self.embed(ids))
        mask = mask.unsqueeze(-1).to(h.dtype)
        pooled = (h * mask).sum(1) / mask.sum(1)
        return self.out(pooled)


def main():
    ddp = "WORLD_SIZE" in os.environ
    if ddp:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ddp else 0
    world = dist.get_world_size() if ddp else 1
    torch.manual_seed(17)
    model = TextClassifier()
    model = DDP(model) if ddp else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    data = sentences(60)
    sampler = GlobalBatches(len(data), rank, world)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    step = 0
    for epoch in range(EPOCHS):
        sampler.epoch = epoch
        for ids, mask, label in loader:
            loss = criterion(model(ids, mask), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            shown = loss.detach() / world
            if ddp:
                dist.all_reduce(shown)
            if rank == 0:
                print(f"epoch {epoch} step {step} loss {shown.item():.8f}", flush=True)
            step += 1


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
