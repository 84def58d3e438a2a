"""``IterableFeed``: handouts of a dataset that can only be read from its start.

Every rank reads the whole stream and keeps its share, so global batches are the same for every number of ranks. Where the
dataset can say and take back its own state, a resume goes straight to it; otherwise what was consumed is read and left out.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from torch.utils.data import IterableDataset, get_worker_info

from dtrain.batch import BatchSpec
from dtrain.clock import Duration
from dtrain.data.loading.collate import collate
from dtrain.data.loading.feed import Handout, Shapes, opened
from dtrain.data.loading.foreign import OwnState
from dtrain.data.loading.parcel import Content, Parcel
from dtrain.data.loading.position import Grid, Position, reached
from dtrain.data.loading.reading import OnError, described
from dtrain.data.loading.workers import Workers, parcels
from dtrain.data.order.base import check_same, rank_share
from dtrain.data.transforms import SampleTransform, apply_transform
from dtrain.dist.control import epoch_is_over
from dtrain.dist.rng import derive_seed, drawing_from, reseed
from dtrain.errors import ConfigError
from dtrain.types import Batch, Plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Which samples of a global batch this rank keeps: its own part, or all where the dataset is already split over ranks."""

    global_batch_size: int
    rank: int
    ranks: int
    already_split: bool

    @property
    def read(self) -> int:
        """Samples to read per step."""
        return self.global_batch_size // self.ranks if self.already_split else self.global_batch_size

    def of(self, count: int) -> tuple[int, int]:
        """First and last of ``count`` samples that were read."""
        return (0, count) if self.already_split else rank_share(0, count, self.rank, self.ranks)


class EpochReader(IterableDataset[Parcel]):
    """One epoch of an iterable dataset, as batches of this rank; for torch's ``DataLoader``."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        share: Share,
        begin: Position,
        state: Plain,
        skip: bool,
        splits_over_workers: bool,
        collate: Callable[[list[Any]], Batch] | None,
        transform: SampleTransform | None,
        on_error: OnError,
    ) -> None:
        self.dataset, self.seed, self.share, self.begin = dataset, seed, share, begin
        self.state, self.skip, self.splits_over_workers = state, skip, splits_over_workers
        self.collate, self.transform, self.on_error = collate, transform, on_error

    def __iter__(self) -> Iterator[Parcel]:
        worker = get_worker_info()
        in_worker, batch, source = worker is not None, 0, None
        step, first = (worker.num_workers, worker.id) if worker and self.splits_over_workers else (1, 0)
        at = self.begin.samples
        while True:
            drawn_by = self.share.rank if self.share.already_split else -1
            seed = derive_seed(self.seed, "batch", self.begin.epoch, self.begin.samples, batch * step + first, drawn_by)
            try:
                if in_worker:
                    reseed(seed)
                    source = source or self._opened()
                    content = self._next(source, at)
                else:
                    with drawing_from(seed):
                        source = source or self._opened()
                        content = self._next(source, at)
            except Exception as error:  # noqa: BLE001  # the dataset, the transform and collate are the user's
                content = Content(failure=described(error), trace=traceback.format_exc())
            if content is None:
                return
            yield Parcel(content).packed() if in_worker else Parcel(content)
            batch, at = batch + 1, at + content.samples

    def _opened(self) -> Iterator[Any]:
        if self.state is not None and self.begin.samples:
            self.dataset.load_state_dict(self.state)
        elif hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.begin.epoch)
        source: Iterator[Any] = iter(self.dataset)
        if self.skip:
            consumed = self.begin.samples // (self.share.ranks if self.share.already_split else 1)
            next(islice(source, consumed, consumed), None)
        return source

    def _next(self, source: Iterator[Any], at: int) -> Content | None:
        """The next batch, None at the end."""
        read = list(islice(source, self.share.read))
        if not read:
            return None
        first, last = self.share.of(len(read))
        has_share = first < last
        samples, unreadable = self._transformed(read[first:last] if has_share else read[:1], at + first)
        batch = (self.collate or collate)(samples if has_share else samples * 2) if samples else None
        state = self.dataset.state_dict() if remembers(self.dataset) and not self.splits_over_workers else None
        return Content(batch=batch, unreadable=unreadable, state=state, samples=len(read))

    def _transformed(self, samples: list[Any], at: int) -> tuple[list[Any], list[tuple[int, str]]]:
        if self.transform is None:
            return samples, []
        done, unreadable = [], []
        for index, sample in enumerate(samples, at):
            try:
                done.append(apply_transform(self.transform, sample, seed=self.seed, epoch=self.begin.epoch, index=index))
            except Exception as error:
                if self.on_error == "raise":
                    error.add_note(f"sample {index} of epoch {self.begin.epoch}")
                    raise
                unreadable.append((index, described(error)))
        return done, unreadable


def remembers(dataset: Any) -> bool:
    """Whether an iterable dataset has a state of its own."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


@dataclass(slots=True, kw_only=True)
class IterableFeed:
    """Handouts of an iterable dataset.

    Args:
        already_split: the dataset gives each rank samples of its own, and may end earlier on some.
        own_state: of a dataset that also splits itself over loader workers, and resumes on other ranks.
    """

    dataset: Any
    seed: int
    global_batch_size: int
    tail: Literal["short", "drop"]
    rank: int
    ranks: int
    workers: Workers
    already_split: bool = False
    own_state: OwnState | None = None
    collate: Callable[[list[Any]], Batch] | None = None
    transform: SampleTransform | None = None
    on_error: OnError = "raise"
    batch_spec: BatchSpec | None = None

    def grid(self) -> Grid | None:
        """Batches of an epoch, if the dataset has a length."""
        if self.already_split or not hasattr(self.dataset, "__len__"):
            return None
        return Grid(size=len(self.dataset), global_batch_size=self.global_batch_size, tail=self.tail)

    def identity(self, at: Position) -> dict[str, int]:
        """The seed of what is drawn, and over how many ranks the dataset itself is split."""
        return {"seed": self.seed, "split": self.ranks if self.already_split and self.own_state is None else 0}

    def resume(self, identity: Mapping[str, int], at: Position) -> None:
        """See ``Feed``."""
        check_same(identity, self.identity(at))

    def handouts(self, begin: Position, goal: Duration, *, state: Plain = None, once: bool = False) -> Iterator[Handout]:
        """See ``Feed``."""
        at = begin
        while not reached(goal, at):
            epoch, before = at.epoch, at
            for handout in self._epoch(at, goal, state, once=once):
                yield handout
                at = handout.after
            if reached(goal, at):
                return
            state = None  # it was used
            if at is before and at.samples == 0:
                raise ConfigError("loader: the dataset gave no sample in a whole epoch")
            if at.epoch == epoch:  # its end could be known only now
                at = replace(at, epoch=epoch + 1, samples=0)
                yield Handout(after=at, moved_only=True, state=self.own_state.at(at) if self.own_state is not None else None)

    def _epoch(self, begin: Position, goal: Duration, state: Plain, *, once: bool) -> Iterator[Handout]:
        """The rest of one epoch. Each batch is held back until it is known whether another one follows."""
        at, shapes, held = begin, Shapes(self.batch_spec), None
        share = Share(
            global_batch_size=self.global_batch_size, rank=self.rank, ranks=self.ranks, already_split=self.already_split
        )
        if self.own_state is not None and state is not None:
            self.own_state.load(state)
        source = EpochReader(
            self.dataset,
            seed=self.seed,
            share=share,
            begin=begin,
            state=state if self.own_state is None else None,
            skip=begin.samples > 0 and state is None,
            splits_over_workers=self.own_state is not None,
            collate=self.collate,
            transform=self.transform,
            on_error=self.on_error,
        )
        for parcel in parcels(source, None, self.workers):
            content = opened(parcel)
            if self.tail == "drop" and not once and content.samples < share.read:
                break
            if held is not None:
                yield held
                if reached(goal, held.after):
                    return  # what was read ahead is read again by the next one
            first, last = share.of(content.samples)
            batch, spare = shapes.fitted(content, has_share=first < last)
            samples = self.global_batch_size if self.already_split else content.samples
            at = replace(at, samples=at.samples + samples, batches=at.batches + 1, total=at.total + samples)
            remembered = content.state if self.own_state is None else self.own_state.at(at)
            held = Handout(
                batch=batch, spare=spare, after=at, unreadable=content.unreadable, state=remembered, alone=self.already_split
            )
        if held is not None:
            yield from self._last(held, shapes, once=once)

    def _last(self, held: Handout, shapes: Shapes, *, once: bool) -> Iterator[Handout]:
        """The end of an epoch; where ranks end it each for itself, empty batches until all are there."""
        if not self.already_split:
            after = replace(held.after, epoch=held.after.epoch + 1, samples=0)
            yield replace(held, after=after, ends=True, state=None)
            return
        yield replace(held, ends=True)
        while not once and epoch_is_over() is False:
            at, more = held.after, self.global_batch_size
            after = replace(at, samples=at.samples + more, batches=at.batches + 1, total=at.total + more)
            held = replace(held, batch=shapes.empty(), spare=shapes.spare, after=after, unreadable=[])
            yield replace(held, ends=True)
