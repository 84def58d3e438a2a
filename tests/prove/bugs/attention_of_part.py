"""Ranks that share sequences with an attention that sees the rank's own part; ``--fixed`` gathers keys and values."""

import sys

import torch.nn.functional as F
from sequence_parts import attend, train

FIXED = "--fixed" in sys.argv


def attend_eager(info, query, key, value, documents):
    if FIXED:
        return attend(info, query, key, value, documents)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


train(attend_eager)
