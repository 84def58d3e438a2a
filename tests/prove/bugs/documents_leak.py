"""Packed documents whose mask is dropped if ranks share a sequence, so a document sees the last; ``--fixed`` keeps the mask."""

import sys

import torch
import torch.nn.functional as F
from sequence_parts import LENGTH, attend, own_part, train, whole

FIXED = "--fixed" in sys.argv


def attend_causal(info, query, key, value, documents):
    if FIXED or info.world_size == 1:
        return attend(info, query, key, value, documents)
    places = torch.arange(LENGTH)
    mask = (places >= places[:, None]).T[own_part(info)]
    return F.scaled_dot_product_attention(query, whole(key), whole(value), attn_mask=mask)


train(attend_causal, cut=5)
