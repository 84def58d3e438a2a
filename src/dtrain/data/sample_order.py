"""``SampleOrder``: map positions of an epoch to dataset indices; ``ElasticSampler``: an order from seed and epoch.

``CachedOrder`` computes a range of an order ahead, since one call for many positions costs about as much as a call for few."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtrain.arguments import check_int
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


IntArray: TypeAlias = NDArray[np.int64]

_ROUNDS = 6
# Permutations up to this size are sorted: a Feistel network of so few bits has few permutations.
_SORT_LIMIT = 1024
# First bits of a hash (32 bits) and of a range's number (21 bits) in a 63-bit sort key. The lowest bits hold the member.
_MEMBER_BIT, _OWNER_BIT = 10, 42
_HASH_MASK = (1 << (_OWNER_BIT - _MEMBER_BIT)) - 1
# 2**64 / golden ratio, as a signed 64-bit number.
_GOLDEN_RATIO = 0x9E3779B97F4A7C15 - 2**64
# Number of values per vectorised pass, so that the arrays fit in the processor's cache.
_CHUNK = 1 << 15


def permute_array(positions: IntArray, n: int, key: int) -> IntArray:
    """Evaluate the permutation ``key`` of ``range(n)`` at ``positions``.

    Args:
        positions: ``[k]`` int64 in ``[0, n)``.
        n: size of the permuted range, at least 1.
        key: key of the permutation.

    Returns:
        ``[k]`` int64 in ``[0, n)``, a new array; distinct for distinct positions.

    Source: a Feistel network with six rounds over the next power of two (Luby and Rackoff 1988), with cycle walking until the
    value is inside the range (Black and Rogaway 2002), at most two steps on average. Up to 1024 samples: the order of their
    hashes.
    """
    keys = round_keys(key)
    if n <= _SORT_LIMIT:
        return np.argsort(mix_bits(mix_bits(np.arange(n), keys[0]), keys[1]), kind="stable")[positions]
    out = np.empty_like(positions)
    for first in range(0, len(positions), _CHUNK):
        out[first : first + _CHUNK] = _cycle_walk(positions[first : first + _CHUNK], n, (n - 1).bit_length(), keys)
    return out


def permute_in_ranges(offsets: IntArray, sizes: IntArray, ids: IntArray, key: int) -> IntArray:
    """Permute offsets in many ranges at once, with one permutation per range.

    Args:
        offsets: ``[k]`` int64, each in ``[0, size of its range)``.
        sizes: ``[k]`` int64, size of each offset's range.
        ids: ``[k]`` int64, number of each offset's range; the permutation depends on ``key`` and on this number. The call is
            fast if the offsets of a range are adjacent.
        key: key of all permutations.

    Returns:
        ``[k]`` int64, the permuted offsets.
    """
    keys, out = round_keys(key), np.empty_like(offsets)
    for first in range(0, len(offsets), _CHUNK):
        part = slice(first, first + _CHUNK)
        small = sizes[part] <= _SORT_LIMIT
        if small.all() or not small.any():
            out[part] = (_sort_in_ranges if small.all() else _cycle_walk_in_ranges)(offsets[part], sizes[part], ids[part], keys)
        else:
            for chosen, permute_fn in ((small, _sort_in_ranges), (~small, _cycle_walk_in_ranges)):
                out[part][chosen] = permute_fn(offsets[part][chosen], sizes[part][chosen], ids[part][chosen], keys)
    return out


def round_keys(key: int) -> list[int]:
    """Return a signed 63-bit number per round."""
    return [derive_seed("permute", key, r) - 2**62 for r in range(_ROUNDS)]


def mix_bits(values: IntArray, key: int | IntArray) -> IntArray:
    """Mix each value with ``key`` to 63 bits, in a new array. The int64 arithmetic wraps around."""
    x = values + key
    x *= _GOLDEN_RATIO
    x ^= x >> 29
    x *= _GOLDEN_RATIO
    x ^= x >> 32
    return x


def _cycle_walk(positions: IntArray, n: int | IntArray, bits: int | IntArray, keys: Sequence[int | IntArray]) -> IntArray:
    """Apply the Feistel network again to values outside of ``[0, n)``, until all values are inside."""
    values = _feistel(positions, bits, keys)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        walked = _feistel(values[outside], _select(bits, outside), [_select(key, outside) for key in keys])
        values[outside] = walked
        outside = outside[walked >= _select(n, outside)]
    return values


def _select(value: int | IntArray, chosen: IntArray) -> int | IntArray:
    return value if isinstance(value, int) else value[chosen]


def _feistel(values: IntArray, bits: int | IntArray, keys: Sequence[int | IntArray]) -> IntArray:
    """Permute ``[0, 2**bits)``: mix a half of ``bits // 2`` bits and the other half in turn."""
    low_bits = bits // 2
    high_bits = bits - low_bits
    low_mask, high_mask = (1 << low_bits) - 1, (1 << high_bits) - 1
    low, high = values & low_mask, values >> low_bits
    for r, key in enumerate(keys):
        if r % 2 == 0:
            high ^= mix_bits(low, key) & high_mask
        else:
            low ^= mix_bits(high, key) & low_mask
    high <<= low_bits
    high |= low
    return high


def _cycle_walk_in_ranges(offsets: IntArray, sizes: IntArray, ids: IntArray, keys: list[int]) -> IntArray:
    first, lengths = _find_runs(ids)
    range_ids = ids[first]
    range_keys = [np.repeat(mix_bits(mix_bits(range_ids, key), keys[0]), lengths) for key in keys]
    # The exponent is (size - 1).bit_length(). The conversion to float64 is exact below 2**53.
    bits = np.frexp((sizes[first] - 1).astype(np.float64))[1].astype(np.int64)
    return _cycle_walk(offsets, sizes, np.repeat(bits, lengths), range_keys)


def _find_runs(ids: IntArray) -> tuple[IntArray, IntArray]:
    """Return the start and length of each run of equal ids. The same id may occur in several runs."""
    first: IntArray = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
    return first, np.diff(first, append=len(ids))


def _sort_in_ranges(offsets: IntArray, sizes: IntArray, ids: IntArray, keys: list[int]) -> IntArray:
    """Sort all members of small ranges by the hashes of the members, and return the members at ``offsets``."""
    first, run_lengths = _find_runs(ids)
    range_ids, lengths = ids[first], sizes[first]
    begins = np.cumsum(lengths) - lengths
    owner = np.repeat(np.arange(len(range_ids)), lengths)
    members = np.arange(len(owner)) - begins[owner]
    hashes = mix_bits(members, mix_bits(mix_bits(range_ids, keys[0]), keys[1])[owner])
    # One number holds range, hash and member, and is unique. Sorting numbers is 3 times as fast as lexsort.
    ordered = np.sort((owner << _OWNER_BIT) | ((hashes & _HASH_MASK) << _MEMBER_BIT) | members)
    at: IntArray = ordered[np.repeat(begins, run_lengths) + offsets]
    return at & (_SORT_LIMIT - 1)
