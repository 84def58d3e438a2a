"""``mix``: several datasets as one, drawn from in exact proportions."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Any

from torch import Tensor

from dtrain.data.dataset import MapDataset, fingerprint_of
from dtrain.data.order.base import Order
from dtrain.data.order.blocks import BlockShuffle
from dtrain.data.order.mixture import MixtureOrder, Source
from dtrain.data.order.sampler import ElasticSampler
from dtrain.dist.rng import derive_seed
from dtrain.errors import ConfigError
from dtrain.types import Plain


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
        name, own = self._place(index)
        return self.sources[name][own]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """A batch: each source is asked once, for all that is wanted of it."""
        found: list[Any] = [None] * len(indices)
        for name, places in self._by_source(indices).items():
            samples = _samples(self.sources[name], [own for _, own in places])
            for (at, _), sample in zip(places, samples, strict=True):
                found[at] = sample
        return found

    def order(self, seed: int, shuffle: bool | BlockShuffle) -> MixtureOrder:
        """Of each source its own order, or an ``ElasticSampler``; of the mixture, whose turn it is."""
        firsts = (0, *self._ends)
        sources = tuple(
            Source(
                name=name,
                order=_order_of(dataset, derive_seed(seed, "source", name), shuffle),
                first=first,
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
        return {name: fingerprint_of(dataset) for name, dataset in self.sources.items()}

    def close(self) -> None:
        """Close the sources that can be closed."""
        for dataset in self.sources.values():
            if hasattr(dataset, "close"):
                dataset.close()

    def _place(self, index: int) -> tuple[str, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"mix: index {index} is not in 0 to {len(self) - 1}")
        at = bisect_right(self._ends, index)
        return self._names[at], index - (self._ends[at - 1] if at else 0)

    def _by_source(self, indices: list[int]) -> dict[str, list[tuple[int, int]]]:
        """For each source, where in the batch its samples go, and which they are."""
        found: dict[str, list[tuple[int, int]]] = {}
        for at, index in enumerate(indices):
            name, own = self._place(index)
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
    shares = {name: _exact(name, weights[name]) for name in sources}
    if not any(shares.values()):
        raise ConfigError("mix: all weights are 0; at least one source must be drawn from")
    size = sum(len(dataset) for dataset in sources.values()) if epoch_samples is None else epoch_samples
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"mix: epoch_samples must be a whole number of at least 1, got {epoch_samples!r}")
    return Mixture(sources=dict(sources), weights=shares, epoch_samples=size)


def _exact(name: str, weight: Any) -> Fraction:
    """``weight`` as it is written: 0.7 is 7/10, not the binary fraction next to it."""
    number = isinstance(weight, int | float | Fraction) and not isinstance(weight, bool)
    if not number or not math.isfinite(weight) or weight < 0:
        raise ConfigError(f"mix: the weight of {name!r} must be a positive number, got {weight!r}")
    return Fraction(repr(float(weight))) if isinstance(weight, float) else Fraction(weight)


def _order_of(dataset: Any, seed: int, shuffle: bool | BlockShuffle) -> Order:
    if hasattr(dataset, "order"):
        order: Order = dataset.order(seed, shuffle)
        return order
    return ElasticSampler(size=len(dataset), seed=seed, shuffle=shuffle is not False)


def _samples(dataset: Any, indices: list[int]) -> list[Any]:
    if hasattr(dataset, "__getitems__"):
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]
