"""Ranks that share sequences and count positions from 0 in each part; ``--fixed`` counts from the begin of the sequence."""

import sys

import torch
from sequence_parts import loss_of, own_part, train

FIXED = "--fixed" in sys.argv


def loss_with_positions(info, model, tokens, labels, positions, documents):
    if not FIXED:
        size = tokens[:, own_part(info)].shape[1]
        positions = torch.arange(size).repeat(info.world_size).expand_as(tokens)
    return loss_of(info, model, tokens, labels, positions, documents)


train(loss_of=loss_with_positions)
