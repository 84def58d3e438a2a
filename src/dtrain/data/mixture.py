"""``mix``: combine several datasets to one with exact mixing weights; ``MixtureOrder``: the sample order of the mixture."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dtrain.arguments import check_int
from dtrain.data.dataset import MapDataset, as_row_dataset, fingerprint_dataset, read_samples
from dtrain.data.sample_lengths import LengthTable, known_lengths
from dtrain.data.sample_order import BlockShuffle, IntArray, SampleOrder, check_range, check_same_state, dataset_order
from dtrain.dist.rng import derive_seed
from dtrain.errors import CheckpointMismatchError, ConfigError
from dtrain.typing import Plain

SplitTree: TypeAlias = "Split | int"
# Denominators up to this limit leave room for 2**16 positions in 63 bits.
_MAX_INT64_DENOMINATOR = 2**44
_CHUNK = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Node that sends ``numerator / denominator`` of the positions ``left``, the rest ``right``; a leaf is a source number.

    Two sources with weights ``p : q - p``: the first source has ``floor(n p / q + 1/2)`` of the first ``n`` positions. More
    than two: a binary tree of such splits, least weights first (Huffman's tree). Each split counts only the positions that
    reach it.

    Error bound of the count of a source of weight ``w`` against ``n w``: a split adds at most 1/2, and scales the error of its
    parent by its share. Along the path from the source (weight ``v0``) to the root (``v1``, ``v2``, ...) the sum is ``1/2
    sum(v0 / vj)`` without the root. In Huffman's tree ``v(j+2) >= v(j+1) + v(j)``, because the node merged with ``v(j+1)`` was
    no less than ``v(j)``. So the terms fall like 1, 1, 1/2, 1/3, 1/5, ..., and the sum is below 3.36. In the first ``n``
    positions a source deviates from its share by at most 1/2 with two sources, less than 1 with three, and less than 1.68 with
    any number. In any other range the deviation is less than twice that.
    """

    numerator: int
    denominator: int
    left: SplitTree
    right: SplitTree

    def count_left(self, positions: int) -> int:
        """Count the positions among the first ``positions`` that go left. A negative number extends the sequence backwards."""
        return (2 * positions * self.numerator + self.denominator) // (2 * self.denominator)


def build_tree(weights: Sequence[Fraction]) -> SplitTree:
    """Build the tree for sources of these weights. A source of weight 0 is not in the tree."""
    heap: list[tuple[Fraction, int, SplitTree]] = [(weight, index, index) for index, weight in enumerate(weights) if weight > 0]
    heapq.heapify(heap)
    for number in range(len(heap) - 1):
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        ratio = first[0] / (first[0] + second[0])
        split = Split(numerator=ratio.numerator, denominator=ratio.denominator, left=first[2], right=second[2])
        heapq.heappush(heap, (first[0] + second[0], len(weights) + number, split))
    return heap[0][2]


def count_sources(tree: SplitTree, sources: int, positions: int) -> list[int]:
    """Count the positions of each source among the first ``positions``."""
    counts, nodes = [0] * sources, [(tree, positions)]
    while nodes:
        node, count = nodes.pop()
        if isinstance(node, int):
            counts[node] = count
        else:
            left_count = node.count_left(count)
            nodes += [(node.left, left_count), (node.right, count - left_count)]
    return counts


def source_of(tree: SplitTree, start: int, stop: int) -> IntArray:
    """Return the source of each position from ``start`` to ``stop``: ``[stop - start]`` int64."""
    sources = np.empty(stop - start, dtype=np.int64)
    for first in range(start, stop, _CHUNK):
        _fill(tree, first, sources[first - start :][:_CHUNK])
    return sources


def _fill(tree: SplitTree, start: int, out: IntArray) -> None:
    """Write the source of each position. Mutates: ``out``."""
    if isinstance(tree, int):
        out[:] = tree
        return
    # Beyond 63 bits, use Python integers, which are about 10 times slower.
    left_count, positions = tree.count_left(start), np.arange(len(out) + 1)
    if tree.denominator > _MAX_INT64_DENOMINATOR:
        counts = np.array([tree.count_left(start + i) - left_count for i in range(len(out) + 1)], dtype=np.int64)
    else:
        rest = (2 * start * tree.numerator + tree.denominator) % (2 * tree.denominator)
        counts = (rest + 2 * tree.numerator * positions) // (2 * tree.denominator)
    goes_left = counts[1:] > counts[:-1]
    for node, mask, first in ((tree.left, goes_left, left_count), (tree.right, ~goes_left, start - left_count)):
        sources = np.empty(int(mask.sum()), dtype=np.int64)
        _fill(node, first, sources)
        out[mask] = sources


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixtureSource:
    """Source of a mixture.

    Args:
        name: name in the state.
        order: order of the source's own epochs.
        first_index: first index of the source in the mixture.
        weight: weight, relative to the sum of all weights.
        drawn: samples drawn from the source at the mixture's ``origin``.
    """

    name: str
    order: SampleOrder
    first_index: int
    weight: Fraction
    drawn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixtureOrder:
    """Sample order of a mixture, as indices of the concatenated sources. ``Mixture.order`` builds it.

    Each row of ``streams`` positions belongs to one source (rows have one position unless a source is block-shuffled), in exact
    proportions, see ``interleave``. Sources continue over the ends of the mixture's epochs. The ``k``-th sample of a source is
    at position ``k % size`` of its epoch ``k // size``. A closed form computes every position at the same cost.

    Args:
        sources: sources in the order of their indices.
        size: samples in one epoch of the mixture.
        seed: seed of the mixture, from which the sources' seeds were derived.
        origin: position in the run, counted over epochs, from which the weights hold; a change of weights moves it.
    """

    sources: tuple[MixtureSource, ...]
    size: int
    seed: int
    origin: int = 0
    streams: int = field(init=False)
    _tree: SplitTree = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "streams", lcm(*(source.order.streams for source in self.sources)))
        object.__setattr__(self, "_tree", build_tree([source.weight for source in self.sources]))

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """Return the indices at positions ``start`` to ``stop`` of ``epoch``: ``[stop - start]`` int64."""
        check_range("mix", self.size, start, stop)
        begin, end = epoch * self.size + start - self.origin, epoch * self.size + stop - self.origin
        row = begin // self.streams
        source_of_row = source_of(self._tree, row, -(-end // self.streams))
        owner = np.repeat(source_of_row, self.streams)[begin - row * self.streams :][: stop - start]
        out = np.empty(stop - start, dtype=np.int64)
        for index, (source, first, last) in enumerate(
            zip(self.sources, self._drawn_before(begin), self._drawn_before(end), strict=True)
        ):
            out[owner == index] = source.first_index + _source_indices(source.order, first, last)
        return torch.from_numpy(out)

    def state(self, epoch: int, start: int) -> dict[str, int]:
        """Return size, seed, a hash of the weights, and each source's own position and state, to check a saved position."""
        counts = self._drawn_before(epoch * self.size + start - self.origin)
        state = {**self._identity(), "origin": self.origin, "weights": self._weights_hash()}
        for source, drawn in zip(self.sources, counts, strict=True):
            own_state = source.order.state(*divmod(drawn, source.order.size))
            entries = {"drawn_at_origin": source.drawn, "drawn": drawn, **own_state}
            state |= {f"{source.name}.{key}": value for key, value in entries.items()}
        return state

    def at_state(self, state: Mapping[str, int], epoch: int, start: int) -> MixtureOrder:
        """Return the order that continues at ``state``. With other weights, each source continues at its own position.

        Before that position, a mixture with changed weights extends backwards with the new weights.

        Raises:
            CheckpointMismatchError: ``state`` has other sources, a source with other data, another size or another seed.
        """
        check_same_state(state, self._identity())
        same = state.get("weights") == self._weights_hash()
        sources = tuple(_resume_source(source, state, "drawn_at_origin" if same else "drawn") for source in self.sources)
        return replace(self, sources=sources, origin=state["origin"] if same else epoch * self.size + start)

    def _identity(self) -> dict[str, int]:
        return {"size": self.size, "seed": self.seed, "sources": len(self.sources)}

    def _drawn_before(self, position: int) -> list[int]:
        """Count the samples drawn from each source before ``position``, which counts from the origin."""
        row, rest = divmod(position, self.streams)
        rows_of = count_sources(self._tree, len(self.sources), row)
        drawn = [source.drawn + rows * self.streams for source, rows in zip(self.sources, rows_of, strict=True)]
        if rest:
            drawn[int(source_of(self._tree, row, row + 1)[0])] += rest
        return drawn

    def _weights_hash(self) -> int:
        total = sum(source.weight for source in self.sources)
        return derive_seed(*(f"{source.name}:{source.weight / total}" for source in self.sources)) >> 11


def _resume_source(source: MixtureSource, state: Mapping[str, int], key: str) -> MixtureSource:
    prefix = f"{source.name}."
    own_state = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    if "drawn" not in own_state or "drawn_at_origin" not in own_state:
        raise CheckpointMismatchError(
            f"loader: the saved position was in a mixture without a source {source.name!r}. Mix the same sources; "
            "a weight of 0 excludes a source."
        )
    try:
        order = source.order.at_state(own_state, *divmod(own_state["drawn"], source.order.size))
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"source {source.name!r} of the mixture: {error}") from None
    return replace(source, order=order, drawn=own_state[key])


def _source_indices(order: SampleOrder, first: int, last: int) -> IntArray:
    """Return the ``first``-th to ``last``-th sample of a source, over the ends of its epochs."""
    parts = [np.empty(0, dtype=np.int64)]
    while first < last:
        epoch, start = divmod(first, order.size)
        stop = min(start + last - first, order.size)
        parts.append(order.indices(epoch, start, stop).numpy())
        first += stop - start
    return np.concatenate(parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Mixture:
    """Concatenation of several datasets, with an order that draws from them by weight. ``mix`` builds it.

    Args:
        sources: datasets by name.
        weights: weights by the same names.
        epoch_samples: samples in one epoch of the mixture.
    """

    sources: Mapping[str, MapDataset]
    weights: Mapping[str, Fraction]
    epoch_samples: int
    _names: tuple[str, ...] = field(init=False)
    _ends: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_names", tuple(self.sources))
        object.__setattr__(self, "_ends", tuple(accumulate(len(dataset) for dataset in self.sources.values())))

    def __len__(self) -> int:
        """Count the samples of all sources. The length of an epoch is ``epoch_samples``."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Read a batch. Each source reads its samples in one call."""
        positions_of: dict[int, list[int]] = {}
        for position, index in enumerate(indices):
            if not 0 <= index < len(self):
                raise IndexError(f"mix: index {index} is not in 0 to {len(self) - 1}")
            positions_of.setdefault(bisect_right(self._ends, index), []).append(position)
        samples: list[Any] = [None] * len(indices)
        for source, positions in positions_of.items():
            first = self._ends[source - 1] if source else 0
            own_indices = [indices[position] - first for position in positions]
            for position, sample in zip(positions, read_samples(self.sources[self._names[source]], own_indices), strict=True):
                samples[position] = sample
        return samples

    def order(self, seed: int, shuffle: bool | BlockShuffle) -> MixtureOrder:
        """Return the order of the mixture. A source without a method ``order`` has an ``ElasticSampler``."""
        firsts = (0, *self._ends)
        sources = tuple(
            MixtureSource(
                name=name,
                order=dataset_order(dataset, len(dataset), derive_seed(seed, "source", name), shuffle),
                first_index=first,
                weight=self.weights[name],
            )
            for (name, dataset), first in zip(self.sources.items(), firsts, strict=False)
        )
        return MixtureOrder(sources=sources, size=self.epoch_samples, seed=seed)

    def sample_lengths(self, column: str | None = None) -> LengthTable:
        """Return the lengths that the sources know, in ``column`` if it is not None.

        Raises:
            ConfigError: a source knows no lengths, or has no such column.
        """
        return LengthTable.join([known_lengths(as_row_dataset(dataset), column) for dataset in self.sources.values()])

    def prefetch(self, indices: Tensor) -> None:
        """Pass the indices to each source that has a method ``prefetch``."""
        first = 0
        for dataset, end in zip(self.sources.values(), self._ends, strict=True):
            own_index = indices[(indices >= first) & (indices < end)] - first
            if own_index.numel() and hasattr(dataset, "prefetch"):
                dataset.prefetch(own_index)
            first = end

    def fingerprint(self) -> dict[str, Plain]:
        """Return the fingerprint of each source, by name. Weights are not part of the data."""
        return {name: fingerprint_dataset(dataset) for name, dataset in self.sources.items()}

    def close(self) -> None:
        """Close the sources that can be closed."""
        for dataset in self.sources.values():
            if hasattr(dataset, "close"):
                dataset.close()

    def __repr__(self) -> str:
        total = sum(self.weights.values())
        parts = (f"{name}: {len(dataset)} at {float(self.weights[name] / total):.4g}" for name, dataset in self.sources.items())
        return f"Mixture({', '.join(parts)}, epoch_samples={self.epoch_samples})"


def mix(
    sources: Mapping[str, MapDataset], *, weights: Mapping[str, float | Fraction], epoch_samples: int | None = None
) -> Mixture:
    """Combine several datasets to one that draws from them by weight.

    Every range of the epoch has the sources in these proportions, as exactly as whole samples allow. With two sources, each
    count is less than one sample away from its share, with any number of sources less than four. (If a source is
    block-shuffled, the unit is a row of ``streams`` samples.) A source is read in its own order, in epochs of its own: at its
    end it begins again, in another order. The weights may change at a resume; each source continues at its position. Evaluate
    on the sources themselves, since an epoch of a mixture may repeat or omit samples.

    Args:
        sources: indexed datasets by name; equal on every rank.
        weights: positive numbers by the same names, in any unit. A float means its decimal form, so 0.7 and 0.3 are 7 to 3.
            0 excludes a source until a resume with other weights.
        epoch_samples: samples in one epoch of the mixture; None uses the total of all sources.

    Example:
        >>> import dtrain as dt
        >>> dataset = dt.data.mix(
        ...     {"web": list(range(70)), "code": list(range(30))},
        ...     weights={"web": 0.9, "code": 0.1},
        ... )
        >>> loader = dt.build_loader(dataset, global_batch_size=10, seed=0)
        >>> dataset
        Mixture(web: 70 at 0.9, code: 30 at 0.1, epoch_samples=100)

    Raises:
        ConfigError: there is no source, a source is empty, a name has a dot, the names of ``weights`` differ, a weight is
            negative or not finite, all weights are 0, or ``epoch_samples`` is below 1.
    """
    if not sources or set(sources) != set(weights):
        raise ConfigError(
            f"mix: sources and weights must have the same names, got {sorted(sources)} and {sorted(weights)}. "
            "Give each source one weight under its own name."
        )
    for name, dataset in sources.items():
        if not isinstance(name, str) or not name or "." in name:
            raise ConfigError(
                f"mix: the name of a source must be a string without a dot, got {name!r}. "
                "Rename the source, to 'web' for example."
            )
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or len(dataset) < 1:
            raise ConfigError(
                f"mix: source {name!r} must be an indexed dataset with a length and at least one sample. "
                "Pass a dataset that defines __len__ and __getitem__."
            )
    shares = {name: _exact_weight(name, weights[name]) for name in sources}
    if not any(shares.values()):
        raise ConfigError("mix: all weights are 0. Give one source a positive weight.")
    if epoch_samples is None:
        epoch_samples = sum(len(dataset) for dataset in sources.values())
    return Mixture(sources=dict(sources), weights=shares, epoch_samples=check_int("mix", "epoch_samples", epoch_samples))


def _exact_weight(name: str, weight: Any) -> Fraction:
    """Convert ``weight`` in its decimal form: 0.7 becomes 7/10, not the nearest binary fraction."""
    number = isinstance(weight, int | float | Fraction) and not isinstance(weight, bool)
    if not number or not math.isfinite(weight) or weight < 0:
        raise ConfigError(
            f"mix: the weight of {name!r} must be a positive number, got {weight!r}. Remove the source to leave it out."
        )
    return Fraction(repr(float(weight))) if isinstance(weight, float) else Fraction(weight)
