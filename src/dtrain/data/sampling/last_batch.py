"""What becomes of the last global batch of an epoch when it is not full.

Positions are those of an ``Order``; an epoch starts at 0. The batch size may have changed in the middle of the epoch, so a
batch may start anywhere.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

LastBatch = Literal["short", "drop", "pad"]
"""Hand it out as it is, leave it out, or fill it up with the samples that the epoch began with."""

LAST_BATCH_MODES: tuple[LastBatch, ...] = ("short", "drop", "pad")


def epoch_samples(size: int, global_batch_size: int, last_batch: LastBatch) -> int:
    """Samples that an epoch of ``size`` hands out over all ranks, at one batch size.

    >>> [epoch_samples(10, 4, tail) for tail in TAILS]
    [10, 8, 12]
    """
    if last_batch == "short":
        return size
    batches = size // global_batch_size if last_batch == "drop" else -(-size // global_batch_size)
    return batches * global_batch_size


class _IndexedOrder(Protocol):
    """An ``Order``, or a ``Prepared`` one."""

    @property
    def size(self) -> int: ...

    def indices(self, epoch: int, start: int, stop: int) -> Tensor: ...


def batch_bounds(start: int, size: int, global_batch_size: int, last_batch: LastBatch) -> tuple[int, int] | None:
    """Positions of the global batch that begins at ``start``; None where the epoch ends before one.

    With ``"pad"`` they may go beyond ``size``, see ``batch_indices``.

    >>> [batch_bounds(8, 10, 4, tail) for tail in TAILS]
    [(8, 10), None, (8, 12)]
    """
    stop = start + global_batch_size
    if start >= size or (last_batch == "drop" and stop > size):
        return None
    return start, min(stop, size) if last_batch == "short" else stop


def batches_left(start: int, size: int, global_batch_size: int, last_batch: LastBatch) -> int:
    """How many batches the epoch has from ``start`` on.

    >>> [batches_left(1, 10, 4, tail) for tail in TAILS]
    [3, 2, 3]
    """
    left = max(size - start, 0)
    return left // global_batch_size if last_batch == "drop" else -(-left // global_batch_size)


def batch_indices(order: _IndexedOrder, epoch: int, start: int, stop: int) -> Tensor:
    """``order.indices`` for positions that may go beyond the epoch: those begin again at its start, as often as it takes."""
    if stop <= order.size:
        return order.indices(epoch, start, stop)
    parts = [order.indices(epoch, min(start, order.size), order.size)]
    at = max(start, order.size)
    while at < stop:
        first = at % order.size
        count = min(stop - at, order.size - first)
        parts.append(order.indices(epoch, first, first + count))
        at += count
    return torch.cat(parts)
