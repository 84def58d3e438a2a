"""``SampleOrder``: map positions of an epoch to dataset indices; ``ElasticSampler``: an order from seed and epoch.

``CachedOrder`` computes a range of an order ahead, since one call for many positions costs about as much as a call for few."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dtrain.arguments import check_int
from dtrain.data.sampling.permutation import permute_array
from dtrain.dist.rng import derive_seed
from dtrain.errors import CheckpointMismatchError, ConfigError


class SampleOrder(Protocol):
    """Order of the samples of an epoch: pure functions of epoch and position.

    A position counts samples over all ranks. If ``streams`` is above 1, stream ``s`` has the positions ``p`` with
    ``p % streams == s``, and rank ``r`` of ``R`` reads the positions with ``p % R == r``. So if the number of streams is a
    multiple of the number of ranks, a rank reads the shards of its own streams only.
    """

    @property
    def size(self) -> int:
        """Samples in one epoch."""
        ...

    @property
    def streams(self) -> int:
        """Number of interleaved parts of the epoch; 1 if the order has no streams."""
        ...

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return the dataset indices at positions ``start`` to ``stop`` of ``epoch``: ``[stop - start]`` int64."""
        ...

    def state(self, epoch: int, start: int) -> dict[str, int]:
        """Return the integers without which position ``start`` of ``epoch`` has no meaning, such as size and seed."""
        ...

    def at_state(self, state: Mapping[str, int], epoch: int, start: int) -> SampleOrder:
        """Return the order that continues at ``start`` of ``epoch``, where ``state`` was saved: this order, or a new order.

        Raises:
            CheckpointMismatchError: ``state`` comes from other data or another order, so the position means other samples.
        """
        ...


def rank_share(start: int, stop: int, index: int, count: int) -> tuple[int, int]:
    """Return the contiguous part of ``start`` to ``stop`` of data rank ``index`` of ``count``; sizes differ by at most one.

    >>> [rank_share(0, 8, i, 3) for i in range(3)]
    [(0, 3), (3, 6), (6, 8)]
    """
    size, longer = divmod(stop - start, count)
    first = start + index * size + min(index, longer)
    return first, first + size + (index < longer)


def rank_positions(start: int, stop: int, index: int, count: int, streams: int) -> range:
    """Return the positions of ``start`` to ``stop`` of data rank ``index`` of ``count``; sizes differ by at most one.

    With one stream the share is contiguous. With several streams it is every ``count``-th position of the epoch.

    >>> [list(rank_positions(8, 16, i, 3, streams=6)) for i in range(3)]
    [[9, 12, 15], [10, 13], [8, 11, 14]]
    """
    if streams == 1:
        return range(*rank_share(start, stop, index, count))
    return range(start + (index - start) % count, stop, count)


def check_range(name: str, size: int, start: int, stop: int) -> None:
    """Raise ConfigError for positions outside of an epoch of ``size`` samples."""
    if not 0 <= start <= stop <= size:
        raise ConfigError(
            f"{name}: start and stop must fulfil 0 <= start <= stop <= {size}, got {start=} {stop=}. "
            "Pass positions within one epoch."
        )


def check_same_state(saved: Mapping[str, int], expected: Mapping[str, int]) -> None:
    """Check that ``saved`` has every entry of ``expected``, since the position means other samples otherwise.

    Raises:
        CheckpointMismatchError: an entry differs; the message names the first such entry.
    """
    for key, value in expected.items():
        if saved.get(key) != value:
            raise CheckpointMismatchError(
                f"loader: the saved position was in a dataset with {key}={saved.get(key)}, this one has {key}={value}. "
                "Resume with the same data, or leave the loader out of extra to start over."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSampler:
    """Sample order of an epoch as a pure function of ``seed``, the epoch and the position.

    Args:
        size: samples in the dataset, at least 1.
        seed: seed of the shuffle.
        shuffle: if False, every epoch has the dataset's order.

    Example:
        >>> import dtrain as dt
        >>> order = dt.data.ElasticSampler(size=100, seed=0)
        >>> sorted(order.indices(0, 0, 100).tolist()) == list(range(100))
        True
    """

    size: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_int("ElasticSampler", "size", self.size)

    @property
    def streams(self) -> int:
        """1: every rank may read every sample."""
        return 1

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return the dataset indices at positions ``start`` to ``stop`` of ``epoch``: ``[stop - start]`` int64."""
        check_range("ElasticSampler", self.size, start, stop)
        positions = np.arange(start, stop)
        if self.shuffle:
            positions = permute_array(positions, self.size, derive_seed(self.seed, "epoch", epoch))
        return torch.from_numpy(positions)

    def state(self, epoch: int, start: int) -> dict[str, int]:
        """Return size, seed and shuffle, to check a saved position."""
        return {"size": self.size, "seed": self.seed, "shuffle": int(self.shuffle)}

    def at_state(self, state: Mapping[str, int], epoch: int, start: int) -> ElasticSampler:
        """Return this order after a check of ``state``.

        Raises:
            CheckpointMismatchError: ``state`` has another size, seed or shuffle.
        """
        check_same_state(state, self.state(epoch, start))
        return self


def dataset_order(dataset: Any, size: int, seed: int, shuffle: object) -> SampleOrder:
    """Return the dataset's own order if it has a method ``order``, else an ``ElasticSampler`` that shuffles unless False."""
    if hasattr(dataset, "order"):
        order: SampleOrder = dataset.order(seed, shuffle)
        return order
    return ElasticSampler(size=size, seed=seed, shuffle=shuffle is not False)


# Number of positions per range. The first range is short, so that a resume has its first batch at once.
_MIN_LENGTH, _MAX_LENGTH = 1 << 10, 1 << 16
# A call costs as much as this many positions. A rank that skips more positions starts again with a short range.
_MAX_GAP = 1 << 13


@dataclass(frozen=True, slots=True, eq=False)
class _CachedRange:
    epoch: int
    start: int
    stop: int
    indices: Tensor


@dataclass(slots=True)
class CachedOrder:
    """Cache of ``order.indices`` that makes calls with ascending positions cheap.

    Each range is twice as long as the previous range, up to 65,536 positions (512 KiB). A jump starts again with a short range.
    A rank may skip the positions of other ranks, as long as the gap is small. The cached range is replaced as one value, so
    threads and forked processes may share the cache; in the worst case they compute the same range twice.
    """

    order: SampleOrder
    _cached: _CachedRange | None = field(init=False, repr=False, default=None)

    @property
    def size(self) -> int:
        """Samples in one epoch."""
        return self.order.size

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return the dataset indices at positions ``start`` to ``stop`` of ``epoch``, read-only: ``[stop - start]`` int64."""
        cached = self._cached
        if cached is None or epoch != cached.epoch or not cached.start <= start <= stop <= cached.stop:
            end = min(start + self._next_length(cached, epoch, start, stop), self.order.size)
            end = max(end, stop)
            cached = self._cached = _CachedRange(epoch, start, end, self.order.indices(epoch, start, end))
        return cached.indices[start - cached.start : stop - cached.start]

    def _next_length(self, cached: _CachedRange | None, epoch: int, start: int, stop: int) -> int:
        if cached is None or epoch != cached.epoch or not cached.start <= start <= cached.stop + _MAX_GAP:
            return _MIN_LENGTH
        return min(2 * max(len(cached.indices), stop - start), _MAX_LENGTH)
