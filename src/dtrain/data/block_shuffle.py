"""``BlockShuffle``: a local shuffle for samples in shards; ``shuffle_quality``: compare an order with a full shuffle.

A full shuffle reads from every shard at all times. A block shuffle permutes the shards, concatenates them, and cuts the result
into ``streams`` of equal length. Inside a stream it shuffles the samples of a few adjacent shards (a window), window by window.
Position ``p`` of the epoch is in stream ``p % streams``, at offset ``p // streams``, so all streams end together. A cut is
usually inside a shard, and two streams read that shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dtrain.arguments import check_choice, check_int
from dtrain.data.sample_order import (
    ElasticSampler,
    IntArray,
    SampleOrder,
    check_range,
    check_same_state,
    permute_array,
    permute_in_ranges,
)
from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError

WindowUnit = Literal["shards", "samples"]
# Codes of the state's entry "shuffle". ElasticSampler uses the codes 0 and 1.
_SHUFFLE_CODES = {"shards": 2, "samples": 3}


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


@dataclass(slots=True)
class _LayoutCache:
    """Layout of the epoch that was used last. A layout depends on the epoch only, and takes O(shards) to build."""

    layout: _EpochLayout | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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
    _cache: _LayoutCache = field(init=False, repr=False, default_factory=_LayoutCache)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", int(self.sizes.sum()))
        object.__setattr__(self, "_digest", derive_seed(self.sizes.astype("<i8").tobytes().hex()) >> 11)

    @property
    def streams(self) -> int:
        """Number of streams."""
        return self.options.streams

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return the dataset indices at positions ``start`` to ``stop`` of ``epoch``: ``[stop - start]`` int64."""
        check_range("BlockShuffle", self.size, start, stop)
        layout = self._layout(epoch)
        # Grouping by stream makes samples of a window adjacent.
        by_stream = self._group_by_stream(start, stop)
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
        layout = self._cache.layout
        if layout is None or layout.epoch != epoch:
            layout = self._cache.layout = self._build_layout(epoch)
        return layout

    def _build_layout(self, epoch: int) -> _EpochLayout:
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
        return _EpochLayout(epoch=epoch, shard_starts=begins, dataset_offsets=dataset_offsets, window_starts=window_starts)

    def _group_by_stream(self, start: int, stop: int) -> IntArray:
        """Return the positions ``start`` to ``stop``, counted from ``start``, sorted by stream."""
        stream = np.arange(start, stop) % self.streams
        return np.argsort(stream.astype(np.uint16 if self.streams < 2**16 else np.int64), kind="stable")

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
        at = np.searchsorted(layout.window_starts, begin + offsets, side="right") - 1
        return layout.window_starts[at], layout.window_starts[at + 1] - layout.window_starts[at]


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
