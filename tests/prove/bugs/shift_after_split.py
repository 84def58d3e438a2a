"""Ranks that share sequences and shift labels within their part, whose last token has none then; ``--fixed`` shifts before."""

import sys

import torch.nn.functional as F
from sequence_parts import loss_of, own_part, train

FIXED = "--fixed" in sys.argv


def loss_with_shift(info, model, tokens, labels, positions, documents):
    if not FIXED:
        part, labels = own_part(info), labels.clone()
        labels[:, part] = F.pad(tokens[:, part][:, 1:], (0, 1), value=-100)
    return loss_of(info, model, tokens, labels, positions, documents)


train(loss_of=loss_with_shift)
