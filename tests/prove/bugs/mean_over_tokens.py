"""A language model whose loss is the mean over the tokens of a microbatch; ``--fixed`` returns their sum and number."""

import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import dtrain as dt

FIXED = "--fixed" in sys.argv
VOCAB, LENGTH, STEPS = 32, 10, 4


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 16), nn.Linear(16, VOCAB)

    def forward(self, tokens):
        return self.head(self.hidden(self.embed(tokens)).tanh())


def loss_fn(model, batch):
    tokens, labels = batch
    logits = model(tokens)
    if FIXED:
        return dt.cross_entropy(logits, labels)
    return dt.LossSum(total=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), weight=1.0)


def dataset():
    draw = torch.Generator().manual_seed(1)
    text = torch.randint(VOCAB, (48, LENGTH + 1), generator=draw)
    lengths = torch.randint(2, LENGTH + 1, (48, 1), generator=draw)
    labels = text[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100)  # samples of 2 to 10 tokens
    return torch.utils.data.TensorDataset(text[:, :-1], labels)


def main():
    with dt.init_dist():
        mesh = dt.build_mesh()
        with torch.device("meta"):
            model = LanguageModel()
        model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard"), seed=0)
        loader = dt.build_loader(dataset(), mesh=mesh, global_batch_size=12, seed=0)
        step = dt.compose_step(loss_fn, grad=partial(dt.microbatch_step, microbatch_size=4))
        state = step.init(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        log = dt.loggers.jsonl("metrics.jsonl")
        for batch in loader.until(STEPS):
            state, metrics = step(state, batch)
            log(state.step, dt.reduce_metrics(metrics))


if __name__ == "__main__":
    main()
