"""What becomes of the last global batch of an epoch when it is not full.

Positions are those of an ``Order``; an epoch starts at 0. The batch size may have changed in the middle of the epoch, so a
batch may start anywhere.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

Tail = Literal["short", "drop", "pad"]
"""Hand it out as it is, leave it out, or fill it up with the samples that the epoch began with."""

TAILS: tuple[Tail, ...] = ("short", "drop", "pad")


def epoch_samples(size: int, global_batch_size: int, tail: Tail) -> int:
    """Samples that an epoch of ``size`` hands out over all ranks, at one batch size.

    >>> [epoch_samples(10, 4, tail) for tail in TAILS]
    [10, 8, 12]
    """
    if tail == "short":
        return size
    batches = size // global_batch_size if tail == "drop" else -(-size // global_batch_size)
    return batches * global_batch_size


class _Indexed(Protocol):
    """An ``Order``, or a ``Prepared`` one."""

    @property
    def size(self) -> int: ...

    def indices(self, epoch: int, start: int, stop: int) -> Tensor: ...


def batch_bounds(start: int, size: int, global_batch_size: int, tail: Tail) -> tuple[int, int] | None:
    """Positions of the global batch that begins at ``start``; None where the epoch ends before one.

    With ``"pad"`` they may go beyond ``size``, see ``batch_indices``.

    >>> [batch_bounds(8, 10, 4, tail) for tail in TAILS]
    [(8, 10), None, (8, 12)]
    """
    stop = start + global_batch_size
    if start >= size or (tail == "drop" and stop > size):
        return None
    return start, min(stop, size) if tail == "short" else stop


def batches_left(start: int, size: int, global_batch_size: int, tail: Tail) -> int:
    """How many batches the epoch has from ``start`` on.

    >>> [batches_left(1, 10, 4, tail) for tail in TAILS]
    [3, 2, 3]
    """
    left = max(size - start, 0)
    return left // global_batch_size if tail == "drop" else -(-left // global_batch_size)


def batch_indices(order: _Indexed, epoch: int, start: int, stop: int) -> Tensor:
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
