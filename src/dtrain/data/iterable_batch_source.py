"""``IterableBatchSource``: loader items of an iterable dataset, which can be read from its start only.

Every rank reads the whole stream and keeps its share, so global batches are the same for every number of ranks. If the dataset
has a state, a resume loads the state. Otherwise a resume reads the consumed samples again and drops them. At the end are the
functions that know the datasets of other libraries: MosaicML's ``StreamingDataset``, torchdata's nodes, Hugging Face's streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar, cast

from torch.utils.data import IterableDataset, get_worker_info

from dtrain.data.batch_source import BatchOptions, EmptyBatchTemplate, LoaderItem, unpack_or_raise
from dtrain.data.fetcher import Fetcher, failed_payload
from dtrain.data.position import EpochBatches, Position, is_reached
from dtrain.data.sample_order import check_same_state, rank_share
from dtrain.data.workers import Payload, WorkerBatch, load_batches
from dtrain.errors import ConfigError
from dtrain.schedules.durations import Duration
from dtrain.typing import Plain


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
    """The rest of an epoch of an iterable dataset as batches of this rank, for torch's ``DataLoader``.

    Args:
        source: the source, whose dataset is read.
        begin: position of the first batch.
        state: state of the dataset at ``begin``, None if the dataset has no state or a ``MosaicAdapter`` restores it.
        skip: if True, read the samples before ``begin`` again and drop them.
    """

    def __init__(self, source: IterableBatchSource, begin: Position, state: Plain, *, skip: bool) -> None:
        self.fetcher, self.initial_state = source.fetcher, source.initial_state
        self.rank, self.ranks, self.pre_sharded = source.options.rank, source.options.ranks, source.pre_sharded
        self.samples_per_step, self.splits_over_workers = source.samples_per_step, source.adapter is not None
        self.begin, self.state, self.skip = begin, state, skip

    def __iter__(self) -> Iterator[WorkerBatch]:
        worker = get_worker_info()
        step, number = (worker.num_workers, worker.id) if worker and self.splits_over_workers else (1, 0)
        stream, begin = None, self.begin.samples // (self.ranks if self.pre_sharded else 1)
        while True:
            at = begin + number * self.samples_per_step
            watched = None if worker is None else self.fetcher.watched_attributes()
            try:
                if stream is None and self.skip:
                    stream = self._skip_consumed(begin)
                with self._seed_rng(at):
                    stream = self._open_stream() if stream is None else stream
                    payload = self._next_payload(stream, at)
            # The dataset, the transform and collate are user code, so any exception can occur.
            except Exception as error:  # noqa: BLE001
                payload = failed_payload(error)
            if payload is None:
                self.initial_state.is_iterating = False
                return
            if watched is not None:
                payload.changed_by_reading = self.fetcher.changed_since(watched)
            yield WorkerBatch.pack(payload)
            number += step

    def _seed_rng(self, at: int) -> AbstractContextManager[None]:
        """Seed the global generators for position ``at`` of the epoch; per rank, if each rank has samples of its own."""
        return self.fetcher.seed_rng(self.begin.epoch, at, self.rank if self.pre_sharded else -1)

    def _skip_consumed(self, consumed: int) -> Iterator[Any] | None:
        """Read the consumed samples again, with the same seeds, and return the stream after them."""
        stream = None
        for at in range(0, consumed, self.samples_per_step):
            with self._seed_rng(at):
                stream = self._open_stream() if stream is None else stream
                count = min(self.samples_per_step, consumed - at)
                next(islice(stream, count, count), None)
        return stream

    def _open_stream(self) -> Iterator[Any]:
        dataset = self.fetcher.dataset
        if hasattr(dataset, "set_epoch"):
            # A loaded state may hold for its own epoch only, so the epoch is set first.
            dataset.set_epoch(self.begin.epoch)
        if has_state(dataset) and not self.splits_over_workers and not restarts_each_iteration(dataset):
            self.initial_state.rewind(dataset)
        if self.state is not None and self.begin.samples > 0:
            # The dataset may keep and change the state that it loads.
            dataset.load_state_dict(deepcopy(self.state))
        stream: Iterator[Any] = iter(dataset)
        return stream

    def _next_payload(self, stream: Iterator[Any], at: int) -> Payload | None:
        """Return the next payload; None at the end."""
        fetcher, samples = self.fetcher, list(islice(stream, self.samples_per_step))
        skipped: list[tuple[int, str]] = []
        if not samples:
            return None
        count = len(samples)
        first, last = (0, count) if self.pre_sharded else rank_share(0, count, self.rank, self.ranks)
        has_samples = first < last
        samples = samples[first:last] if has_samples else samples[:1]
        if fetcher.transform is not None:
            step, offset = (self.ranks, self.rank) if self.pre_sharded else (1, 0)
            numbered = {(at + first + k) * step + offset: sample for k, sample in enumerate(samples)}
            samples, skipped = fetcher.read_each(self.begin.epoch, numbered, numbered.__getitem__)
        batch = fetcher.collate_samples(samples if has_samples else samples * 2) if samples else None
        # A checkpoint needs a state that is equal on all ranks. A dataset split over ranks has no such state.
        state = deepcopy(fetcher.dataset.state_dict()) if has_state(fetcher.dataset) and not self.pre_sharded else None
        return Payload(batch=batch, skipped=skipped, dataset_state=state, sample_count=count)


def has_state(dataset: Any) -> bool:
    """Return True if an iterable dataset has a complete state of its own."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict") and not drops_samples_on_resume(dataset)


@dataclass(slots=True, kw_only=True)
class IterableBatchSource:
    """Source of the items of an iterable dataset.

    Args:
        fetcher: reader of the dataset's samples.
        options: batches, and this rank's share of them.
        pre_sharded: if True, the dataset gives each rank different samples, and may end earlier on some ranks.
        adapter: state of a dataset that also splits itself over loader workers, and resumes on any number of ranks.
    """

    fetcher: Fetcher
    options: BatchOptions
    pre_sharded: bool = False
    adapter: MosaicAdapter | None = None
    initial_state: InitialState = field(default_factory=InitialState)
    is_indexed: ClassVar[bool] = False

    @property
    def global_batch_size(self) -> int:
        """Samples of a full batch, over all ranks."""
        return cast("int", self.options.global_batch_size)

    @property
    def samples_per_step(self) -> int:
        """Samples to read per step: a global batch, or this rank's part if the dataset is split over ranks already."""
        return self.global_batch_size // self.options.ranks if self.pre_sharded else self.global_batch_size

    @property
    def single_reader(self) -> bool:
        """True if the dataset has a state and is read in this process; see ``BatchSource``."""
        return self.options.workers.count == 0 and has_state(self.fetcher.dataset)

    @property
    def can_skip(self) -> bool:
        """True if the loader, not the dataset, splits the samples over ranks."""
        return not self.pre_sharded

    def epoch_batches(self) -> EpochBatches | None:
        """Return the arithmetic of the epoch's batches; None if the dataset has no length."""
        if self.pre_sharded or not hasattr(self.fetcher.dataset, "__len__"):
            return None
        size, last_batch = len(self.fetcher.dataset), self.options.last_batch
        return EpochBatches(size=size, global_batch_size=self.global_batch_size, last_batch=last_batch)

    def order_identity(self, at: Position) -> dict[str, int]:
        """Return the seed, and the number of ranks over which the dataset splits itself."""
        return {"seed": self.fetcher.seed, "split": self.options.ranks if self.pre_sharded and self.adapter is None else 0}

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
                raise ConfigError("loader: the dataset returned no sample in a whole epoch. Check the dataset.")
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
        at, template, delayed = begin, EmptyBatchTemplate(self.options.batch_spec), None
        if self.adapter is not None and state is not None:
            self.adapter.load(state)
        reader = EpochReader(self, begin, None if self.adapter else state, skip=begin.samples > 0 and state is None)
        for worker_batch in load_batches(reader, None, self.options.workers):
            payload = unpack_or_raise(worker_batch)
            if self.options.last_batch == "drop" and not evaluation and payload.sample_count < self.samples_per_step:
                break
            if delayed is not None:
                yield delayed
                if is_reached(goal, delayed.position_after):
                    # The next loop reads the prefetched samples again.
                    return
            # Without a share of its own, a rank has samples if its number is below the number of samples.
            has_samples = self.pre_sharded or self.options.rank < payload.sample_count
            batch, padding_sample = template.fit(payload, has_samples=has_samples)
            samples = self.global_batch_size if self.pre_sharded else payload.sample_count
            at = replace(at, samples=at.samples + samples, batches=at.batches + 1, total=at.total + samples)
            dataset_state = payload.dataset_state if self.adapter is None else self.adapter.state_at(at)
            delayed = LoaderItem(
                batch=batch,
                padding_sample=padding_sample,
                position_after=at,
                skipped=payload.skipped,
                dataset_state=dataset_state,
                changed_by_reading=payload.changed_by_reading,
                independent_epochs=self.pre_sharded,
            )
        if delayed is None and begin.samples and self.pre_sharded and self.adapter is None and not evaluation:
            delayed = self._empty_after_end(begin, template)
        if delayed is not None:
            yield from self._finish_epoch(delayed, template, goal, evaluation=evaluation)

    def _empty_after_end(self, begin: Position, template: EmptyBatchTemplate) -> LoaderItem | None:
        """Build an empty item for a rank that was resumed in an epoch in which only other ranks have samples left.

        The first batch of the epoch provides the shapes.
        """
        reader = EpochReader(self, replace(begin, samples=0), None, skip=False)
        for worker_batch in load_batches(reader, None, replace(self.options.workers, count=0)):
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


def is_mosaic(dataset: Any) -> bool:
    """Return True if ``dataset`` is a ``StreamingDataset`` of mosaicml-streaming. The check does not import ``streaming``."""
    return _is_instance_by_name(dataset, "streaming.", "StreamingDataset")


@dataclass(frozen=True, slots=True)
class MosaicAdapter:
    """State of a ``StreamingDataset``, which the dataset keeps in memory that its loader workers share.

    The dataset splits its samples over ranks and workers from environment variables. It resumes on any number of them.
    """

    dataset: Any

    def state_at(self, after: Position) -> Plain:
        """Return the dataset's state at ``after``, in the current epoch or at the start of the next epoch."""
        state = self.dataset.state_dict(after.samples, True)
        return cast("Plain", state if after.samples else {**state, "epoch": state["epoch"] + 1, "sample_in_epoch": 0})

    def load(self, state: Plain) -> None:
        """Load a state. Mutates: the dataset's shared memory, which the next iteration reads."""
        self.dataset.load_state_dict(state)
        # The dataset ignores the state of an epoch that it has begun already.
        self.dataset.next_epoch = cast("dict[str, Any]", state)["epoch"]


def adapt_mosaic(dataset: Any, *, global_batch_size: int, ranks: int) -> MosaicAdapter:
    """Return the adapter of ``dataset``, after a check of the dataset's batch size per rank.

    Raises:
        ConfigError: the batch size is not this rank's part of the global batch.
    """
    if dataset.batch_size is None or dataset.batch_size * ranks != global_batch_size:
        raise ConfigError(
            f"build_loader: the StreamingDataset must have batch_size={global_batch_size // ranks}, so that {ranks} ranks make "
            f"global_batch_size={global_batch_size}, got batch_size={dataset.batch_size}. "
            "Make the StreamingDataset with this batch_size."
        )
    return MosaicAdapter(dataset)


def as_iterable(dataset: Any) -> Any:
    """Return ``dataset``, or a torchdata ``Loader`` of a torchdata node: an iterable with a state."""
    if not _is_instance_by_name(dataset, "torchdata.nodes.", "BaseNode"):
        return dataset
    # torchdata is imported only if the user has a torchdata node.
    from torchdata.nodes import Loader

    return cast("Callable[[Any], Any]", Loader)(dataset)


def drops_samples_on_resume(dataset: Any) -> bool:
    """Return True if a resume of ``dataset`` loses samples: Hugging Face's streams do not save their shuffle buffer.

    The check reads private attributes, since there is no public one. If it fails, ``datasets`` warns about the lost samples.
    """
    if not type(dataset).__module__.startswith("datasets."):
        return False
    parts, is_lossy = [getattr(dataset, "_ex_iterable", None)], False
    while parts and not is_lossy:
        part = parts.pop()
        is_lossy = type(part).__name__ == "BufferShuffledExamplesIterable" and getattr(part, "buffer_size", 2) > 1
        parts += [getattr(part, "ex_iterable", None)] if hasattr(part, "ex_iterable") else getattr(part, "ex_iterables", [])
    return is_lossy


def restarts_each_iteration(dataset: Any) -> bool:
    """Return True if each iteration of ``dataset`` begins at its start or at a state just loaded, as torchdata's loaders do."""
    return _is_instance_by_name(dataset, "torchdata.nodes.", "Loader")


def _is_instance_by_name(dataset: Any, package: str, name: str) -> bool:
    return any(kind.__module__.startswith(package) and kind.__name__ == name for kind in type(dataset).__mro__)
