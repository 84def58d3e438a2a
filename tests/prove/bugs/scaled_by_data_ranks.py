"""DDP whose ranks share sequences, with a loss scaled by the ranks that have other data; ``--fixed`` scales by all ranks."""

import sys

from sequence_parts import loss_of, train

FIXED = "--fixed" in sys.argv


def scaled_loss(info, *inputs):
    loss = loss_of(info, *inputs)
    data_ranks = 1  # all ranks have the same sequences
    return loss if FIXED else loss / info.world_size * data_ranks


train(loss_of=scaled_loss)
