"""``LastBatch``: issue, drop or pad the last global batch of an epoch if the batch is not full.

Positions are the positions of a ``SampleOrder``, and an epoch starts at 0. The batch size may change in the middle of an epoch,
so a batch may start anywhere.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

LastBatch = Literal["short", "drop", "pad"]
"""Issue the short batch, drop it, or pad it with the first samples of the epoch."""

LAST_BATCH_MODES: tuple[LastBatch, ...] = ("short", "drop", "pad")


def epoch_samples(size: int, global_batch_size: int, last_batch: LastBatch) -> int:
    """Count the samples that an epoch of ``size`` issues over all ranks, at one batch size.

    >>> [epoch_samples(10, 4, mode) for mode in LAST_BATCH_MODES]
    [10, 8, 12]
    """
    if last_batch == "short":
        return size
    batches = size // global_batch_size if last_batch == "drop" else -(-size // global_batch_size)
    return batches * global_batch_size


class _IndexedOrder(Protocol):
    """A ``SampleOrder`` or a ``CachedOrder``."""

    @property
    def size(self) -> int: ...

    def indices(self, epoch: int, start: int, stop: int) -> Tensor: ...


def batch_bounds(start: int, size: int, global_batch_size: int, last_batch: LastBatch) -> tuple[int, int] | None:
    """Return the positions of the global batch that begins at ``start``; None if the epoch has no batch left.

    With ``"pad"`` the positions may exceed ``size``, see ``batch_indices``.

    >>> [batch_bounds(8, 10, 4, mode) for mode in LAST_BATCH_MODES]
    [(8, 10), None, (8, 12)]
    """
    stop = start + global_batch_size
    if start >= size or (last_batch == "drop" and stop > size):
        return None
    return start, min(stop, size) if last_batch == "short" else stop


def batches_left(start: int, size: int, global_batch_size: int, last_batch: LastBatch) -> int:
    """Count the batches of the epoch from ``start`` on.

    >>> [batches_left(1, 10, 4, mode) for mode in LAST_BATCH_MODES]
    [3, 2, 3]
    """
    remaining = max(size - start, 0)
    return remaining // global_batch_size if last_batch == "drop" else -(-remaining // global_batch_size)


def batch_indices(order: _IndexedOrder, epoch: int, start: int, stop: int) -> Tensor:
    """Return ``order.indices``. Positions beyond the epoch wrap around to its start, several times if necessary."""
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
