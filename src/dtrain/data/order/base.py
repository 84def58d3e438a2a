"""``Order``: which sample stands at which position of an epoch, and what a rank's part of a stretch is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from dtrain.errors import CheckpointMismatchError, ConfigError


class Order(Protocol):
    """Positions of an epoch to dataset indices: pure functions of epoch and position.

    A position counts samples over all ranks. With ``lanes`` above 1, the positions ``p`` with ``p % lanes == l`` are lane
    ``l``, and rank ``r`` of ``R`` takes those with ``p % R == r``: it reads the shards of its own lanes only, where the
    number of lanes is a multiple of the number of ranks.
    """

    @property
    def size(self) -> int:
        """Samples in one epoch."""
        ...

    @property
    def lanes(self) -> int:
        """1, or into how many interleaved parts the epoch is dealt."""
        ...

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """Dataset indices at positions ``start`` to ``stop`` of ``epoch``: ``[stop - start]`` int64."""
        ...

    def state(self, epoch: int, start: int) -> dict[str, int]:
        """What position ``start`` of ``epoch`` is only meaningful with: few integers."""
        ...

    def resumed(self, state: Mapping[str, int], epoch: int, start: int) -> Order:
        """The order that goes on from ``start`` of ``epoch``, where ``state`` was taken: itself, or one that remembers.

        Raises:
            CheckpointMismatchError: ``state`` is of other data or of another order, in which the position means other samples.
        """
        ...


def rank_share(start: int, stop: int, index: int, count: int) -> tuple[int, int]:
    """The contiguous part of positions ``start`` to ``stop`` of data rank ``index`` of ``count``; sizes differ by at most one.

    >>> [rank_share(0, 8, i, 3) for i in range(3)]
    [(0, 3), (3, 6), (6, 8)]
    """
    size, longer = divmod(stop - start, count)
    first = start + index * size + min(index, longer)
    return first, first + size + (index < longer)


def rank_positions(start: int, stop: int, index: int, count: int, lanes: int) -> range:
    """The positions of ``start`` to ``stop`` that data rank ``index`` of ``count`` takes; sizes differ by at most one.

    A contiguous share with one lane; with more, every ``count``-th position of the epoch, so that a rank stays in its lanes.

    >>> [list(rank_positions(8, 16, i, 3, lanes=6)) for i in range(3)]
    [[9, 12, 15], [10, 13], [8, 11, 14]]
    """
    if lanes == 1:
        return range(*rank_share(start, stop, index, count))
    return range(start + (index - start) % count, stop, count)


def check_stretch(name: str, size: int, start: int, stop: int) -> None:
    """Refuse positions outside of an epoch of ``size`` samples."""
    if not 0 <= start <= stop <= size:
        raise ConfigError(f"{name}: needs 0 <= start <= stop <= {size}, got {start=} {stop=}")


def check_same(saved: Mapping[str, int], mine: Mapping[str, int]) -> None:
    """Refuse a state in which the position meant other samples: every entry of ``mine`` has to be in ``saved``, and equal.

    Raises:
        CheckpointMismatchError: names the first that differs.
    """
    for key, value in mine.items():
        if saved.get(key) != value:
            raise CheckpointMismatchError(
                f"loader: the saved position was in a dataset with {key}={saved.get(key)}, this one has {key}={value}; "
                "resume with the same data, or leave the loader out of extra to start over"
            )
