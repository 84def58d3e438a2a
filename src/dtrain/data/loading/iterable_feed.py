"""``IterableFeed``: handouts of a dataset that can only be read from its start.

Every rank reads the whole stream and keeps its share, so global batches are the same for every number of ranks. Where the
dataset can say and take back its own state, a resume goes straight to it; otherwise what was consumed is read and left out.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from torch.utils.data import IterableDataset, get_worker_info

from dtrain.batch import BatchSpec
from dtrain.data.loading.feed import Handout, Shapes, opened
from dtrain.data.loading.foreign import OwnState, begins_anew, loses_samples
from dtrain.data.loading.parcel import Content, Parcel
from dtrain.data.loading.position import Grid, Position, reached
from dtrain.data.loading.reading import OnError, collated, described
from dtrain.data.loading.workers import Workers, parcels
from dtrain.data.order.base import check_same, rank_share
from dtrain.data.transforms import SampleTransform, apply_transform
from dtrain.dist.rng import derive_seed, drawing_from, reseed
from dtrain.durations import Duration
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


@dataclass(slots=True)
class Start:
    """The way back to the start of a dataset that keeps its place from one iteration to the next.

    Args:
        state: of the dataset before this process read anything of it.
        left: whether an iteration was begun, and is not known to have come to its end.
    """

    state: Plain = None
    left: bool = False

    def reach(self, dataset: Any) -> None:
        """Mutates: ``dataset``, which begins at its start, and this, as it is about to be iterated."""
        if self.left:
            dataset.load_state_dict(deepcopy(self.state))
        elif self.state is None:
            self.state = deepcopy(dataset.state_dict())
        self.left = True


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
        start: Start,
        splits_over_workers: bool,
        collate: Callable[[list[Any]], Batch] | None,
        transform: SampleTransform | None,
        on_error: OnError,
    ) -> None:
        self.dataset, self.seed, self.share, self.begin = dataset, seed, share, begin
        self.state, self.skip, self.splits_over_workers = state, skip, splits_over_workers
        self.collate, self.transform, self.on_error = collate, transform, on_error
        self.start = start

    def __iter__(self) -> Iterator[Parcel]:
        worker = get_worker_info()
        step, number = (worker.num_workers, worker.id) if worker and self.splits_over_workers else (1, 0)
        source, begin = None, self.begin.samples // (self.share.ranks if self.share.already_split else 1)
        while True:
            at = begin + number * self.share.read
            try:
                if source is None and self.skip:
                    source = self._caught_up(begin)
                with self._drawing(at):
                    source = self._opened() if source is None else source
                    content = self._next(source, at)
            except Exception as error:  # noqa: BLE001  # the dataset, the transform and collate are the user's
                content = Content(failure=described(error), trace=traceback.format_exc())
            if content is None:
                self.start.left = False
                return
            yield Parcel(content) if worker is None else Parcel(content).packed()
            number += step

    @contextmanager
    def _drawing(self, at: int) -> Iterator[None]:
        """A block that draws what belongs to place ``at`` of the epoch: of this rank's, where each has samples of its own."""
        seed = derive_seed(self.seed, "batch", self.begin.epoch, at, self.share.rank if self.share.already_split else -1)
        if get_worker_info() is None:
            with drawing_from(seed):
                yield
        else:
            reseed(seed)  # nobody else draws in this process
            yield

    def _caught_up(self, consumed: int) -> Iterator[Any] | None:
        """The stream behind what was consumed, read as it was then: what it drew, perhaps its order, is drawn again."""
        source = None
        for at in range(0, consumed, self.share.read):
            with self._drawing(at):
                source = self._opened() if source is None else source
                count = min(self.share.read, consumed - at)
                next(islice(source, count, count), None)
        return source

    def _opened(self) -> Iterator[Any]:
        resumed = self.state is not None and self.begin.samples > 0
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.begin.epoch)  # before it gets a state: that may hold for its own epoch only
        if remembers(self.dataset) and not self.splits_over_workers and not begins_anew(self.dataset):
            self.start.reach(self.dataset)
        if resumed:
            self.dataset.load_state_dict(deepcopy(self.state))  # it may keep what it is given, and change it
        source: Iterator[Any] = iter(self.dataset)
        return source

    def _next(self, source: Iterator[Any], at: int) -> Content | None:
        """The next batch, None at the end."""
        read = list(islice(source, self.share.read))
        if not read:
            return None
        first, last = self.share.of(len(read))
        has_share = first < last
        samples, unreadable = self._transformed(read[first:last] if has_share else read[:1], at + first)
        batch = collated(self.collate, samples if has_share else samples * 2) if samples else None
        # Of samples that each rank has for itself there is no state that is the same on all ranks, as a checkpoint needs it.
        state = deepcopy(self.dataset.state_dict()) if remembers(self.dataset) and not self.share.already_split else None
        return Content(batch=batch, unreadable=unreadable, state=state, samples=len(read))

    def _transformed(self, samples: list[Any], at: int) -> tuple[list[Any], list[tuple[int, str]]]:
        if self.transform is None:
            return samples, []
        done, unreadable = [], []
        for place, sample in enumerate(samples, at):
            index = place * self.share.ranks + self.share.rank if self.share.already_split else place
            try:
                done.append(apply_transform(self.transform, sample, seed=self.seed, epoch=self.begin.epoch, index=index))
            except Exception as error:
                if self.on_error == "raise":
                    error.add_note(f"sample {index} of epoch {self.begin.epoch}")
                    raise
                unreadable.append((index, described(error)))
        return done, unreadable


def remembers(dataset: Any) -> bool:
    """Whether an iterable dataset has a state of its own, and one that is all of it."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict") and not loses_samples(dataset)


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
    start: Start = field(default_factory=Start)

    @property
    def in_turns(self) -> bool:
        """See ``Feed``."""
        return self.workers.count == 0 and remembers(self.dataset)

    def skippable(self) -> bool:
        """See ``Feed``."""
        return not self.already_split

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
        if self.own_state is not None and state is None and begin.samples == 0 and not once:
            # The dataset counts its iterations: a loop that begins with the same batch again needs its state before the first.
            yield Handout(after=at, moved_only=True, state=self.own_state.at(at))
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
        for parcel in parcels(self._reader(share, begin, state), None, self.workers):
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
        if held is None and begin.samples and self.already_split and self.own_state is None and not once:
            held = self._behind_the_end(share, begin, shapes)
        if held is not None:
            yield from self._last(held, shapes, goal, once=once)

    def _reader(self, share: Share, begin: Position, state: Plain) -> EpochReader:
        return EpochReader(
            self.dataset,
            seed=self.seed,
            share=share,
            begin=begin,
            state=state if self.own_state is None else None,
            skip=begin.samples > 0 and state is None,
            start=self.start,
            splits_over_workers=self.own_state is not None,
            collate=self.collate,
            transform=self.transform,
            on_error=self.on_error,
        )

    def _behind_the_end(self, share: Share, begin: Position, shapes: Shapes) -> Handout | None:
        """An empty batch for a rank that was resumed in an epoch of which only others have samples left.

        What it looks like is seen in the first batch of the epoch.
        """
        for parcel in parcels(self._reader(share, replace(begin, samples=0), None), None, replace(self.workers, count=0)):
            shapes.fitted(opened(parcel), has_share=True)
            return self._empty(begin, shapes)
        return None

    def _empty(self, at: Position, shapes: Shapes) -> Handout:
        more = self.global_batch_size
        after = replace(at, samples=at.samples + more, batches=at.batches + 1, total=at.total + more)
        return Handout(batch=shapes.empty(), spare=shapes.spare, after=after, alone=True)

    def _last(self, held: Handout, shapes: Shapes, goal: Duration, *, once: bool) -> Iterator[Handout]:
        """The end of an epoch; where ranks end it each for itself, empty batches until all are there."""
        if not self.already_split:
            after = replace(held.after, epoch=held.after.epoch + 1, samples=0)
            yield replace(held, after=after, ends=True, state=None)
            return
        yield replace(held, ends=True)
        while not once and not reached(goal, held.after) and held.agreement.over is False:
            held = replace(self._empty(held.after, shapes), state=held.state)
            yield replace(held, ends=True)
