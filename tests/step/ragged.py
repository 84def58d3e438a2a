"""A batch whose samples weigh differently, and its loss, for the tests of the gradient and of its step."""

import torch
from torch import nn

from dtrain.losses import cross_entropy
from dtrain.typing import LossSum

SAMPLES, SEQ, VOCAB = 11, 6, 13


def ragged_batch() -> dict:
    """Every sample has another number of targets that count, two of them none: whole microbatches weigh nothing."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randint(VOCAB, (2, SAMPLES, SEQ), generator=generator)
    for sample in range(SAMPLES):
        targets[sample, sample % (SEQ + 1) :] = -100
    return {"inputs": inputs, "targets": targets}


def loss_fn(net: nn.Module, batch: dict) -> LossSum:
    return cross_entropy(net(batch["inputs"]), batch["targets"])
