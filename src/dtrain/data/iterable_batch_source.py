"""``IterableBatchSource``: handouts of a dataset that can only be read from its start.

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
from dtrain.data.batch_source import EmptyBatchTemplate, LoaderItem, unpack_or_raise
from dtrain.data.fetcher import OnError, collate_samples, describe_error
from dtrain.data.position import EpochBatches, Position, is_reached
from dtrain.data.sample_transform import SampleTransform, apply_transform
from dtrain.data.sampling.sample_order import check_same_state, rank_share
from dtrain.data.third_party import StatefulAdapter, drops_samples_on_resume, restarts_each_iteration
from dtrain.data.worker_batch import Payload, WorkerBatch
from dtrain.data.workers import WorkerConfig, load_batches
from dtrain.dist.rng import derive_seed, fork_rng, reseed
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.typing import Batch, Plain


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """Which samples of a global batch this rank keeps: its own part, or all where the dataset is already split over ranks."""

    global_batch_size: int
    rank: int
    ranks: int
    pre_sharded: bool

    @property
    def samples_per_step(self) -> int:
        """Samples to read per step."""
        return self.global_batch_size // self.ranks if self.pre_sharded else self.global_batch_size

    def bounds(self, count: int) -> tuple[int, int]:
        """First and last of ``count`` samples that were read."""
        return (0, count) if self.pre_sharded else rank_share(0, count, self.rank, self.ranks)


@dataclass(slots=True)
class InitialState:
    """The way back to the start of a dataset that keeps its place from one iteration to the next.

    Args:
        state: of the dataset before this process read anything of it.
        is_iterating: whether an iteration was begun, and is not known to have come to its end.
    """

    state: Plain = None
    is_iterating: bool = False

    def rewind(self, dataset: Any) -> None:
        """Mutates: ``dataset``, which begins at its start, and this, as it is about to be iterated."""
        if self.is_iterating:
            dataset.load_state_dict(deepcopy(self.state))
        elif self.state is None:
            self.state = deepcopy(dataset.state_dict())
        self.is_iterating = True


class EpochReader(IterableDataset[WorkerBatch]):
    """One epoch of an iterable dataset, as batches of this rank; for torch's ``DataLoader``."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        share: RankShare,
        begin: Position,
        state: Plain,
        skip: bool,
        initial_state: InitialState,
        splits_over_workers: bool,
        collate: Callable[[list[Any]], Batch] | None,
        transform: SampleTransform | None,
        on_error: OnError,
    ) -> None:
        self.dataset, self.seed, self.share, self.begin = dataset, seed, share, begin
        self.state, self.skip, self.splits_over_workers = state, skip, splits_over_workers
        self.collate, self.transform, self.on_error = collate, transform, on_error
        self.initial_state = initial_state

    def __iter__(self) -> Iterator[WorkerBatch]:
        worker = get_worker_info()
        step, number = (worker.num_workers, worker.id) if worker and self.splits_over_workers else (1, 0)
        source, begin = None, self.begin.samples // (self.share.ranks if self.share.pre_sharded else 1)
        while True:
            at = begin + number * self.share.samples_per_step
            try:
                if source is None and self.skip:
                    source = self._skip_consumed(begin)
                with self._seed_rng(at):
                    source = self._open_stream() if source is None else source
                    content = self._next_payload(source, at)
            except Exception as error:  # noqa: BLE001  # the dataset, the transform and collate are the user's
                content = Payload(failure=describe_error(error), trace=traceback.format_exc())
            if content is None:
                self.initial_state.is_iterating = False
                return
            yield WorkerBatch(content) if worker is None else WorkerBatch(content).pickle_batch()
            number += step

    @contextmanager
    def _seed_rng(self, at: int) -> Iterator[None]:
        """A block that draws what belongs to place ``at`` of the epoch: of this rank's, where each has samples of its own."""
        seed = derive_seed(self.seed, "batch", self.begin.epoch, at, self.share.rank if self.share.pre_sharded else -1)
        if get_worker_info() is None:
            with fork_rng(seed):
                yield
        else:
            reseed(seed)  # nobody else draws in this process
            yield

    def _skip_consumed(self, consumed: int) -> Iterator[Any] | None:
        """The stream behind what was consumed, read as it was then: what it drew, perhaps its order, is drawn again."""
        source = None
        for at in range(0, consumed, self.share.samples_per_step):
            with self._seed_rng(at):
                source = self._open_stream() if source is None else source
                count = min(self.share.samples_per_step, consumed - at)
                next(islice(source, count, count), None)
        return source

    def _open_stream(self) -> Iterator[Any]:
        resumed = self.state is not None and self.begin.samples > 0
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.begin.epoch)  # before it gets a state: that may hold for its own epoch only
        if has_state(self.dataset) and not self.splits_over_workers and not restarts_each_iteration(self.dataset):
            self.initial_state.rewind(self.dataset)
        if resumed:
            self.dataset.load_state_dict(deepcopy(self.state))  # it may keep what it is given, and change it
        source: Iterator[Any] = iter(self.dataset)
        return source

    def _next_payload(self, source: Iterator[Any], at: int) -> Payload | None:
        """The next batch, None at the end."""
        read = list(islice(source, self.share.samples_per_step))
        if not read:
            return None
        first, last = self.share.bounds(len(read))
        has_share = first < last
        samples, unreadable = self._transform_samples(read[first:last] if has_share else read[:1], at + first)
        batch = collate_samples(self.collate, samples if has_share else samples * 2) if samples else None
        # Of samples that each rank has for itself there is no state that is the same on all ranks, as a checkpoint needs it.
        state = deepcopy(self.dataset.state_dict()) if has_state(self.dataset) and not self.share.pre_sharded else None
        return Payload(batch=batch, skipped=unreadable, dataset_state=state, sample_count=len(read))

    def _transform_samples(self, samples: list[Any], at: int) -> tuple[list[Any], list[tuple[int, str]]]:
        if self.transform is None:
            return samples, []
        done, unreadable = [], []
        for place, sample in enumerate(samples, at):
            index = place * self.share.ranks + self.share.rank if self.share.pre_sharded else place
            try:
                done.append(apply_transform(self.transform, sample, seed=self.seed, epoch=self.begin.epoch, index=index))
            except Exception as error:
                if self.on_error == "raise":
                    error.add_note(f"sample {index} of epoch {self.begin.epoch}")
                    raise
                unreadable.append((index, describe_error(error)))
        return done, unreadable


def has_state(dataset: Any) -> bool:
    """Whether an iterable dataset has a state of its own, and one that is all of it."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict") and not drops_samples_on_resume(dataset)


@dataclass(slots=True, kw_only=True)
class IterableBatchSource:
    """Handouts of an iterable dataset.

    Args:
        pre_sharded: the dataset gives each rank samples of its own, and may end earlier on some.
        adapter: of a dataset that also splits itself over loader workers, and resumes on other ranks.
    """

    dataset: Any
    seed: int
    global_batch_size: int
    last_batch: Literal["short", "drop"]
    rank: int
    ranks: int
    workers: WorkerConfig
    pre_sharded: bool = False
    adapter: StatefulAdapter | None = None
    collate: Callable[[list[Any]], Batch] | None = None
    transform: SampleTransform | None = None
    on_error: OnError = "raise"
    batch_spec: BatchSpec | None = None
    initial_state: InitialState = field(default_factory=InitialState)

    @property
    def single_reader(self) -> bool:
        """See ``Feed``."""
        return self.workers.count == 0 and has_state(self.dataset)

    def can_skip(self) -> bool:
        """See ``Feed``."""
        return not self.pre_sharded

    def epoch_batches(self) -> EpochBatches | None:
        """Batches of an epoch, if the dataset has a length."""
        if self.pre_sharded or not hasattr(self.dataset, "__len__"):
            return None
        return EpochBatches(size=len(self.dataset), global_batch_size=self.global_batch_size, last_batch=self.last_batch)

    def order_identity(self, at: Position) -> dict[str, int]:
        """The seed of what is drawn, and over how many ranks the dataset itself is split."""
        return {"seed": self.seed, "split": self.ranks if self.pre_sharded and self.adapter is None else 0}

    def resume(self, identity: Mapping[str, int], at: Position) -> None:
        """See ``Feed``."""
        check_same_state(identity, self.order_identity(at))

    def items(self, begin: Position, goal: Duration, *, state: Plain = None, evaluation: bool = False) -> Iterator[LoaderItem]:
        """See ``Feed``."""
        at = begin
        if self.adapter is not None and state is None and begin.samples == 0 and not evaluation:
            # The dataset counts its iterations: a loop that begins with the same batch again needs its state before the first.
            yield LoaderItem(position_after=at, position_only=True, dataset_state=self.adapter.state_at(at))
        while not is_reached(goal, at):
            epoch, before = at.epoch, at
            for handout in self._epoch_items(at, goal, state, evaluation=evaluation):
                yield handout
                at = handout.position_after
            if is_reached(goal, at):
                return
            state = None  # it was used
            if at is before and at.samples == 0:
                raise ConfigError("loader: the dataset gave no sample in a whole epoch")
            if at.epoch == epoch:  # its end could be known only now
                at = replace(at, epoch=epoch + 1, samples=0)
                yield LoaderItem(
                    position_after=at,
                    position_only=True,
                    dataset_state=self.adapter.state_at(at) if self.adapter is not None else None,
                )

    def _epoch_items(self, begin: Position, goal: Duration, state: Plain, *, evaluation: bool) -> Iterator[LoaderItem]:
        """The rest of one epoch. Each batch is held back until it is known whether another one follows."""
        at, shapes, held = begin, EmptyBatchTemplate(self.batch_spec), None
        share = RankShare(
            global_batch_size=self.global_batch_size, rank=self.rank, ranks=self.ranks, pre_sharded=self.pre_sharded
        )
        if self.adapter is not None and state is not None:
            self.adapter.load(state)
        for parcel in load_batches(self._epoch_reader(share, begin, state), None, self.workers):
            content = unpack_or_raise(parcel)
            if self.last_batch == "drop" and not evaluation and content.sample_count < share.samples_per_step:
                break
            if held is not None:
                yield held
                if is_reached(goal, held.position_after):
                    return  # what was read ahead is read again by the next one
            first, last = share.bounds(content.sample_count)
            batch, spare = shapes.fit(content, has_samples=first < last)
            samples = self.global_batch_size if self.pre_sharded else content.sample_count
            at = replace(at, samples=at.samples + samples, batches=at.batches + 1, total=at.total + samples)
            remembered = content.dataset_state if self.adapter is None else self.adapter.state_at(at)
            held = LoaderItem(
                batch=batch,
                padding_sample=spare,
                position_after=at,
                skipped=content.skipped,
                dataset_state=remembered,
                independent_epochs=self.pre_sharded,
            )
        if held is None and begin.samples and self.pre_sharded and self.adapter is None and not evaluation:
            held = self._empty_after_end(share, begin, shapes)
        if held is not None:
            yield from self._finish_epoch(held, shapes, goal, evaluation=evaluation)

    def _epoch_reader(self, share: RankShare, begin: Position, state: Plain) -> EpochReader:
        return EpochReader(
            self.dataset,
            seed=self.seed,
            share=share,
            begin=begin,
            state=state if self.adapter is None else None,
            skip=begin.samples > 0 and state is None,
            initial_state=self.initial_state,
            splits_over_workers=self.adapter is not None,
            collate=self.collate,
            transform=self.transform,
            on_error=self.on_error,
        )

    def _empty_after_end(self, share: RankShare, begin: Position, shapes: EmptyBatchTemplate) -> LoaderItem | None:
        """An empty batch for a rank that was resumed in an epoch of which only others have samples left.

        What it looks like is seen in the first batch of the epoch.
        """
        for parcel in load_batches(
            self._epoch_reader(share, replace(begin, samples=0), None), None, replace(self.workers, count=0)
        ):
            shapes.fit(unpack_or_raise(parcel), has_samples=True)
            return self._empty_item(begin, shapes)
        return None

    def _empty_item(self, at: Position, shapes: EmptyBatchTemplate) -> LoaderItem:
        more = self.global_batch_size
        after = replace(at, samples=at.samples + more, batches=at.batches + 1, total=at.total + more)
        return LoaderItem(
            batch=shapes.empty_batch(), padding_sample=shapes.padding_sample, position_after=after, independent_epochs=True
        )

    def _finish_epoch(
        self, held: LoaderItem, shapes: EmptyBatchTemplate, goal: Duration, *, evaluation: bool
    ) -> Iterator[LoaderItem]:
        """The end of an epoch; where ranks end it each for itself, empty batches until all are there."""
        if not self.pre_sharded:
            after = replace(held.position_after, epoch=held.position_after.epoch + 1, samples=0)
            yield replace(held, position_after=after, ends_epoch=True, dataset_state=None)
            return
        yield replace(held, ends_epoch=True)
        while not evaluation and not is_reached(goal, held.position_after) and held.agreement.epoch_ended is False:
            held = replace(self._empty_item(held.position_after, shapes), dataset_state=held.dataset_state)
            yield replace(held, ends_epoch=True)
