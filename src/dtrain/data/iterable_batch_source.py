"""``IterableBatchSource``: loader items of an iterable dataset, which can be read from its start only.

Every rank reads the whole stream and keeps its share, so global batches are the same for every number of ranks. If the dataset
has a state, a resume loads the state. Otherwise a resume reads the consumed samples again and drops them.
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
    """Share of a global batch that this rank keeps: a part, or all samples if the dataset is split over ranks already."""

    global_batch_size: int
    rank: int
    ranks: int
    pre_sharded: bool

    @property
    def samples_per_step(self) -> int:
        """Samples to read per step."""
        return self.global_batch_size // self.ranks if self.pre_sharded else self.global_batch_size

    def bounds(self, count: int) -> tuple[int, int]:
        """Return the first and last of ``count`` samples that this rank keeps."""
        return (0, count) if self.pre_sharded else rank_share(0, count, self.rank, self.ranks)


@dataclass(slots=True)
class InitialState:
    """Initial state of a dataset that continues at its position in a new iteration, so that an epoch can rewind the dataset.

    Args:
        state: state of the dataset before this process read any sample.
        is_iterating: True after an iteration has begun, until it reaches its end.
    """

    state: Plain = None
    is_iterating: bool = False

    def rewind(self, dataset: Any) -> None:
        """Rewind for a new iteration. Mutates: ``dataset``, to its start, and this object."""
        if self.is_iterating:
            dataset.load_state_dict(deepcopy(self.state))
        elif self.state is None:
            self.state = deepcopy(dataset.state_dict())
        self.is_iterating = True


class EpochReader(IterableDataset[WorkerBatch]):
    """One epoch of an iterable dataset as batches of this rank, for torch's ``DataLoader``."""

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
                    payload = self._next_payload(source, at)
            except Exception as error:  # noqa: BLE001
                # The dataset, the transform and collate are user code, so any exception can occur.
                payload = Payload(failure=describe_error(error), trace=traceback.format_exc())
            if payload is None:
                self.initial_state.is_iterating = False
                return
            yield WorkerBatch(payload) if worker is None else WorkerBatch(payload).pickle_batch()
            number += step

    @contextmanager
    def _seed_rng(self, at: int) -> Iterator[None]:
        """Seed the global generators for position ``at`` of the epoch; per rank, if each rank has samples of its own."""
        seed = derive_seed(self.seed, "batch", self.begin.epoch, at, self.share.rank if self.share.pre_sharded else -1)
        if get_worker_info() is None:
            with fork_rng(seed):
                yield
        else:
            # No other code draws random numbers in a worker, so no state needs to be restored.
            reseed(seed)
            yield

    def _skip_consumed(self, consumed: int) -> Iterator[Any] | None:
        """Read the consumed samples again, with the same seeds, and return the stream after them."""
        source = None
        for at in range(0, consumed, self.share.samples_per_step):
            with self._seed_rng(at):
                source = self._open_stream() if source is None else source
                count = min(self.share.samples_per_step, consumed - at)
                next(islice(source, count, count), None)
        return source

    def _open_stream(self) -> Iterator[Any]:
        is_resumed = self.state is not None and self.begin.samples > 0
        if hasattr(self.dataset, "set_epoch"):
            # A loaded state may hold for its own epoch only, so the epoch is set first.
            self.dataset.set_epoch(self.begin.epoch)
        if has_state(self.dataset) and not self.splits_over_workers and not restarts_each_iteration(self.dataset):
            self.initial_state.rewind(self.dataset)
        if is_resumed:
            # The dataset may keep and change the state that it loads.
            self.dataset.load_state_dict(deepcopy(self.state))
        source: Iterator[Any] = iter(self.dataset)
        return source

    def _next_payload(self, source: Iterator[Any], at: int) -> Payload | None:
        """Return the next payload; None at the end."""
        read = list(islice(source, self.share.samples_per_step))
        if not read:
            return None
        first, last = self.share.bounds(len(read))
        has_samples = first < last
        samples, skipped = self._transform_samples(read[first:last] if has_samples else read[:1], at + first)
        batch = collate_samples(self.collate, samples if has_samples else samples * 2) if samples else None
        # A checkpoint needs a state that is equal on all ranks. A dataset split over ranks has no such state.
        state = deepcopy(self.dataset.state_dict()) if has_state(self.dataset) and not self.share.pre_sharded else None
        return Payload(batch=batch, skipped=skipped, dataset_state=state, sample_count=len(read))

    def _transform_samples(self, samples: list[Any], at: int) -> tuple[list[Any], list[tuple[int, str]]]:
        if self.transform is None:
            return samples, []
        transformed, skipped = [], []
        for position, sample in enumerate(samples, at):
            index = position * self.share.ranks + self.share.rank if self.share.pre_sharded else position
            try:
                transformed.append(apply_transform(self.transform, sample, seed=self.seed, epoch=self.begin.epoch, index=index))
            except Exception as error:
                if self.on_error == "raise":
                    error.add_note(f"sample {index} of epoch {self.begin.epoch}")
                    raise
                skipped.append((index, describe_error(error)))
        return transformed, skipped


def has_state(dataset: Any) -> bool:
    """Return True if an iterable dataset has a complete state of its own."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict") and not drops_samples_on_resume(dataset)


@dataclass(slots=True, kw_only=True)
class IterableBatchSource:
    """Source of the items of an iterable dataset.

    Args:
        pre_sharded: if True, the dataset gives each rank different samples, and may end earlier on some ranks.
        adapter: state of a dataset that also splits itself over loader workers, and resumes on any number of ranks.
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
        """True if the dataset has a state and is read in this process; see ``BatchSource``."""
        return self.workers.count == 0 and has_state(self.dataset)

    def can_skip(self) -> bool:
        """Return True if the loader, not the dataset, splits the samples over ranks."""
        return not self.pre_sharded

    def epoch_batches(self) -> EpochBatches | None:
        """Return the arithmetic of the epoch's batches; None if the dataset has no length."""
        if self.pre_sharded or not hasattr(self.dataset, "__len__"):
            return None
        return EpochBatches(size=len(self.dataset), global_batch_size=self.global_batch_size, last_batch=self.last_batch)

    def order_identity(self, at: Position) -> dict[str, int]:
        """Return the seed, and the number of ranks over which the dataset splits itself."""
        return {"seed": self.seed, "split": self.ranks if self.pre_sharded and self.adapter is None else 0}

    def resume(self, identity: Mapping[str, int], at: Position) -> None:
        """Check that ``identity`` agrees with this source; see ``BatchSource``."""
        check_same_state(identity, self.order_identity(at))

    def items(self, begin: Position, goal: Duration, *, state: Plain = None, evaluation: bool = False) -> Iterator[LoaderItem]:
        """Iterate over items; see ``BatchSource``."""
        at = begin
        if self.adapter is not None and state is None and begin.samples == 0 and not evaluation:
            # The dataset counts its iterations. A loop that begins with the same batch again needs the state before the batch.
            yield LoaderItem(position_after=at, position_only=True, dataset_state=self.adapter.state_at(at))
        while not is_reached(goal, at):
            epoch, before = at.epoch, at
            for item in self._epoch_items(at, goal, state, evaluation=evaluation):
                yield item
                at = item.position_after
            if is_reached(goal, at):
                return
            # The state holds for the first epoch only.
            state = None
            if at is before and at.samples == 0:
                raise ConfigError("loader: the dataset returned no sample in a whole epoch. Check the dataset")
            # The dataset has no length, so the end of the epoch is known only now.
            if at.epoch == epoch:
                at = replace(at, epoch=epoch + 1, samples=0)
                yield LoaderItem(
                    position_after=at,
                    position_only=True,
                    dataset_state=self.adapter.state_at(at) if self.adapter is not None else None,
                )

    def _epoch_items(self, begin: Position, goal: Duration, state: Plain, *, evaluation: bool) -> Iterator[LoaderItem]:
        """Iterate over the rest of an epoch. Each item is delayed until the reader has found out if the item is the last."""
        at, template, delayed = begin, EmptyBatchTemplate(self.batch_spec), None
        share = RankShare(
            global_batch_size=self.global_batch_size, rank=self.rank, ranks=self.ranks, pre_sharded=self.pre_sharded
        )
        if self.adapter is not None and state is not None:
            self.adapter.load(state)
        for worker_batch in load_batches(self._epoch_reader(share, begin, state), None, self.workers):
            payload = unpack_or_raise(worker_batch)
            if self.last_batch == "drop" and not evaluation and payload.sample_count < share.samples_per_step:
                break
            if delayed is not None:
                yield delayed
                if is_reached(goal, delayed.position_after):
                    # The next loop reads the prefetched samples again.
                    return
            first, last = share.bounds(payload.sample_count)
            batch, padding_sample = template.fit(payload, has_samples=first < last)
            samples = self.global_batch_size if self.pre_sharded else payload.sample_count
            at = replace(at, samples=at.samples + samples, batches=at.batches + 1, total=at.total + samples)
            dataset_state = payload.dataset_state if self.adapter is None else self.adapter.state_at(at)
            delayed = LoaderItem(
                batch=batch,
                padding_sample=padding_sample,
                position_after=at,
                skipped=payload.skipped,
                dataset_state=dataset_state,
                independent_epochs=self.pre_sharded,
            )
        if delayed is None and begin.samples and self.pre_sharded and self.adapter is None and not evaluation:
            delayed = self._empty_after_end(share, begin, template)
        if delayed is not None:
            yield from self._finish_epoch(delayed, template, goal, evaluation=evaluation)

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

    def _empty_after_end(self, share: RankShare, begin: Position, template: EmptyBatchTemplate) -> LoaderItem | None:
        """Build an empty item for a rank that was resumed in an epoch in which only other ranks have samples left.

        The first batch of the epoch provides the shapes.
        """
        for worker_batch in load_batches(
            self._epoch_reader(share, replace(begin, samples=0), None), None, replace(self.workers, count=0)
        ):
            template.fit(unpack_or_raise(worker_batch), has_samples=True)
            return self._empty_item(begin, template)
        return None

    def _empty_item(self, at: Position, template: EmptyBatchTemplate) -> LoaderItem:
        samples = self.global_batch_size
        after = replace(at, samples=at.samples + samples, batches=at.batches + 1, total=at.total + samples)
        return LoaderItem(
            batch=template.empty_batch(), padding_sample=template.padding_sample, position_after=after, independent_epochs=True
        )

    def _finish_epoch(
        self, delayed: LoaderItem, template: EmptyBatchTemplate, goal: Duration, *, evaluation: bool
    ) -> Iterator[LoaderItem]:
        """Yield the last item of an epoch. If ranks end independently, yield empty batches until all ranks have ended."""
        if not self.pre_sharded:
            after = replace(delayed.position_after, epoch=delayed.position_after.epoch + 1, samples=0)
            yield replace(delayed, position_after=after, ends_epoch=True, dataset_state=None)
            return
        yield replace(delayed, ends_epoch=True)
        while not evaluation and not is_reached(goal, delayed.position_after) and delayed.status.epoch_ended is False:
            delayed = replace(self._empty_item(delayed.position_after, template), dataset_state=delayed.dataset_state)
            yield replace(delayed, ends_epoch=True)
