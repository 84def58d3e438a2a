#!/usr/bin/env python
"""Sequence tagging with a small transformer encoder; accuracy on a validation set after each epoch."""
import argparse

import torch
from torch import nn

import dtrain as dt


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--vocab", type=int, default=30)
    p.add_argument("--tags", type=int, default=4)
    p.add_argument("--d-model", type=int, default=16)
    p.add_argument("--batch-size", type=int, default=12)
    p.add_argument("--epochs", type=int, default=4)
    return p.parse_args()


class Tagger(nn.Module):
    def __init__(self, vocab, tags, d):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layer = nn.TransformerEncoderLayer(d, 2, 2 * d, dropout=0.0, batch_first=True)
        self.classify = nn.Linear(d, tags)

    def forward(self, tokens):
        pad = tokens == 0
        return self.classify(self.layer(self.embed(tokens), src_key_padding_mask=pad))


def sentences(count, vocab, tags, seed):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, vocab, (count, 9), generator=g)
    lengths = torch.randint(3, 10, (count,), generator=g)
    keep = torch.arange(9) < lengths[:, None]
    previous = tokens.roll(1, 1)
    labels = (tokens + previous) % tags
    return {"tokens": tokens * keep, "labels": labels.masked_fill(~keep, -100)}


def loss_fn(model, batch):
    logits = model(batch["tokens"])
    loss = dt.cross_entropy(logits, batch["labels"])
    hits = (logits.argmax(-1) == batch["labels"]).sum()
    return dt.LossSum(total=loss.total, weight=loss.weight, aux={"acc": (hits, loss.weight)})


def validate(model, loader):
    scores = dt.evaluate(model, loader, loss_fn)
    return dt.reduce_metrics(scores)["acc"]


def main():
    args = parse()
    with dt.init_dist() as dist:
        torch.manual_seed(1234)
        mesh = dt.build_mesh()
        model = Tagger(args.vocab, args.tags, args.d_model)
        model = dt.shard_model(model, mesh, strategy="replicate")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train = sentences(24, args.vocab, args.tags, 1)
        held_out = sentences(50, args.vocab, args.tags, 2)
        loader = dt.build_loader(train, mesh=mesh, global_batch_size=args.batch_size, seed=0)
        val = dt.build_loader(held_out, mesh=mesh, global_batch_size=args.batch_size, seed=0, shuffle=False)
        step = dt.compose_step(loss_fn)
        state = step.init(model, optimizer, loader=loader)
        for batch in loader.until(f"{args.epochs}ep"):
            state, metrics = step(state, batch)
            loss = dt.reduce_metrics(metrics)["loss"]
            dist.print(f"step {state.step} loss {loss:.5f}")
            if state.crossed("1ep"):
                acc = validate(model, val)
                dist.print(f"epoch done, val accuracy {acc:.5f}")


if __name__ == "__main__":
    main()
