"""``MixtureOrder``: the order of several sources with mixing weights, each with a position and epochs of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import lcm

import numpy as np
import torch
from torch import Tensor

from dtrain.data.order.base import Order, check_same, check_stretch
from dtrain.data.order.deal import Tree, counts, owners, split_by
from dtrain.data.order.permutation import Ints
from dtrain.dist.rng import derive_seed
from dtrain.errors import CheckpointMismatchError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """One of the sources of a mixture.

    Args:
        name: in the state.
        order: of its own epochs.
        first: its first index in the mixture.
        weight: share of the samples, over the sum of all weights.
        drawn: samples that were drawn from it at the mixture's ``origin``.
    """

    name: str
    order: Order
    first: int
    weight: Fraction
    drawn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MixtureOrder:
    """Positions of a mixture to indices of its sources laid end to end. Made by ``Mixture.order``.

    Sources are dealt to rows of ``lanes`` positions (1, unless a source is block-shuffled), in exact proportions, see ``deal``;
    they go on over the ends of the mixture's epochs. The ``k``-th sample of a source is the one at position ``k % size`` of its
    own epoch ``k // size``. All of it is arithmetic: any position costs the same.

    Args:
        sources: in the order in which their indices follow each other.
        size: samples in one epoch of the mixture.
        seed: what the sources' seeds were made of.
        origin: place in the whole run, counted over epochs, from which the weights hold; a change of weights moves it.
    """

    sources: tuple[Source, ...]
    size: int
    seed: int
    origin: int = 0
    lanes: int = field(init=False)
    _tree: Tree = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lanes", lcm(*(source.order.lanes for source in self.sources)))
        object.__setattr__(self, "_tree", split_by([source.weight for source in self.sources]))

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """Indices at positions ``start`` to ``stop`` of ``epoch``: ``[stop - start]`` int64."""
        check_stretch("mix", self.size, start, stop)
        begin, end = epoch * self.size + start - self.origin, epoch * self.size + stop - self.origin
        row = begin // self.lanes
        dealt = owners(self._tree, row, -(-end // self.lanes))
        owner = np.repeat(dealt, self.lanes)[begin - row * self.lanes :][: stop - start]
        out = np.empty(stop - start, dtype=np.int64)
        for index, (source, first, last) in enumerate(zip(self.sources, self._drawn(begin), self._drawn(end), strict=True)):
            out[owner == index] = source.first + _own(source.order, first, last)
        return torch.from_numpy(out)

    def state(self, epoch: int, start: int) -> dict[str, int]:
        """What a position is only meaningful with: size, a hash of the weights, and each source's own position and state."""
        at = self._drawn(epoch * self.size + start - self.origin)
        state = {**self._identity(), "origin": self.origin, "weights": self._weights()}
        for source, drawn in zip(self.sources, at, strict=True):
            own = source.order.state(*divmod(drawn, source.order.size))
            entries = {"drawn_at_origin": source.drawn, "drawn": drawn, **own}
            state |= {f"{source.name}.{key}": value for key, value in entries.items()}
        return state

    def resumed(self, state: Mapping[str, int], epoch: int, start: int) -> MixtureOrder:
        """The order that goes on where ``state`` was taken; with other weights, from each source's own position.

        Before that place a mixture with changed weights goes on backwards with the new ones.

        Raises:
            CheckpointMismatchError: other sources, a source with other data, another size or seed.
        """
        check_same(state, self._identity())
        same = state.get("weights") == self._weights()
        sources = tuple(_resumed(source, state, "drawn_at_origin" if same else "drawn") for source in self.sources)
        return replace(self, sources=sources, origin=state["origin"] if same else epoch * self.size + start)

    def _identity(self) -> dict[str, int]:
        return {"size": self.size, "seed": self.seed, "sources": len(self.sources)}

    def _drawn(self, place: int) -> list[int]:
        """Samples drawn from each source before ``place``, which counts from the origin."""
        row, rest = divmod(place, self.lanes)
        drawn = [source.drawn + rows * self.lanes for source, rows in zip(self.sources, self._counts(row), strict=True)]
        if rest:
            drawn[int(owners(self._tree, row, row + 1)[0])] += rest
        return drawn

    def _counts(self, rows: int) -> list[int]:
        return counts(self._tree, len(self.sources), rows)

    def _weights(self) -> int:
        whole = sum(source.weight for source in self.sources)
        return derive_seed(*(f"{source.name}:{source.weight / whole}" for source in self.sources)) >> 11


def _resumed(source: Source, state: Mapping[str, int], place: str) -> Source:
    prefix = f"{source.name}."
    own = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    if "drawn" not in own or "drawn_at_origin" not in own:
        raise CheckpointMismatchError(
            f"loader: the saved position was in a mixture without a source {source.name!r}; mix the same sources, "
            "a weight of 0 leaves one out"
        )
    try:
        order = source.order.resumed(own, *divmod(own["drawn"], source.order.size))
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"source {source.name!r} of the mixture: {error}") from None
    return replace(source, order=order, drawn=own[place])


def _own(order: Order, first: int, last: int) -> Ints:
    """The ``first``-th to ``last``-th sample of a source, over the ends of its epochs."""
    parts = [np.empty(0, dtype=np.int64)]
    while first < last:
        epoch, start = divmod(first, order.size)
        stop = min(start + last - first, order.size)
        parts.append(order.indices(epoch, start, stop).numpy())
        first += stop - start
    return np.concatenate(parts)
