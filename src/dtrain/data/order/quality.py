"""``shuffle_quality``: how near an order comes to a full shuffle, in figures that say what a batch is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dtrain.data.order.base import Order
from dtrain.data.order.permutation import Ints
from dtrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleQuality:
    """Figures of one epoch. A full shuffle has 1, 0, 1 and 1, up to chance; no shuffle 0, 1 and next to nothing.

    Args:
        moved: mean distance of a sample from where it lies in the dataset, over a full shuffle's (a third of the dataset).
        neighbours: correlation of the places, in the dataset, of samples that follow each other in the epoch.
        shards_per_batch: in how many shards the samples of a batch lie, over that of a full shuffle, on average.
        steadiness: the mean place of a batch's samples varies from batch to batch; a full shuffle's standard deviation of it
            over this one's. Below 1, what a model sees drifts: one batch says less about the whole dataset. Above 1, it is
            more alike than chance would have it, where lanes read from all over the dataset.
    """

    moved: float
    neighbours: float
    shards_per_batch: float
    steadiness: float

    def __str__(self) -> str:
        return (
            f"moved {self.moved:.3f}, neighbours {self.neighbours:+.3f}, shards per batch {self.shards_per_batch:.3f}, "
            f"steadiness {self.steadiness:.3f}"
        )


def shuffle_quality(order: Order, sizes: Sequence[int], *, batch_size: int, epoch: int = 0) -> ShuffleQuality:
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
        moved=float(np.abs(places - np.arange(total)).mean()) * 3 / total,
        neighbours=float(np.corrcoef(places[1:], places[:-1])[0, 1]),
        shards_per_batch=_shards(batches, sizes) / _shards_expected(total, sizes, batch_size),
        steadiness=total / (12 * batch_size) ** 0.5 / float(batches.mean(axis=1).std()),
    )


def _shards(batches: Ints, sizes: Sequence[int]) -> float:
    """In how many shards the samples of a batch lie, on average."""
    of = np.sort(np.searchsorted(np.cumsum(sizes), batches, side="right"), axis=1)
    return float((np.diff(of, axis=1) != 0).sum(axis=1).mean()) + 1


def _shards_expected(total: int, sizes: Sequence[int], batch_size: int) -> float:
    """The same for a draw without regard to shards: each is missed with a chance of ``(1 - its share) ** batch_size``."""
    return float((1 - (1 - np.asarray(sizes) / total) ** batch_size).sum())
