"""``Order``: which sample stands at which position of an epoch, and what a rank's part of a stretch is.

``ElasticSampler``: the order of an epoch as a function of seed and epoch, computable at any position.

``Prepared``: an order with a stretch of it worked out ahead, since one call for many positions costs what few cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dtrain.data.sampling.permutation import permute_array
from dtrain.dist.rng import derive_seed
from dtrain.errors import CheckpointMismatchError, ConfigError


class SampleOrder(Protocol):
    """Positions of an epoch to dataset indices: pure functions of epoch and position.

    A position counts samples over all ranks. With ``streams`` above 1, the positions ``p`` with ``p % lanes == l`` are lane
    ``l``, and rank ``r`` of ``R`` takes those with ``p % R == r``: it reads the shards of its own lanes only, where the
    number of lanes is a multiple of the number of ranks.
    """

    @property
    def size(self) -> int:
        """Samples in one epoch."""
        ...

    @property
    def streams(self) -> int:
        """1, or into how many interleaved parts the epoch is dealt."""
        ...

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """Dataset indices at positions ``start`` to ``stop`` of ``epoch``: ``[stop - start]`` int64."""
        ...

    def state(self, epoch: int, start: int) -> dict[str, int]:
        """What position ``start`` of ``epoch`` is only meaningful with: few integers."""
        ...

    def at_state(self, state: Mapping[str, int], epoch: int, start: int) -> SampleOrder:
        """The order that goes on from ``start`` of ``epoch``, where ``state`` was taken: itself, or one that remembers.

        Raises:
            CheckpointMismatchError: ``state`` is of other data or of another order, in which the position means other samples.
        """
        ...


def rank_share(start: int, stop: int, index: int, count: int) -> tuple[int, int]:
    """The contiguous part of positions ``start`` to ``stop`` of data rank ``index`` of ``count``; sizes differ by at most one.

    >>> [rank_share(0, 8, i, 3) for i in range(3)]
    [(0, 3), (3, 6), (6, 8)]
    """
    size, longer = divmod(stop - start, count)
    first = start + index * size + min(index, longer)
    return first, first + size + (index < longer)


def rank_positions(start: int, stop: int, index: int, count: int, streams: int) -> range:
    """The positions of ``start`` to ``stop`` that data rank ``index`` of ``count`` takes; sizes differ by at most one.

    A contiguous share with one lane; with more, every ``count``-th position of the epoch, so that a rank stays in its lanes.

    >>> [list(rank_positions(8, 16, i, 3, streams=6)) for i in range(3)]
    [[9, 12, 15], [10, 13], [8, 11, 14]]
    """
    if streams == 1:
        return range(*rank_share(start, stop, index, count))
    return range(start + (index - start) % count, stop, count)


def check_range(name: str, size: int, start: int, stop: int) -> None:
    """Refuse positions outside of an epoch of ``size`` samples."""
    if not 0 <= start <= stop <= size:
        raise ConfigError(f"{name}: needs 0 <= start <= stop <= {size}, got {start=} {stop=}")


def check_same_state(saved: Mapping[str, int], mine: Mapping[str, int]) -> None:
    """Refuse a state in which the position meant other samples: every entry of ``mine`` has to be in ``saved``, and equal.

    Raises:
        CheckpointMismatchError: names the first that differs.
    """
    for key, value in mine.items():
        if saved.get(key) != value:
            raise CheckpointMismatchError(
                f"loader: the saved position was in a dataset with {key}={saved.get(key)}, this one has {key}={value}; "
                "resume with the same data, or leave the loader out of extra to start over"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSampler:
    """Which sample stands where in an epoch: a pure function of ``seed``, the epoch and the position.

    Args:
        size: samples in the dataset, at least 1.
        seed: of the shuffle.
        shuffle: False keeps the dataset's order in every epoch.
    """

    size: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"ElasticSampler: the dataset needs at least one sample, got size={self.size}")

    @property
    def streams(self) -> int:
        """1: every rank may read every sample."""
        return 1

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """Dataset indices at positions ``start`` to ``stop`` of ``epoch``: ``[stop - start]`` int64."""
        check_range("ElasticSampler", self.size, start, stop)
        positions = np.arange(start, stop)
        if self.shuffle:
            positions = permute_array(positions, self.size, derive_seed(self.seed, "epoch", epoch))
        return torch.from_numpy(positions)

    def state(self, epoch: int, start: int) -> dict[str, int]:
        """What a position is only meaningful with: size, seed and shuffle."""
        return {"size": self.size, "seed": self.seed, "shuffle": int(self.shuffle)}

    def at_state(self, state: Mapping[str, int], epoch: int, start: int) -> ElasticSampler:
        """Itself.

        Raises:
            CheckpointMismatchError: another size, seed or shuffle.
        """
        check_same_state(state, self.state(epoch, start))
        return self


_MIN_LENGTH, _MAX_LENGTH = (
    1 << 10,
    1 << 16,
)  # positions; the first stretch is short, so that a resume has its first batch at once
_MAX_GAP = (
    1 << 13
)  # a call costs as much as this many positions; a rank that leaves out more than that does not go on, it jumps


@dataclass(frozen=True, slots=True, eq=False)
class _CachedRange:
    epoch: int
    start: int
    indices: Tensor

    @property
    def stop(self) -> int:
        return self.start + len(self.indices)


@dataclass(slots=True)
class CachedOrder:
    """``indices`` of ``order``, and nothing else of it, at a small cost per call when positions are asked for in turn.

    Each stretch is twice as long as the one before it, up to 65,536 positions (512 KiB); a jump starts over with a short one. A
    rank leaves out what is the others' of each batch, which is no jump as long as it is little.
    What is kept is replaced as one value, so threads and forked processes may share it: at worst they work out the same again.
    """

    order: SampleOrder
    _cached: _CachedRange | None = field(init=False, repr=False, default=None)

    @property
    def size(self) -> int:
        """Samples in one epoch."""
        return self.order.size

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """Dataset indices at positions ``start`` to ``stop`` of ``epoch``: ``[stop - start]`` int64, not to be written into."""
        kept = self._cached
        if kept is None or epoch != kept.epoch or not kept.start <= start <= stop <= kept.stop:
            end = min(start + self._next_length(kept, epoch, start, stop), self.order.size)
            kept = self._cached = _CachedRange(epoch, start, self.order.indices(epoch, start, max(end, stop)))
        return kept.indices[start - kept.start : stop - kept.start]

    def _next_length(self, kept: _CachedRange | None, epoch: int, start: int, stop: int) -> int:
        if kept is None or epoch != kept.epoch or not kept.start <= start <= kept.stop + _MAX_GAP:
            return _MIN_LENGTH
        return min(2 * max(len(kept.indices), stop - start), _MAX_LENGTH)
