"""``BlockShuffle``: a shuffle with limited locality, for samples that lie in shards.

A full shuffle asks for every shard all the time. Here the shards are shuffled, laid end to end, and the line is cut into
``lanes`` of equal length; inside a lane the samples of a few neighbouring shards (a window) are shuffled, one window after the
other. Position ``p`` of the epoch is in lane ``p % lanes``, at offset ``p // lanes`` of it, so all lanes run out together and
nothing has to be searched for at the end of an epoch. A cut falls inside a shard, mostly: that shard is read in two lanes.

``shuffle_quality``: how near an order comes to a full shuffle, in figures that say what a batch is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dtrain.data.sampling.permutation import IntArray, permute_array, permute_in_ranges
from dtrain.data.sampling.sample_order import ElasticSampler, SampleOrder, check_range, check_same_state
from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError

WindowUnit = Literal["shards", "samples"]
_SHUFFLE_CODES = {"shards": 2, "samples": 3}  # in the state's ``shuffle``, beside 0 and 1 of ``ElasticSampler``


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShuffle:
    """How far a sample may move: ``build_loader(shuffle=BlockShuffle(...))``.

    Args:
        window: in how many neighbouring shards of a lane (or how many samples of it) samples are shuffled with each other.
        unit: what ``window`` counts. Samples, where a single shard is more than should be open at a time, or next to nothing.
        streams: parts of an epoch that are read at the same time. Where the number of ranks divides it, or the other way
            round, a rank reads the shards of its own lanes only. The order depends on it, so it is not the number of ranks.

    About ``lanes * (window + 1)`` shards are in use at any time, over all ranks: the cache has to hold those of its node.

    Raises:
        ConfigError: a window or lanes below 1, or another unit.
    """

    window: int = 4
    unit: WindowUnit = "shards"
    streams: int = 8

    def __post_init__(self) -> None:
        for name, value in (("window", self.window), ("streams", self.streams)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"BlockShuffle: {name} must be a whole number of at least 1, got {value!r}")
        if self.unit not in _SHUFFLE_CODES:
            raise ConfigError(f"BlockShuffle: unit must be 'shards' or 'samples', got {self.unit!r}")


def shard_order(sizes: Sequence[int] | Tensor, *, seed: int, shuffle: bool | BlockShuffle) -> SampleOrder:
    """The order of a dataset whose samples lie in shards, one after the other: what its ``order`` returns.

    Args:
        sizes: samples of each shard.
        seed: of the shuffle.
        shuffle: a ``BlockShuffle``, True for the default one, False for the order in which the samples lie.

    Raises:
        ConfigError: no sample, or a negative size.
    """
    counts = _check_sizes(sizes)
    if shuffle is False:
        return ElasticSampler(size=int(counts.sum()), seed=seed, shuffle=False)
    return BlockOrder(sizes=counts, seed=seed, options=BlockShuffle() if shuffle is True else shuffle)


def _check_sizes(sizes: Sequence[int] | Tensor) -> IntArray:
    counts = np.asarray(sizes, dtype=np.int64).reshape(-1)
    if counts.size == 0 or int(counts.sum()) < 1 or int(counts.min()) < 0:
        raise ConfigError(f"shard_order: shards need sizes >= 0 and one sample at least, got {counts[:4].tolist()}...")
    return counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _EpochLayout:
    """The shards of an epoch laid end to end."""

    epoch: int
    shard_starts: IntArray  # where each shard begins
    dataset_offsets: IntArray  # from there to its place in the dataset
    window_starts: IntArray  # where each window of shards begins, and where the last one ends


@dataclass(slots=True)
class _LayoutCache:
    """The line that was asked for last: what depends on the epoch alone, and takes O(shards) to make."""

    layout: _EpochLayout | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockOrder:
    """The order of an epoch over shards of given sizes. Made by ``shard_order``.

    Args:
        sizes: ``[shards]`` int64, samples of each; some may be 0.
        seed: of the shuffle.
        options: window and lanes.
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
        """Of the options."""
        return self.options.streams

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """Dataset indices at positions ``start`` to ``stop`` of ``epoch``: ``[stop - start]`` int64."""
        check_range("BlockShuffle", self.size, start, stop)
        line = self._layout(epoch)
        by_lane = self._group_by_stream(start, stop)  # so that samples of a window stand together
        offsets, lane = np.divmod(start + by_lane, self.streams)
        begins, sizes = self._windows(line, offsets, lane)
        inside = self._stream_start(lane) + offsets - begins
        places = begins + permute_in_ranges(inside, sizes, begins, derive_seed(self.seed, "windows", epoch))
        out = np.empty_like(places)
        out[by_lane] = places + line.dataset_offsets[np.searchsorted(line.shard_starts, places, side="right") - 1]
        return torch.from_numpy(out)

    def state(self, epoch: int, start: int) -> dict[str, int]:
        """What a position is only meaningful with: seed, options, how many samples and shards, a hash of the shards' sizes."""
        options = self.options
        return {
            "size": self.size,
            "seed": self.seed,
            "shuffle": _SHUFFLE_CODES[options.unit],
            "window": options.window,
            "streams": options.streams,
            "shards": len(self.sizes),
            "shard_sizes": self._digest,
        }

    def at_state(self, state: Mapping[str, int], epoch: int, start: int) -> BlockOrder:
        """Itself.

        Raises:
            CheckpointMismatchError: other shards, seed or options.
        """
        check_same_state(state, self.state(epoch, start))
        return self

    def _layout(self, epoch: int) -> _EpochLayout:
        line = self._cache.layout
        if line is None or line.epoch != epoch:
            line = self._cache.layout = self._build_layout(epoch)
        return line

    def _build_layout(self, epoch: int) -> _EpochLayout:
        shards = permute_array(np.arange(len(self.sizes)), len(self.sizes), derive_seed(self.seed, "shards", epoch))
        lengths = self.sizes[shards]
        begins = np.cumsum(lengths) - lengths
        lanes = self._stream_start(np.arange(min(self.streams, self.size)))
        lane_of = np.searchsorted(lanes, begins, side="right") - 1
        first_of = np.searchsorted(begins, lanes, side="right") - 1  # the shard that each lane begins in
        opens = (np.arange(len(shards)) - first_of[lane_of] + self._stagger(lane_of)) % self.options.window == 0
        borders = np.sort(np.concatenate([lanes, begins[opens], [self.size]]))  # one twice does no harm
        shifts = (np.cumsum(self.sizes) - self.sizes)[shards] - begins
        return _EpochLayout(epoch=epoch, shard_starts=begins, dataset_offsets=shifts, window_starts=borders)

    def _group_by_stream(self, start: int, stop: int) -> IntArray:
        """Numbers of the positions from ``start`` to ``stop``, counted from there, lane after lane."""
        lane = np.arange(start, stop) % self.streams
        return np.argsort(lane.astype(np.uint16 if self.streams < 2**16 else np.int64), kind="stable")

    def _stream_start(self, lane: IntArray) -> IntArray:
        """Where a lane begins on the line: lane ``l`` has as many samples as there are positions ``p % lanes == l``."""
        whole, longer = divmod(self.size, self.streams)
        return lane * whole + np.minimum(lane, longer)

    def _stagger(self, lane: IntArray) -> IntArray:
        """By how much the first window of a lane is shorter: else all lanes would need new shards at the same time."""
        return lane * self.options.window // self.streams

    def _windows(self, line: _EpochLayout, offsets: IntArray, lane: IntArray) -> tuple[IntArray, IntArray]:
        """Where on the line the window of each position begins, and how many samples are in it."""
        begin = self._stream_start(lane)
        if self.options.unit == "samples":
            window = (offsets + self._stagger(lane)) // self.options.window
            first = begin + window * self.options.window - self._stagger(lane)
            end = np.minimum(first + self.options.window, self._stream_start(lane + 1))
            first = np.maximum(first, begin)
            return first, end - first
        at = np.searchsorted(line.window_starts, begin + offsets, side="right") - 1
        return line.window_starts[at], line.window_starts[at + 1] - line.window_starts[at]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleQuality:
    """Figures of one epoch. A full shuffle has 1, 0, 1 and 1, up to chance; no shuffle 0, 1 and next to nothing.

    Args:
        displacement: mean distance of a sample from where it lies in the dataset, over a full shuffle's (a third of the dataset).
        adjacent_correlation: correlation of the places, in the dataset, of samples that follow each other in the epoch.
        shards_per_batch: in how many shards the samples of a batch lie, over that of a full shuffle, on average.
        batch_uniformity: the mean place of a batch's samples varies from batch to batch; a full shuffle's standard deviation of it
            over this one's. Below 1, what a model sees drifts: one batch says less about the whole dataset. Above 1, it is
            more alike than chance would have it, where lanes read from all over the dataset.
    """

    displacement: float
    adjacent_correlation: float
    shards_per_batch: float
    batch_uniformity: float

    def __str__(self) -> str:
        return (
            f"moved {self.displacement:.3f}, neighbours {self.adjacent_correlation:+.3f}, shards per batch {self.shards_per_batch:.3f}, "
            f"steadiness {self.batch_uniformity:.3f}"
        )


def shuffle_quality(order: SampleOrder, sizes: Sequence[int], *, batch_size: int, epoch: int = 0) -> ShuffleQuality:
    """The quality of ``order`` over a dataset of shards, measured over a whole epoch.

    Args:
        order: of the dataset.
        sizes: samples of each shard, in the dataset's order.
        batch_size: samples of what is to be mixed well: a global batch, or a rank's share of it.
        epoch: which one.

    Raises:
        ConfigError: sizes that are not the order's, or fewer than two batches.
    """
    total = sum(sizes)
    if total != order.size or total < 2 * batch_size:
        raise ConfigError(
            f"shuffle_quality: needs the sizes of the order's {order.size} samples and two batches, got {total=}, {batch_size=}"
        )
    places = order.indices(epoch, 0, order.size).numpy()
    batches = places[: total // batch_size * batch_size].reshape(-1, batch_size)
    return ShuffleQuality(
        displacement=float(np.abs(places - np.arange(total)).mean()) * 3 / total,
        adjacent_correlation=float(np.corrcoef(places[1:], places[:-1])[0, 1]),
        shards_per_batch=_shards_per_batch(batches, sizes) / _expected_shards_per_batch(total, sizes, batch_size),
        batch_uniformity=total / (12 * batch_size) ** 0.5 / float(batches.mean(axis=1).std()),
    )


def _shards_per_batch(batches: IntArray, sizes: Sequence[int]) -> float:
    """In how many shards the samples of a batch lie, on average."""
    of = np.sort(np.searchsorted(np.cumsum(sizes), batches, side="right"), axis=1)
    return float((np.diff(of, axis=1) != 0).sum(axis=1).mean()) + 1


def _expected_shards_per_batch(total: int, sizes: Sequence[int], batch_size: int) -> float:
    """The same for a draw without regard to shards: each is missed with a chance of ``(1 - its share) ** batch_size``."""
    return float((1 - (1 - np.asarray(sizes) / total) ** batch_size).sum())
