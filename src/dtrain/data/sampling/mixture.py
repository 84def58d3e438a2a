"""``MixtureOrder``: the order of several sources with mixing weights, each with a position and epochs of its own.

``mix``: several datasets as one, drawn from in exact proportions."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtrain.data.dataset import MapDataset, fingerprint_dataset
from dtrain.data.sampling.block_shuffle import BlockShuffle
from dtrain.data.sampling.interleave import SplitTree, build_tree, count_sources, source_of
from dtrain.data.sampling.permutation import IntArray
from dtrain.data.sampling.sample_order import ElasticSampler, SampleOrder, check_range, check_same_state
from dtrain.dist.rng import derive_seed
from dtrain.errors import CheckpointMismatchError, ConfigError
from dtrain.typing import Plain


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixtureSource:
    """One of the sources of a mixture.

    Args:
        name: in the state.
        order: of its own epochs.
        first_index: its first index in the mixture.
        weight: share of the samples, over the sum of all weights.
        drawn: samples that were drawn from it at the mixture's ``origin``.
    """

    name: str
    order: SampleOrder
    first_index: int
    weight: Fraction
    drawn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixtureOrder:
    """Positions of a mixture to indices of its sources laid end to end. Made by ``Mixture.order``.

    Sources are dealt to rows of ``streams`` positions (1, unless a source is block-shuffled), in exact proportions, see ``deal``;
    they go on over the ends of the mixture's epochs. The ``k``-th sample of a source is the one at position ``k % size`` of its
    own epoch ``k // size``. All of it is arithmetic: any position costs the same.

    Args:
        sources: in the order in which their indices follow each other.
        size: samples in one epoch of the mixture.
        seed: what the sources' seeds were made of.
        origin: place in the whole run, counted over epochs, from which the weights hold; a change of weights moves it.
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
        """Indices at positions ``start`` to ``stop`` of ``epoch``: ``[stop - start]`` int64."""
        check_range("mix", self.size, start, stop)
        begin, end = epoch * self.size + start - self.origin, epoch * self.size + stop - self.origin
        row = begin // self.streams
        dealt = source_of(self._tree, row, -(-end // self.streams))
        owner = np.repeat(dealt, self.streams)[begin - row * self.streams :][: stop - start]
        out = np.empty(stop - start, dtype=np.int64)
        for index, (source, first, last) in enumerate(
            zip(self.sources, self._drawn_before(begin), self._drawn_before(end), strict=True)
        ):
            out[owner == index] = source.first_index + _source_indices(source.order, first, last)
        return torch.from_numpy(out)

    def state(self, epoch: int, start: int) -> dict[str, int]:
        """What a position is only meaningful with: size, a hash of the weights, and each source's own position and state."""
        at = self._drawn_before(epoch * self.size + start - self.origin)
        state = {**self._identity(), "origin": self.origin, "weights": self._weights_hash()}
        for source, drawn in zip(self.sources, at, strict=True):
            own = source.order.state(*divmod(drawn, source.order.size))
            entries = {"drawn_at_origin": source.drawn, "drawn": drawn, **own}
            state |= {f"{source.name}.{key}": value for key, value in entries.items()}
        return state

    def at_state(self, state: Mapping[str, int], epoch: int, start: int) -> MixtureOrder:
        """The order that goes on where ``state`` was taken; with other weights, from each source's own position.

        Before that place a mixture with changed weights goes on backwards with the new ones.

        Raises:
            CheckpointMismatchError: other sources, a source with other data, another size or seed.
        """
        check_same_state(state, self._identity())
        same = state.get("weights") == self._weights_hash()
        sources = tuple(_resume_source(source, state, "drawn_at_origin" if same else "drawn") for source in self.sources)
        return replace(self, sources=sources, origin=state["origin"] if same else epoch * self.size + start)

    def _identity(self) -> dict[str, int]:
        return {"size": self.size, "seed": self.seed, "sources": len(self.sources)}

    def _drawn_before(self, place: int) -> list[int]:
        """Samples drawn from each source before ``place``, which counts from the origin."""
        row, rest = divmod(place, self.streams)
        drawn = [
            source.drawn + rows * self.streams for source, rows in zip(self.sources, self._source_counts(row), strict=True)
        ]
        if rest:
            drawn[int(source_of(self._tree, row, row + 1)[0])] += rest
        return drawn

    def _source_counts(self, rows: int) -> list[int]:
        return count_sources(self._tree, len(self.sources), rows)

    def _weights_hash(self) -> int:
        whole = sum(source.weight for source in self.sources)
        return derive_seed(*(f"{source.name}:{source.weight / whole}" for source in self.sources)) >> 11


def _resume_source(source: MixtureSource, state: Mapping[str, int], place: str) -> MixtureSource:
    prefix = f"{source.name}."
    own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    if "drawn" not in own or "drawn_at_origin" not in own:
        raise CheckpointMismatchError(
            f"loader: the saved position was in a mixture without a source {source.name!r}; mix the same sources, "
            "a weight of 0 leaves one out"
        )
    try:
        order = source.order.at_state(own, *divmod(own["drawn"], source.order.size))
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"source {source.name!r} of the mixture: {error}") from None
    return replace(source, order=order, drawn=own[place])


def _source_indices(order: SampleOrder, first: int, last: int) -> IntArray:
    """The ``first``-th to ``last``-th sample of a source, over the ends of its epochs."""
    parts = [np.empty(0, dtype=np.int64)]
    while first < last:
        epoch, start = divmod(first, order.size)
        stop = min(start + last - first, order.size)
        parts.append(order.indices(epoch, start, stop).numpy())
        first += stop - start
    return np.concatenate(parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Mixture:
    """Several datasets laid end to end, with an order that draws from them by weight. Made by ``mix``.

    Args:
        sources: datasets by name.
        weights: their shares, by the same names.
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
        """Samples of all sources together, which is not the length of an epoch: that is ``epoch_samples``."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        name, own = self._locate(index)
        return self.sources[name][own]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """A batch: each source is asked once, for all that is wanted of it."""
        found: list[Any] = [None] * len(indices)
        for name, places in self._group_by_source(indices).items():
            samples = _read_samples(self.sources[name], [own for _, own in places])
            for (at, _), sample in zip(places, samples, strict=True):
                found[at] = sample
        return found

    def order(self, seed: int, shuffle: bool | BlockShuffle) -> MixtureOrder:
        """Of each source its own order, or an ``ElasticSampler``; of the mixture, whose turn it is."""
        firsts = (0, *self._ends)
        sources = tuple(
            MixtureSource(
                name=name,
                order=_source_order(dataset, derive_seed(seed, "source", name), shuffle),
                first_index=first,
                weight=self.weights[name],
            )
            for (name, dataset), first in zip(self.sources.items(), firsts, strict=False)
        )
        return MixtureOrder(sources=sources, size=self.epoch_samples, seed=seed)

    def prefetch(self, indices: Tensor) -> None:
        """Tell each source what is wanted of it soon, if it wants to know."""
        first = 0
        for dataset, end in zip(self.sources.values(), self._ends, strict=True):
            own = indices[(indices >= first) & (indices < end)] - first
            if own.numel() and hasattr(dataset, "prefetch"):
                dataset.prefetch(own)
            first = end

    def fingerprint(self) -> dict[str, Plain]:
        """That of each source, by name. Weights are not part of the data."""
        return {name: fingerprint_dataset(dataset) for name, dataset in self.sources.items()}

    def close(self) -> None:
        """Close the sources that can be closed."""
        for dataset in self.sources.values():
            if hasattr(dataset, "close"):
                dataset.close()

    def _locate(self, index: int) -> tuple[str, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"mix: index {index} is not in 0 to {len(self) - 1}")
        at = bisect_right(self._ends, index)
        return self._names[at], index - (self._ends[at - 1] if at else 0)

    def _group_by_source(self, indices: list[int]) -> dict[str, list[tuple[int, int]]]:
        """For each source, where in the batch its samples go, and which they are."""
        found: dict[str, list[tuple[int, int]]] = {}
        for at, index in enumerate(indices):
            name, own = self._locate(index)
            found.setdefault(name, []).append((at, own))
        return found

    def __repr__(self) -> str:
        whole = sum(self.weights.values())
        each = (f"{name}: {len(dataset)} at {float(self.weights[name] / whole):.4g}" for name, dataset in self.sources.items())
        return f"Mixture({', '.join(each)}, epoch_samples={self.epoch_samples})"


def mix(
    sources: Mapping[str, MapDataset], *, weights: Mapping[str, float | Fraction], epoch_samples: int | None = None
) -> Mixture:
    """Several datasets as one: ``build_loader(mix({"web": web, "code": code}, weights={"web": 0.7, "code": 0.3}), ...)``.

    Every stretch of the epoch has the sources in these proportions, as exactly as whole samples allow: of two sources each is
    less than one sample away from its share, of any number less than four. (Sources that are block-shuffled are drawn from a
    row of ``lanes`` samples at a time, so there it is rows.) A source is read in its own order, through epochs of its own: it
    begins again when it is used up, in another order, however long the mixture's epoch is. Weights may change at a resume:
    each source goes on where it was. Evaluate on the sources themselves: an epoch of a mixture may have a sample twice and
    another not at all.

    Args:
        sources: datasets by name, indexed; the same on every rank.
        weights: positive numbers by the same names, in any unit. A float is taken as it is written, so 0.7 and 0.3 are 7 to 3.
            0 leaves a source out, until a resume with other weights.
        epoch_samples: samples in one epoch of the mixture; by default as many as all sources have together.

    Raises:
        ConfigError: no source, an empty one, a name with a dot, other names in ``weights``, a weight below 0 or not finite,
            all weights 0, ``epoch_samples`` below 1.
    """
    if not sources or set(sources) != set(weights):
        raise ConfigError(f"mix: sources and weights need the same names, got {sorted(sources)} and {sorted(weights)}")
    for name, dataset in sources.items():
        if not isinstance(name, str) or not name or "." in name:
            raise ConfigError(f"mix: a source needs a name without a dot, got {name!r}")
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or len(dataset) < 1:
            raise ConfigError(f"mix: source {name!r} must be an indexed dataset with a length and at least one sample")
    shares = {name: _exact_weight(name, weights[name]) for name in sources}
    if not any(shares.values()):
        raise ConfigError("mix: all weights are 0; at least one source must be drawn from")
    size = sum(len(dataset) for dataset in sources.values()) if epoch_samples is None else epoch_samples
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"mix: epoch_samples must be a whole number of at least 1, got {epoch_samples!r}")
    return Mixture(sources=dict(sources), weights=shares, epoch_samples=size)


def _exact_weight(name: str, weight: Any) -> Fraction:
    """``weight`` as it is written: 0.7 is 7/10, not the binary fraction next to it."""
    number = isinstance(weight, int | float | Fraction) and not isinstance(weight, bool)
    if not number or not math.isfinite(weight) or weight < 0:
        raise ConfigError(f"mix: the weight of {name!r} must be a positive number, got {weight!r}")
    return Fraction(repr(float(weight))) if isinstance(weight, float) else Fraction(weight)


def _source_order(dataset: Any, seed: int, shuffle: bool | BlockShuffle) -> SampleOrder:
    if hasattr(dataset, "order"):
        order: SampleOrder = dataset.order(seed, shuffle)
        return order
    return ElasticSampler(size=len(dataset), seed=seed, shuffle=shuffle is not False)


def _read_samples(dataset: Any, indices: list[int]) -> list[Any]:
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]
