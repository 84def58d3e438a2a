"""Bag-of-words sentiment with a stream of lines and an own vocabulary."""
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

GLOBAL_BATCH, STEPS, WORDS_PER_LINE = 12, 8, 6
GOOD = "fine great warm bright lovely calm kind clever fresh sweet".split()
BAD = "dull cold grim broken noisy bitter stale rude weak sour".split()
PLAIN = "the a film dish room walk book song town night tea chair".split()


def write_lines(n):
    rng = random.Random(8)
    lines = []
    for _ in range(n):
        label = rng.randint(0, 1)
        words = rng.choices(PLAIN, k=WORDS_PER_LINE - 2) + rng.choices(GOOD if label else BAD, k=2)
        rng.shuffle(words)
        lines.append((" ".join(words), label))
    return lines


class Vocabulary:
    def __init__(self, lines):
        words = {w for text, _ in lines for w in text.split()}
        self.index = {w: i for i, w in enumerate(sorted(words))}

    def encode(self, text):
        return torch.tensor([self.index[w] for w in text.split()])


class Stream(IterableDataset):
    """Each rank takes its lines of each global batch."""

    def __init__(self, lines, vocabulary, rank, world):
        self.lines, self.vocabulary, self.rank, self.world = lines, vocabulary, rank, world

    def __iter__(self):
        for i, (text, label) in enumerate(self.lines):
            if i % self.world == self.rank:
                yield self.vocabulary.encode(text), float(label)


class Bag(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.words = nn.EmbeddingBag(n, 16, mode="mean")
        self.out = nn.Linear(16, 1)

    def forward(self, ids):
        return self.out(self.words(ids).tanh()).squeeze(1)


def main():
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    parallel = dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if parallel else (0, 1)
    random.seed(0)
    torch.manual_seed(0)
    lines = write_lines(GLOBAL_BATCH * STEPS)
    vocabulary = Vocabulary(lines)
    model = Bag(len(vocabulary.index))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    loader = DataLoader(Stream(lines, vocabulary, rank, world), batch_size=GLOBAL_BATCH // world)
    for step, (ids, label) in enumerate(loader):
        logit = model(ids)
        loss = F.binary_cross_entropy_with_logits(logit, label.float())
        optimizer.zero_grad()
        loss.backward()
        stats = torch.stack([loss.detach(), ((logit > 0) == (label > 0)).float().mean()])
        if parallel:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
            dist.all_reduce(stats)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {stats[0] / world:.8f} accuracy {stats[1] / world:.4f}", flush=True)
    if parallel:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
