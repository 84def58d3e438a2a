"""A correct language model over iterable data with shares, own samplers, buckets by length, or resumable loaders."""

import itertools
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

BATCH, SAMPLES = 12, 48


class Sequences(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, 20, (int(torch.randint(3, 9, (), generator=generator)),), generator=generator)


class Stream(IterableDataset):
    """Yield this rank's share of each batch; a worker of the loader yields every n-th batch."""

    def __init__(self, whole_batches):
        self.data, self.epoch, self.whole_batches = Sequences(), 0, whole_batches

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for number in range(first, SAMPLES // BATCH, step):
            share = [self.data[index] for index in order[number * BATCH : (number + 1) * BATCH][rank::world_size]]
            if self.whole_batches:
                yield collate(share)
            else:
                yield from share


class WeightedSampler(Sampler):
    """Draw long sequences more often, in an order that all ranks know, and take this rank's part of it."""

    def __init__(self, dataset):
        self.weights, self.epoch = torch.tensor([float(len(dataset[index])) for index in range(SAMPLES)]), 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return SAMPLES // world_size

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.multinomial(self.weights, SAMPLES, True, generator=generator)[rank::world_size].tolist())


class Buckets(WeightedSampler):
    """Yield batches of sequences of like lengths, in a random order."""

    def __len__(self):
        return SAMPLES // BATCH

    def __iter__(self):
        batches = self.weights.argsort(stable=True).view(-1, BATCH)
        order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(self.epoch))
        return iter(batches[order, rank::world_size].tolist())


def collate(sequences):
    return nn.utils.rnn.pad_sequence(sequences, batch_first=True)


def make_loader(kind):
    share, data = BATCH // world_size, Sequences()
    if kind == "--iterable":
        return DataLoader(Stream(False), batch_size=share, collate_fn=collate)
    if kind == "--workers":
        return DataLoader(Stream(True), batch_size=None, num_workers=2)
    if kind == "--buckets":
        return DataLoader(data, batch_sampler=Buckets(data), collate_fn=collate)
    if kind == "--stateful":
        sampler = torch.utils.data.DistributedSampler(data)
        return StatefulDataLoader(data, batch_size=share, sampler=sampler, collate_fn=collate)
    if kind == "--streaming":
        from datasets import Dataset as Rows
        from datasets.distributed import split_dataset_by_node

        rows = Rows.from_dict({"tokens": [data[index].tolist() for index in range(SAMPLES)]}).to_iterable_dataset()
        rows = split_dataset_by_node(rows.shuffle(seed=0, buffer_size=16), rank, world_size)
        return DataLoader(
            rows, batch_size=share, collate_fn=lambda rows: collate([torch.tensor(row["tokens"]) for row in rows])
        )
    return DataLoader(data, batch_size=share, sampler=WeightedSampler(data), collate_fn=collate)


def set_epoch(loader, epoch):
    for part in (loader.dataset, loader.sampler, loader.batch_sampler):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
module = nn.Sequential(nn.Embedding(20, 16, padding_idx=0), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 20))
model, start, done, skipped = DDP(module), 0, 0, 0
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = make_loader(sys.argv[1])
parts = {"model": module, "optimizer": optimizer}
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    start, done = saved["epoch"], saved["batch"]
    # The state of a loader counts the samples of a rank, so other numbers of ranks skip batches.
    if isinstance(loader, StatefulDataLoader) and saved["world_size"] == world_size:
        set_epoch(loader, start)
        loader.load_state_dict(saved["loader"])
    else:
        skipped = done
    for name, part in parts.items():
        part.load_state_dict(saved[name])
for epoch in range(start, 4):
    set_epoch(loader, epoch)
    for batch, tokens in enumerate(itertools.islice(loader, skipped, None), done):
        logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
        count = (targets != 0).sum()
        dist.all_reduce(count)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum")
        # DDP averages over the ranks, and the loss is a mean over the tokens of all ranks.
        (loss * world_size / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and batch % 2 == 1:
            state = {name: part.state_dict() for name, part in parts.items()}
            if isinstance(loader, StatefulDataLoader):
                state["loader"] = loader.state_dict()
            torch.save(state | {"epoch": epoch, "batch": batch + 1, "world_size": world_size}, "last.tmp")
            os.replace("last.tmp", "last.pt")
        dist.barrier()
    done = skipped = 0
dist.destroy_process_group()
