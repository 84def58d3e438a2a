"""``BlockShuffle``: a shuffle with limited locality, for samples that lie in shards.

A full shuffle asks for every shard all the time. Here the shards are shuffled, laid end to end, and the line is cut into
``lanes`` of equal length; inside a lane the samples of a few neighbouring shards (a window) are shuffled, one window after the
other. Position ``p`` of the epoch is in lane ``p % lanes``, at offset ``p // lanes`` of it, so all lanes run out together and
nothing has to be searched for at the end of an epoch. A cut falls inside a shard, mostly: that shard is read in two lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dtrain.data.order.base import Order, check_same, check_stretch
from dtrain.data.order.permutation import Ints, permuted, permuted_each
from dtrain.data.order.sampler import ElasticSampler
from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError

Unit = Literal["shards", "samples"]
_CODES = {"shards": 2, "samples": 3}  # in the state's ``shuffle``, beside 0 and 1 of ``ElasticSampler``


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShuffle:
    """How far a sample may move: ``build_loader(shuffle=BlockShuffle(...))``.

    Args:
        window: in how many neighbouring shards of a lane (or how many samples of it) samples are shuffled with each other.
        unit: what ``window`` counts. Samples, where a single shard is more than should be open at a time, or next to nothing.
        lanes: parts of an epoch that are read at the same time. Where the number of ranks divides it, or the other way
            round, a rank reads the shards of its own lanes only. The order depends on it, so it is not the number of ranks.

    About ``lanes * (window + 1)`` shards are in use at any time, over all ranks: the cache has to hold those of its node.

    Raises:
        ConfigError: a window or lanes below 1, or another unit.
    """

    window: int = 4
    unit: Unit = "shards"
    lanes: int = 8

    def __post_init__(self) -> None:
        for name, value in (("window", self.window), ("lanes", self.lanes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"BlockShuffle: {name} must be a whole number of at least 1, got {value!r}")
        if self.unit not in _CODES:
            raise ConfigError(f"BlockShuffle: unit must be 'shards' or 'samples', got {self.unit!r}")


def order_of_shards(sizes: Sequence[int] | Tensor, *, seed: int, shuffle: bool | BlockShuffle) -> Order:
    """The order of a dataset whose samples lie in shards, one after the other: what its ``order`` returns.

    Args:
        sizes: samples of each shard.
        seed: of the shuffle.
        shuffle: a ``BlockShuffle``, True for the default one, False for the order in which the samples lie.

    Raises:
        ConfigError: no sample, or a negative size.
    """
    counts = _counts(sizes)
    if shuffle is False:
        return ElasticSampler(size=int(counts.sum()), seed=seed, shuffle=False)
    return BlockOrder(sizes=counts, seed=seed, options=BlockShuffle() if shuffle is True else shuffle)


def _counts(sizes: Sequence[int] | Tensor) -> Ints:
    counts = np.asarray(sizes, dtype=np.int64).reshape(-1)
    if counts.size == 0 or int(counts.sum()) < 1 or int(counts.min()) < 0:
        raise ConfigError(f"order_of_shards: shards need sizes >= 0 and one sample at least, got {counts[:4].tolist()}...")
    return counts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Line:
    """The shards of an epoch laid end to end."""

    epoch: int
    begins: Ints  # where each shard begins
    shifts: Ints  # from there to its place in the dataset
    borders: Ints  # where each window of shards begins, and where the last one ends


@dataclass(slots=True)
class _Kept:
    """The line that was asked for last: what depends on the epoch alone, and takes O(shards) to make."""

    line: _Line | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockOrder:
    """The order of an epoch over shards of given sizes. Made by ``order_of_shards``.

    Args:
        sizes: ``[shards]`` int64, samples of each; some may be 0.
        seed: of the shuffle.
        options: window and lanes.
    """

    sizes: Ints = field(repr=False)
    seed: int
    options: BlockShuffle
    size: int = field(init=False)
    _digest: int = field(init=False, repr=False)
    _kept: _Kept = field(init=False, repr=False, default_factory=_Kept)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", int(self.sizes.sum()))
        object.__setattr__(self, "_digest", derive_seed(self.sizes.astype("<i8").tobytes().hex()) >> 11)

    @property
    def lanes(self) -> int:
        """Of the options."""
        return self.options.lanes

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """Dataset indices at positions ``start`` to ``stop`` of ``epoch``: ``[stop - start]`` int64."""
        check_stretch("BlockShuffle", self.size, start, stop)
        line = self._line(epoch)
        by_lane = self._by_lane(start, stop)  # so that samples of a window stand together
        offsets, lane = np.divmod(start + by_lane, self.lanes)
        begins, sizes = self._windows(line, offsets, lane)
        inside = self._lane_begin(lane) + offsets - begins
        places = begins + permuted_each(inside, sizes, begins, derive_seed(self.seed, "windows", epoch))
        out = np.empty_like(places)
        out[by_lane] = places + line.shifts[np.searchsorted(line.begins, places, side="right") - 1]
        return torch.from_numpy(out)

    def state(self, epoch: int, start: int) -> dict[str, int]:
        """What a position is only meaningful with: seed, options, how many samples and shards, a hash of the shards' sizes."""
        options = self.options
        return {
            "size": self.size,
            "seed": self.seed,
            "shuffle": _CODES[options.unit],
            "window": options.window,
            "lanes": options.lanes,
            "shards": len(self.sizes),
            "shard_sizes": self._digest,
        }

    def resumed(self, state: Mapping[str, int], epoch: int, start: int) -> BlockOrder:
        """Itself.

        Raises:
            CheckpointMismatchError: other shards, seed or options.
        """
        check_same(state, self.state(epoch, start))
        return self

    def _line(self, epoch: int) -> _Line:
        line = self._kept.line
        if line is None or line.epoch != epoch:
            line = self._kept.line = self._laid(epoch)
        return line

    def _laid(self, epoch: int) -> _Line:
        shards = permuted(np.arange(len(self.sizes)), len(self.sizes), derive_seed(self.seed, "shards", epoch))
        lengths = self.sizes[shards]
        begins = np.cumsum(lengths) - lengths
        lanes = self._lane_begin(np.arange(min(self.lanes, self.size)))
        lane_of = np.searchsorted(lanes, begins, side="right") - 1
        first_of = np.searchsorted(begins, lanes, side="right") - 1  # the shard that each lane begins in
        opens = (np.arange(len(shards)) - first_of[lane_of] + self._stagger(lane_of)) % self.options.window == 0
        borders = np.sort(np.concatenate([lanes, begins[opens], [self.size]]))  # one twice does no harm
        shifts = (np.cumsum(self.sizes) - self.sizes)[shards] - begins
        return _Line(epoch=epoch, begins=begins, shifts=shifts, borders=borders)

    def _by_lane(self, start: int, stop: int) -> Ints:
        """Numbers of the positions from ``start`` to ``stop``, counted from there, lane after lane."""
        lane = np.arange(start, stop) % self.lanes
        return np.argsort(lane.astype(np.uint16 if self.lanes < 2**16 else np.int64), kind="stable")

    def _lane_begin(self, lane: Ints) -> Ints:
        """Where a lane begins on the line: lane ``l`` has as many samples as there are positions ``p % lanes == l``."""
        whole, longer = divmod(self.size, self.lanes)
        return lane * whole + np.minimum(lane, longer)

    def _stagger(self, lane: Ints) -> Ints:
        """By how much the first window of a lane is shorter: else all lanes would need new shards at the same time."""
        return lane * self.options.window // self.lanes

    def _windows(self, line: _Line, offsets: Ints, lane: Ints) -> tuple[Ints, Ints]:
        """Where on the line the window of each position begins, and how many samples are in it."""
        begin = self._lane_begin(lane)
        if self.options.unit == "samples":
            window = (offsets + self._stagger(lane)) // self.options.window
            first = begin + window * self.options.window - self._stagger(lane)
            end = np.minimum(first + self.options.window, self._lane_begin(lane + 1))
            first = np.maximum(first, begin)
            return first, end - first
        at = np.searchsorted(line.borders, begin + offsets, side="right") - 1
        return line.borders[at], line.borders[at + 1] - line.borders[at]
