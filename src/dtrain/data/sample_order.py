"""``SampleOrder``: map positions of an epoch to dataset indices, as pure functions of seed, epoch and position.

``ElasticSampler`` permutes all samples. ``BlockOrder`` is a local shuffle for samples in shards: a full shuffle reads from
every shard at all times. It permutes the shards, concatenates them, and cuts the result into ``streams`` of equal length.
Inside a stream it shuffles the samples of a few adjacent shards (a window), window by window. Position ``p`` of the epoch is
in stream ``p % streams``, at offset ``p // streams``, so all streams end together. A cut is usually inside a shard, and two
streams read that shard. ``shuffle_quality`` compares an order with a full shuffle.

``CachedOrder`` computes a range of an order ahead, since one call for many positions costs about as much as a call for few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtrain.arguments import check_choice, check_int, explain_fields
from dtrain.dist.rng import derive_seed
from dtrain.errors import CheckpointMismatchError, ConfigError

IntArray: TypeAlias = NDArray[np.int64]
WindowUnit = Literal["shards", "samples"]
# Codes of the state's entry "shuffle". ElasticSampler uses the codes 0 and 1.
_SHUFFLE_CODES = {"shards": 2, "samples": 3}


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


@explain_fields
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


@explain_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShuffle:
    """Options of a local shuffle: ``build_loader(shuffle=BlockShuffle(...))``.

    About ``streams * (block_size + 1)`` shards are in use at any time, over all ranks. The cache must hold the shards of its
    node.

    Args:
        block_size: adjacent shards of a stream (or samples of a stream) that are shuffled together.
        unit: unit of ``block_size``. Use samples if a shard is too large to keep open, or very small.
        streams: parts of an epoch that are read at the same time. If the number of ranks divides ``streams``, or is a multiple
            of ``streams``, a rank reads the shards of its own streams only. The order depends on ``streams``, not on the ranks.

    Example:
        >>> import dtrain as dt
        >>> shuffle = dt.data.BlockShuffle(block_size=8, streams=16)
        >>> loader = dt.build_loader(
        ...     dataset, mesh=mesh, global_batch_size=256, seed=1, shuffle=shuffle
        ... )  # doctest: +SKIP

    Raises:
        ConfigError: ``block_size`` or ``streams`` is below 1, or ``unit`` is unknown.
    """

    block_size: int = 4
    unit: WindowUnit = "shards"
    streams: int = 8

    def __post_init__(self) -> None:
        check_int("BlockShuffle", "block_size", self.block_size)
        check_int("BlockShuffle", "streams", self.streams)
        check_choice("BlockShuffle", "unit", self.unit, _SHUFFLE_CODES)


def shard_order(sizes: Sequence[int] | Tensor, *, seed: int, shuffle: bool | BlockShuffle) -> SampleOrder:
    """Return the sample order of a dataset in shards. A dataset class calls it in its method ``order``.

    Args:
        sizes: samples of each shard.
        seed: seed of the shuffle.
        shuffle: a ``BlockShuffle``; True uses the default block shuffle, False the order of the dataset.

    Example:
        >>> import dtrain as dt
        >>> order = dt.data.shard_order([3, 3], seed=0, shuffle=False)
        >>> order.indices(0, 0, 6).tolist()
        [0, 1, 2, 3, 4, 5]

    Raises:
        ConfigError: there is no sample, or a size is negative.
    """
    counts = np.asarray(sizes, dtype=np.int64).reshape(-1)
    if counts.size == 0 or int(counts.sum()) < 1 or int(counts.min()) < 0:
        raise ConfigError(
            f"shard_order: sizes must be >= 0 with one sample at least, got {counts[:4].tolist()}... "
            "Pass the number of samples of each shard."
        )
    if shuffle is False:
        return ElasticSampler(size=int(counts.sum()), seed=seed, shuffle=False)
    return BlockOrder(sizes=counts, seed=seed, options=BlockShuffle() if shuffle is True else shuffle)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _EpochLayout:
    """Concatenated shards of an epoch.

    Args:
        epoch: the epoch.
        shard_starts: start of each shard.
        dataset_offsets: offset from ``shard_starts`` to the shard's start in the dataset.
        window_starts: start of each window of shards, and the end of the last window.
    """

    epoch: int
    shard_starts: IntArray
    dataset_offsets: IntArray
    window_starts: IntArray


# Not frozen, because it keeps the layout of the epoch that was used last, which takes O(shards) to build.
@dataclass(slots=True, kw_only=True, eq=False)
class BlockOrder:
    """Order of an epoch over shards of given sizes, built by ``shard_order``.

    Args:
        sizes: ``[shards]`` int64, samples of each shard; a shard may be empty.
        seed: seed of the shuffle.
        options: window and streams.
    """

    sizes: IntArray = field(repr=False)
    seed: int
    options: BlockShuffle
    size: int = field(init=False)
    _digest: int = field(init=False, repr=False)
    _latest: _EpochLayout | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        self.size = int(self.sizes.sum())
        self._digest = derive_seed(self.sizes.astype("<i8").tobytes().hex()) >> 11

    @property
    def streams(self) -> int:
        """Number of streams."""
        return self.options.streams

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return the dataset indices at positions ``start`` to ``stop`` of ``epoch``: ``[stop - start]`` int64."""
        check_range("BlockShuffle", self.size, start, stop)
        layout = self._layout(epoch)
        # Grouping by stream makes samples of a window adjacent.
        streams = (np.arange(start, stop) % self.streams).astype(np.uint16 if self.streams < 2**16 else np.int64)
        by_stream = np.argsort(streams, kind="stable")
        offsets, stream = np.divmod(start + by_stream, self.streams)
        begins, sizes = self._windows(layout, offsets, stream)
        inside = self._stream_start(stream) + offsets - begins
        samples = begins + permute_in_ranges(inside, sizes, begins, derive_seed(self.seed, "windows", epoch))
        out = np.empty_like(samples)
        out[by_stream] = samples + layout.dataset_offsets[np.searchsorted(layout.shard_starts, samples, side="right") - 1]
        return torch.from_numpy(out)

    def state(self, epoch: int, start: int) -> dict[str, int]:
        """Return seed, options, numbers of samples and shards, and a hash of the shards' sizes, to check a saved position."""
        options = self.options
        return {
            "size": self.size,
            "seed": self.seed,
            "shuffle": _SHUFFLE_CODES[options.unit],
            "block_size": options.block_size,
            "streams": options.streams,
            "shards": len(self.sizes),
            "shard_sizes": self._digest,
        }

    def at_state(self, state: Mapping[str, int], epoch: int, start: int) -> BlockOrder:
        """Return this order after a check of ``state``.

        Raises:
            CheckpointMismatchError: ``state`` has other shards, another seed or other options.
        """
        check_same_state(state, self.state(epoch, start))
        return self

    def _layout(self, epoch: int) -> _EpochLayout:
        if self._latest is not None and self._latest.epoch == epoch:
            return self._latest
        shards = permute_array(np.arange(len(self.sizes)), len(self.sizes), derive_seed(self.seed, "shards", epoch))
        lengths = self.sizes[shards]
        begins = np.cumsum(lengths) - lengths
        stream_starts = self._stream_start(np.arange(min(self.streams, self.size)))
        stream_of = np.searchsorted(stream_starts, begins, side="right") - 1
        first_shard_of = np.searchsorted(begins, stream_starts, side="right") - 1
        opens = (np.arange(len(shards)) - first_shard_of[stream_of] + self._stagger(stream_of)) % self.options.block_size == 0
        # A window start may occur twice, which has no effect.
        window_starts = np.sort(np.concatenate([stream_starts, begins[opens], [self.size]]))
        dataset_offsets = (np.cumsum(self.sizes) - self.sizes)[shards] - begins
        layout = _EpochLayout(epoch=epoch, shard_starts=begins, dataset_offsets=dataset_offsets, window_starts=window_starts)
        self._latest = layout
        return layout

    def _stream_start(self, stream: IntArray) -> IntArray:
        """Return the start of a stream. Stream ``s`` has as many samples as there are positions with ``p % streams == s``."""
        whole, longer = divmod(self.size, self.streams)
        return stream * whole + np.minimum(stream, longer)

    def _stagger(self, stream: IntArray) -> IntArray:
        """Return the reduction of a stream's first window, so that the streams do not need new shards at the same time."""
        return stream * self.options.block_size // self.streams

    def _windows(self, layout: _EpochLayout, offsets: IntArray, stream: IntArray) -> tuple[IntArray, IntArray]:
        """Return the start of each position's window, and the number of samples in the window."""
        begin = self._stream_start(stream)
        if self.options.unit == "samples":
            window = (offsets + self._stagger(stream)) // self.options.block_size
            first = begin + window * self.options.block_size - self._stagger(stream)
            end = np.minimum(first + self.options.block_size, self._stream_start(stream + 1))
            first = np.maximum(first, begin)
            return first, end - first
        window = np.searchsorted(layout.window_starts, begin + offsets, side="right") - 1
        return layout.window_starts[window], layout.window_starts[window + 1] - layout.window_starts[window]


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
            length = _MIN_LENGTH
            if cached is not None and epoch == cached.epoch and cached.start <= start <= cached.stop + _MAX_GAP:
                length = min(2 * max(len(cached.indices), stop - start), _MAX_LENGTH)
            end = max(min(start + length, self.order.size), stop)
            cached = self._cached = _CachedRange(epoch, start, end, self.order.indices(epoch, start, end))
        return cached.indices[start - cached.start : stop - cached.start]


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
        chunk = slice(first, first + _CHUNK)
        small = sizes[chunk] <= _SORT_LIMIT
        for chosen, permute_fn in ((small, _sort_in_ranges), (~small, _cycle_walk_in_ranges)):
            if chosen.any():
                out[chunk][chosen] = permute_fn(offsets[chunk][chosen], sizes[chunk][chosen], ids[chunk][chosen], keys)
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
    keyed: IntArray = ordered[np.repeat(begins, run_lengths) + offsets]
    return keyed & (_SORT_LIMIT - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleQuality:
    """Shuffle quality of one epoch. A full shuffle has 1, 0, 1 and 1, up to chance; no shuffle has 0, 1 and small values.

    Args:
        displacement: mean distance of a sample from its position in the dataset, relative to a full shuffle (a third of the
            dataset).
        adjacent_correlation: correlation of the dataset positions of consecutive samples.
        shards_per_batch: mean number of shards in a batch, relative to a full shuffle.
        batch_uniformity: standard deviation of the batches' mean dataset position under a full shuffle, relative to this order.
            Below 1, the data drift from batch to batch. Above 1, batches are more alike than under a full shuffle, because
            the streams read from all parts of the dataset.
    """

    displacement: float
    adjacent_correlation: float
    shards_per_batch: float
    batch_uniformity: float

    def __str__(self) -> str:
        return (
            f"displacement {self.displacement:.3f}, adjacent correlation {self.adjacent_correlation:+.3f}, "
            f"shards per batch {self.shards_per_batch:.3f}, batch uniformity {self.batch_uniformity:.3f}"
        )


def shuffle_quality(order: SampleOrder, sizes: Sequence[int], *, batch_size: int, epoch: int = 0) -> ShuffleQuality:
    """Measure the shuffle quality of ``order`` over a whole epoch of a dataset in shards.

    Args:
        order: order of the dataset.
        sizes: samples of each shard, in the dataset's order.
        batch_size: samples of a batch: a global batch, or a rank's share of a global batch.
        epoch: the epoch to measure.

    Example:
        >>> import dtrain as dt
        >>> order = dt.data.shard_order(
        ...     [1000] * 8, seed=0, shuffle=dt.data.BlockShuffle(block_size=2, streams=2)
        ... )
        >>> quality = dt.data.shuffle_quality(order, [1000] * 8, batch_size=64)
        >>> round(quality.shards_per_batch, 1)
        0.4

    Raises:
        ConfigError: the sizes do not match the order, or there are fewer than two batches.
    """
    total = sum(sizes)
    if total != order.size or total < 2 * batch_size:
        raise ConfigError(
            f"shuffle_quality: sizes must have the order's {order.size} samples and two batches, got {total=}, {batch_size=}. "
            "Pass the sizes that the order was built from, and a batch_size of at most half their sum."
        )
    samples = order.indices(epoch, 0, order.size).numpy()
    batches = samples[: total // batch_size * batch_size].reshape(-1, batch_size)
    shard_of = np.sort(np.searchsorted(np.cumsum(sizes), batches, side="right"), axis=1)
    shards_per_batch = float((np.diff(shard_of, axis=1) != 0).sum(axis=1).mean()) + 1
    # A random batch misses a shard with probability (1 - its share) ** batch_size.
    expected_shards = float((1 - (1 - np.asarray(sizes) / total) ** batch_size).sum())
    return ShuffleQuality(
        displacement=float(np.abs(samples - np.arange(total)).mean()) * 3 / total,
        adjacent_correlation=float(np.corrcoef(samples[1:], samples[:-1])[0, 1]),
        shards_per_batch=shards_per_batch / expected_shards,
        batch_uniformity=total / (12 * batch_size) ** 0.5 / float(batches.mean(axis=1).std()),
    )
