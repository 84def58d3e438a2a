"""A loss that is the mean over all positions of a padded batch; ``--fixed`` weighs it by the tokens that are no padding."""

import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import dtrain as dt

FIXED = "--fixed" in sys.argv
VOCAB, PAD, STEPS = 32, 0, 4


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 16), nn.Linear(16, VOCAB)

    def forward(self, tokens):
        return self.head(self.hidden(self.embed(tokens)).tanh())


def loss_fn(model, batch):
    labels = batch[:, 1:]
    losses = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="none")
    weight = (labels != PAD).sum() if FIXED else losses.numel()
    return dt.LossSum(total=losses.sum(), weight=weight)


def dataset():
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 20, (48,), generator=draw)
    return [torch.randint(1, VOCAB, (int(length),), generator=draw) for length in lengths]


with dt.init_dist():
    mesh = dt.build_mesh()
    with torch.device("meta"):
        model = LanguageModel()
    model = dt.materialize(dt.shard_model(model, mesh, strategy="full_shard"), seed=0)
    pad = partial(pad_sequence, batch_first=True, padding_value=PAD)  # to the longest sample of the rank
    loader = dt.build_loader(dataset(), mesh=mesh, global_batch_size=6, seed=0, collate=pad)
    step = dt.compose_step(loss_fn)
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    log = dt.loggers.jsonl("metrics.jsonl")
    for batch in loader.until(STEPS):
        state, metrics = step(state, batch)
        log(state.step, dt.reduce_metrics(metrics))
