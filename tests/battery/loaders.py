"""The registry of loaders: datasets, orders, tails and workers; and loaders that are broken on purpose.

Ranks are simulated by argument, so every number of them is cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

import dtrain as dt
from dtrain.data.loader import Position

SIZE, BATCH = 23, 5


def numbers() -> Tensor:
    """A dataset that is a tensor: a sample is its row, which begins with its number."""
    return torch.stack([torch.arange(SIZE), torch.arange(SIZE) ** 2], dim=1)


def records() -> list[dict[str, Any]]:
    """A dataset that is a list of mappings."""
    return [{"id": number, "x": torch.full((2,), float(number))} for number in range(SIZE)]


def table() -> TensorDict:
    """A dataset that is a TensorDict."""
    return TensorDict({"id": torch.arange(SIZE), "x": torch.zeros(SIZE, 2)}, batch_size=[SIZE])


DATASETS: dict[str, Callable[[], Any]] = {"tensor": numbers, "list": records, "tensordict": table}


def ids(batch: Any) -> list[int]:
    """The numbers of the samples of a batch of any of these datasets."""
    return batch[:, 0].tolist() if isinstance(batch, Tensor) else batch["id"].tolist()


def unchanged(loader: dt.data.Loader) -> dt.data.Loader:
    return loader


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A loader under contract: how to build it, and how to break it afterwards."""

    dataset: str = "tensor"
    shuffle: bool = True
    workers: int = 0
    tail: Any = "short"
    spoil: Callable[[dt.data.Loader], dt.data.Loader] = unchanged

    def make(self, rank: int = 0, ranks: int = 1) -> dt.data.Loader:
        loader = dt.build_loader(
            DATASETS[self.dataset](),
            global_batch_size=BATCH,
            seed=3,
            shuffle=self.shuffle,
            num_workers=self.workers,
            last_batch=self.tail,
        )
        loader._source.options = replace(loader._source.options, rank=rank, ranks=ranks)
        return self.spoil(loader)

    def plain(self) -> Row:
        """Return the same loader without workers and without the damage, as a reference of the order."""
        return replace(self, workers=0, spoil=unchanged)

    def epoch(self) -> int:
        """Samples of one epoch."""
        return SIZE if self.tail == "short" else SIZE // BATCH * BATCH


ROWS: dict[str, Row] = {
    f"{dataset}-{'shuffled' if shuffle else 'in_order'}-{tail}": Row(dataset=dataset, shuffle=shuffle, tail=tail)
    for dataset, shuffle, tail in product(DATASETS, (True, False), ("short", "drop"))
}
# Workers are processes, started anew for each pass: few rows, and few passes over them.
SLOW_ROWS: dict[str, Row] = {
    f"{dataset}-workers-{tail}": Row(dataset=dataset, workers=2, tail=tail)
    for dataset, tail in (("tensor", "short"), ("list", "drop"), ("tensordict", "short"))
}


# ---- broken on purpose ------------------------------------------------------------------------------------------------------


class WithReplacement(dt.data.ElasticSampler):
    """Draws each sample anew."""

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        return torch.tensor([hash((epoch, position)) % self.size for position in range(start, stop)], dtype=torch.int64)


class OneOrder(dt.data.ElasticSampler):
    """Shuffles once for all epochs."""

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        return super().indices(0, start, stop)


def _sampler(kind: type[dt.data.ElasticSampler]) -> Callable[[dt.data.Loader], dt.data.Loader]:
    def spoil(loader: dt.data.Loader) -> dt.data.Loader:
        old = loader._source.order
        loader._source.order = kind(size=old.size, seed=old.seed, shuffle=old.shuffle)
        return loader

    return spoil


def _seeded_by_ranks(loader: dt.data.Loader) -> dt.data.Loader:
    order = loader._source.order
    loader._source.order = replace(order, seed=order.seed + loader._source.options.ranks - 1)
    return loader


class _Forgetful(dt.data.Loader):
    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict({**state, "samples": 0})


class _Ahead(dt.data.Loader):
    """A loader whose position is two batches ahead: that of the fetched batches."""

    def state_dict(self) -> dict[str, int]:
        after = self._source.epoch_batches().advance
        ahead = after(after(self.position))
        return {**super().state_dict(), **{name: getattr(ahead, name) for name in Position.__dataclass_fields__}}


class _Listing(dt.data.Loader):
    """Its position is the list of all that was seen."""

    def state_dict(self) -> Any:
        return {**super().state_dict(), "seen": list(range(self.position.total))}


def _turned(kind: type[dt.data.Loader]) -> Callable[[dt.data.Loader], dt.data.Loader]:
    def spoil(loader: dt.data.Loader) -> dt.data.Loader:
        loader.__class__ = kind
        return loader

    return spoil


BROKEN: dict[str, tuple[str, Row]] = {
    "samples drawn with replacement": ("once", Row(spoil=_sampler(WithReplacement))),
    "one order for all epochs": ("once", Row(spoil=_sampler(OneOrder))),
    "an order for each number of ranks": ("order", Row(spoil=_seeded_by_ranks)),
    "an epoch begun anew": ("resume", Row(spoil=_turned(_Forgetful))),
    "a position that counts what was fetched": ("resume", Row(spoil=_turned(_Ahead))),
    "a position that lists what was seen": ("position", Row(spoil=_turned(_Listing))),
}


def row(name: str) -> Row:
    """A row, sound or broken: ranks find it by name."""
    return {**ROWS, **SLOW_ROWS}[name] if name in ROWS or name in SLOW_ROWS else BROKEN[name][1]
