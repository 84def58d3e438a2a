#!/usr/bin/env python3
"""Fine-tune a (randomly initialised) BERT on toy reviews, dynamic padding to the longest review of a batch."""
import random
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import BertConfig, BertForSequenceClassification

WORDS = "[PAD] [CLS] [SEP] good great fine nice bad poor awful dull plot actor film scene music the a very not".split()
ID = {w: i for i, w in enumerate(WORDS)}
POSITIVE, NEGATIVE, NEUTRAL = WORDS[3:7], WORDS[7:11], WORDS[11:]


def make_reviews(n, seed=0):
    rnd = random.Random(seed)
    reviews = []
    for _ in range(n):
        label = rnd.randrange(2)
        words = [rnd.choice(NEUTRAL) for _ in range(rnd.randint(2, 14))]
        for _ in range(rnd.randint(1, 3)):
            words.insert(rnd.randrange(len(words) + 1), rnd.choice(POSITIVE if label else NEGATIVE))
        reviews.append((words, label))
    return reviews


def tokenize(words):
    return [ID["[CLS]"]] + [ID[w] for w in words] + [ID["[SEP]"]]


def collate(samples, pad):
    rows = [tokenize(words) for words, _ in samples]
    width = max(map(len, rows))
    ids = torch.tensor([r + [pad] * (width - len(r)) for r in rows])
    return {"input_ids": ids, "attention_mask": (ids != pad).long(), "labels": torch.tensor([y for _, y in samples])}


class Trainer:
    def __init__(self, batch_size=30, lr=2e-3):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(11)
        cfg = BertConfig(vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                         intermediate_size=48, max_position_embeddings=32, hidden_dropout_prob=0.0,
                         attention_probs_dropout_prob=0.0, initializer_range=0.2, pad_token_id=ID["[PAD]"])
        self.model = DistributedDataParallel(BertForSequenceClassification(cfg))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=lr)
        data = make_reviews(120)
        self.sampler = DistributedSampler(data, shuffle=True, seed=4)
        self.loader = DataLoader(data, batch_size // self.world, sampler=self.sampler, drop_last=True,
                                 collate_fn=partial(collate, pad=ID["[PAD]"]))

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            for i, batch in enumerate(self.loader):
                loss, correct = self.train_step(batch)
                if self.rank == 0:
                    print(f"epoch {epoch} batch {i} loss {loss:.5f} acc {correct:.4f}")

    def train_step(self, batch):
        out = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
        self.opt.zero_grad()
        out.loss.backward()
        self.opt.step()
        hits = (out.logits.argmax(-1) == batch["labels"]).sum()
        stats = torch.stack([out.loss.detach() * len(batch["labels"]), hits, torch.tensor(len(batch["labels"]))])
        dist.all_reduce(stats)
        return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer().fit(2)
    dist.destroy_process_group()
