"""``BatchSource``: the reader between a loader and its dataset, a ``MapBatchSource`` or an ``IterableBatchSource``.

The samples of an indexed dataset are read by the requests of an order. An iterable dataset can be read from its start only:
every rank reads the whole stream and keeps its share, so global batches are the same for every number of ranks. If the dataset
has a state, a resume loads the state. Otherwise a resume reads the consumed samples again and drops them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.weak import WeakIdKeyDictionary

from dtrain import spans
from dtrain.data.balance import BatchBalance, Dealer, DealtBatch
from dtrain.data.batch import BatchSpec, MicrobatchList, list_microbatches, narrow_batch
from dtrain.data.dataset import (
    MosaicAdapter,
    adapt_mosaic,
    as_iterable,
    has_state,
    hash_global_batch,
    is_mosaic,
    restarts_each_iteration,
)
from dtrain.data.fetcher import BatchRequest, Fetcher, cut_sequence, describe_error, failed_payload
from dtrain.data.position import EpochBatches, LastBatch, Position, batch_indices, is_reached
from dtrain.data.sample_order import (
    BlockShuffle,
    CachedOrder,
    SampleOrder,
    check_same_state,
    rank_positions,
    rank_share,
)
from dtrain.data.workers import Payload, WorkerBatch, WorkerConfig, divide_workers, load_batches
from dtrain.dist.batch_info import BatchStatus
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, DataError, DtrainError
from dtrain.launch import heartbeats
from dtrain.schedules.durations import Duration
from dtrain.typing import Batch, Plain, Schedule

# Number of batches that a dataset with prefetch() receives in advance.
_PREFETCH_BATCHES = 8


# Not frozen, because a frozen record takes twice as long to make, and each batch makes a record.
@dataclass(slots=True, kw_only=True)
class LoaderItem:
    """A batch, and the loader's position after the batch.

    Args:
        position_after: position of the next batch.
        batch: samples of this rank; empty if the rank has no sample.
        ends_epoch: True for the last batch of this rank's epoch.
        padding_sample: one or two real samples, for a rank with an empty batch.
        skipped: samples that could not be read, with the reason.
        dataset_state: state of an iterable dataset after this batch.
        independent_epochs: if True, each rank ends its epochs independently.
        status: agreement of the ranks about the end of the epoch, written by the step on the batch.
        position_only: no batch; only advances the loader position.
        changed_by_reading: names of watched attributes that a worker changed as it read the batch.
        balance: costs of all ranks in the global batch; None without a dealer.
        content_hash: hash of the global batch of an iterable dataset that all ranks read; 0 if there is nothing to compare.
    """

    position_after: Position
    batch: Batch = None
    ends_epoch: bool = False
    padding_sample: Batch | None = None
    skipped: list[tuple[int, str]] = field(default_factory=list)
    dataset_state: Plain = None
    independent_epochs: bool = False
    status: BatchStatus = field(default_factory=BatchStatus)
    position_only: bool = False
    changed_by_reading: frozenset[str] = frozenset()
    balance: BatchBalance | None = None
    content_hash: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """Batches of a loader, and this rank's share of them.

    Args:
        global_batch_size: samples of a full batch, over all ranks; or a schedule of the batch's number in the run.
        last_batch: treatment of a last batch that is not full.
        rank: number of this rank among the ``ranks`` that share each batch.
        ranks: number of ranks that share each batch.
        workers: loader workers of this rank.
        batch_spec: position of the batch axis; None uses the first axis.
        dealer: rule that deals the samples of a batch to ranks; None gives each rank a range of the order.
    """

    global_batch_size: int | Schedule
    last_batch: LastBatch
    rank: int
    ranks: int
    workers: WorkerConfig
    batch_spec: BatchSpec | None = None
    dealer: Dealer | None = None

    @property
    def makes_microbatches(self) -> bool:
        """True if a batch is a list of microbatches."""
        return self.dealer is not None and self.dealer.max_tokens is not None


@dataclass(slots=True, kw_only=True)
class MapBatchSource:
    """Source of the items of an indexed dataset. The samples of each batch are known before any sample is read."""

    fetcher: Fetcher
    order: SampleOrder
    options: BatchOptions
    is_indexed: ClassVar[bool] = True
    """True if samples can be read again by index, in any order."""
    can_skip: ClassVar[bool] = True
    """True if samples of a global batch can be skipped."""

    def begin_reading(self) -> Reading:
        """Begin a reading, which no other reading moves."""
        return Reading(None)

    def epoch_batches(self) -> EpochBatches:
        """Return the arithmetic of the epoch's batches."""
        options = self.options
        return EpochBatches(size=self.order.size, global_batch_size=options.global_batch_size, last_batch=options.last_batch)

    def order_identity(self, position: Position) -> dict[str, int]:
        """Return the properties of the order (seed, shuffle, size) without which ``position`` has no meaning."""
        return self.order.state(position.epoch, position.samples)

    def resume(self, identity: Mapping[str, int], position: Position) -> None:
        """Continue from ``position``, saved with ``identity``. Mutates: the order, if a mixture continues with other weights.

        Raises:
            CheckpointMismatchError: ``position`` means other samples in this order.
        """
        self.order = self.order.at_state(identity, position.epoch, position.samples)

    def items(self, begin: Position, goal: Duration, *, state: Plain = None, evaluation: bool = False) -> Iterator[LoaderItem]:
        """Iterate over the items from ``begin`` to ``goal``. If ``evaluation`` is True, read each sample exactly once."""
        batches = replace(self.epoch_batches(), last_batch="short") if evaluation else self.epoch_batches()
        template = EmptyBatchTemplate(self.options.batch_spec, is_split=self.options.makes_microbatches)
        planned: deque[_PlannedBatch] = deque()
        plan = self._requests(batches, begin, goal, planned)
        requests = _RequestSampler(self._prefetch(plan) if hasattr(self.fetcher.dataset, "prefetch") else plan)
        for worker_batch in load_batches(self.fetcher, requests, self.options.workers):
            payload = unpack_or_raise(worker_batch)
            position, has_samples, balance = planned.popleft()
            item = template.fit(payload, position, has_samples=has_samples, ends_epoch=position.samples == 0)
            item.balance = balance
            yield item
        if requests.failures:
            raise requests.failures[0]

    def _requests(
        self, batches: EpochBatches, begin: Position, goal: Duration, planned: deque[_PlannedBatch]
    ) -> Iterator[BatchRequest]:
        """Yield a request per batch, and append the batch to ``planned``."""
        position, order, options = begin, CachedOrder(self.order), self.options
        while not is_reached(goal, position):
            start, stop = batches.bounds(position)
            # A rank without a sample reads one sample, because an empty batch needs the shapes of a real sample.
            # The sample is repeated, since BatchNorm fails on a single value.
            balance: BatchBalance | None = None
            if options.dealer is None:
                positions = rank_positions(start, stop, options.rank, options.ranks, self.order.streams)
                to_read = positions or range(start, start + 1)
                indices = batch_indices(order, position.epoch, to_read.start, to_read.stop)
                if to_read.step != 1:
                    indices = indices[:: to_read.step]
                request = BatchRequest(position.epoch, to_read.start, indices, 1 if positions else 2)
                has_samples = bool(positions)
            else:
                dealt, indices = self._deal(order, position.epoch, start, stop)
                balance, has_samples = dealt.balance, len(dealt.offsets) > 0
                first = start + (int(dealt.offsets.min()) if has_samples else 0)
                indices = indices[dealt.offsets] if has_samples else indices[:1]
                request = BatchRequest(position.epoch, first, indices, 1 if has_samples else 2, dealt.parts)
            position = batches.normalize(position.after_batch(stop - start))
            planned.append(_PlannedBatch(position, has_samples, balance))
            yield request

    def _deal(self, order: CachedOrder, epoch: int, start: int, stop: int) -> tuple[DealtBatch, Tensor]:
        """Return this rank's part of a global batch, and the indices of the global batch."""
        options, streams = self.options, self.order.streams
        assert options.dealer is not None
        indices = batch_indices(order, epoch, start, stop)
        offsets: list[range] = []
        if options.dealer.cost_fn is None:
            shares = [rank_positions(start, stop, rank, options.ranks, streams) for rank in range(options.ranks)]
            offsets = [range(share.start - start, share.stop - start, share.step) for share in shares]
        return options.dealer.deal(indices.numpy(), options.rank, options.ranks, offsets), indices

    def _prefetch(self, requests: Iterator[BatchRequest]) -> Iterator[BatchRequest]:
        """Yield ``requests``, and announce later requests to the dataset."""
        prefetch = self.fetcher.dataset.prefetch
        announced: deque[BatchRequest] = deque()
        for request in requests:
            try:
                prefetch(request.indices)
            except DtrainError:
                raise
            except Exception as error:
                raise DataError(
                    f"loader: prefetch of {type(self.fetcher.dataset).__name__}: {describe_error(error)}"
                ) from error
            announced.append(request)
            if len(announced) > _PREFETCH_BATCHES:
                yield announced.popleft()
        yield from announced


class _PlannedBatch(NamedTuple):
    """Requested batch: the position after it, True if this rank has samples, and the costs of all ranks."""

    position_after: Position
    has_samples: bool
    balance: BatchBalance | None


@dataclass(frozen=True, slots=True)
class _RequestSampler:
    """Sampler for torch's ``DataLoader``. The iteration ends at an exception, and ``failures`` stores the exception.

    If a sampler raises while a ``DataLoader`` starts, torch leaves a half-started loader with its workers behind.
    """

    requests: Iterator[BatchRequest]
    failures: list[Exception] = field(default_factory=list)

    def __iter__(self) -> Iterator[BatchRequest]:
        try:
            yield from self.requests
        # The dataset's prefetch and order may be user code, so any exception can occur.
        except Exception as error:  # noqa: BLE001
            self.failures.append(error)


def unpack_or_raise(worker_batch: WorkerBatch) -> Payload:
    """Unpack the payload that a worker sent.

    Raises:
        DataError: the worker could not make the batch.
    """
    payload = worker_batch.unpack()
    if payload.failure is None:
        return payload
    error = DataError(f"loader: {payload.failure}")
    if payload.trace:
        error.add_note(payload.trace.rstrip())
    raise error


class EmptyBatchTemplate:
    """Shapes and dtypes of this rank's batches, kept to build an empty batch. If ``is_split``, a batch has microbatches."""

    __slots__ = ("_is_split", "_last", "_spec")

    def __init__(self, spec: BatchSpec | None, *, is_split: bool = False) -> None:
        self._spec, self._is_split = spec, is_split
        self._last: Batch | None = None

    def fit(self, payload: Payload, position_after: Position, *, has_samples: bool, ends_epoch: bool = False) -> LoaderItem:
        """Return the item to issue. A rank without samples, or whose samples cannot be read, issues an empty batch.

        Raises:
            DataError: no sample could be read so far, so the shapes are unknown.
        """
        if payload.batch is not None:
            self._last = list_microbatches(payload.batch)[0]
        elif self._last is None:
            first = "".join(f": sample {index}: {error}" for index, error in payload.skipped[:1])
            raise DataError(
                f"loader: none of the {len(payload.skipped)} samples of the first batch could be read{first}. "
                "Correct the dataset, or pass on_error='raise' to see the first error."
            )
        is_empty = payload.batch is None or not has_samples
        return LoaderItem(
            batch=self._empty_batch() if is_empty else payload.batch,
            padding_sample=self._last if is_empty else None,
            position_after=position_after,
            ends_epoch=ends_epoch,
            skipped=payload.skipped,
            changed_by_reading=payload.changed_by_reading,
            balance=payload.balance,
            content_hash=payload.content_hash,
        )

    def empty_item(self, position_after: Position) -> LoaderItem:
        """Return an item without samples, for a rank that has ended its epoch before other ranks."""
        return LoaderItem(
            batch=self._empty_batch(), padding_sample=self._last, position_after=position_after, independent_epochs=True
        )

    def _empty_batch(self) -> Batch:
        empty = narrow_batch(self._last, 0, 0, self._spec)
        return MicrobatchList([empty], part_tokens=[()]) if self._is_split else empty


def next_item(items: Iterator[LoaderItem]) -> LoaderItem | None:
    """Return the next item, or None, and measure the time in which the training loop waits for the item."""
    spans.begin("data")
    try:
        return next(items, None)
    finally:
        spans.end("data")
        # The wait is over. A rank that stops before its next heartbeat is not waiting for data.
        heartbeats.heartbeat("in the loop")


@dataclass(slots=True)
class DatasetReads:
    """Reads of a stateful dataset object in this process, by all loaders over it: each read moves the one position it has.

    Args:
        start_state: state of the dataset before this process read any sample.
        is_iterating: True after an iteration has begun, until it reaches its end.
        newest: the reading that began last; another one loads its own state before it reads on.
    """

    start_state: Plain = None
    is_iterating: bool = False
    newest: Reading | None = None

    def rewind(self, dataset: Any) -> None:
        """Rewind for a new iteration. Mutates: ``dataset``, to its start, and this object."""
        if self.is_iterating:
            dataset.load_state_dict(deepcopy(self.start_state))
        elif self.start_state is None:
            self.start_state = deepcopy(dataset.state_dict())
        self.is_iterating = True


# The dataset is the user's object, so its position is a fact of the process, whichever loader reads it. Keys are weak.
_READS = WeakIdKeyDictionary()


def reads_of(dataset: Any) -> DatasetReads:
    """Return the reads of ``dataset``; for a loader of torchdata, the reads of its node."""
    node = getattr(dataset, "root", dataset) if restarts_each_iteration(dataset) else dataset
    try:
        reads: DatasetReads = _READS.setdefault(node, DatasetReads())
    # A class with slots may allow no weak reference.
    except TypeError:
        return DatasetReads()
    return reads


class Reading:
    """One iteration of a loader over the items of a source. ``reads``: reads of a dataset with a single position."""

    def __init__(self, reads: DatasetReads | None) -> None:
        self._reads = reads
        if reads is not None:
            reads.newest = self

    @property
    def was_moved(self) -> bool:
        """True if another reading began since, which has moved the dataset."""
        return self._reads is not None and self._reads.newest is not self


class EpochReader(IterableDataset[WorkerBatch]):
    """The rest of an epoch of an iterable dataset as batches of this rank, for torch's ``DataLoader``.

    Args:
        source: the source, whose dataset is read.
        begin: position of the first batch.
        state: state of the dataset at ``begin``, None if the dataset has no state or a ``MosaicAdapter`` restores it.
        skip: if True, read the samples before ``begin`` again and drop them.
    """

    def __init__(self, source: IterableBatchSource, begin: Position, state: Plain, *, skip: bool) -> None:
        self.fetcher, self.reads = source.fetcher, source.reads
        self.rank, self.ranks, self.pre_sharded = source.options.rank, source.options.ranks, source.pre_sharded
        self.samples_per_step, self.splits_over_workers = source.samples_per_step, source.adapter is not None
        self.dealer = source.options.dealer
        self.compares_ranks = get_dist_info().world_size > 1 and not self.pre_sharded
        self.begin, self.state, self.skip = begin, state, skip

    def __iter__(self) -> Iterator[WorkerBatch]:
        worker = get_worker_info()
        step, number = (worker.num_workers, worker.id) if worker and self.splits_over_workers else (1, 0)
        stream, begin = None, self.begin.samples // (self.ranks if self.pre_sharded else 1)
        while True:
            position = begin + number * self.samples_per_step
            watched = None if worker is None else self.fetcher.watched_attributes()
            try:
                if stream is None and self.skip:
                    stream = self._skip_consumed(begin)
                with self._seed_rng(position):
                    stream = self._open_stream() if stream is None else stream
                    payload = self._next_payload(stream, position)
            # The dataset, the transform and collate are user code, so any exception can occur.
            except Exception as error:  # noqa: BLE001
                payload = failed_payload(error)
            if payload is None:
                self.reads.is_iterating = False
                return
            if watched is not None:
                payload.changed_by_reading = self.fetcher.changed_since(watched)
            yield WorkerBatch.pack(payload)
            number += step

    def _seed_rng(self, position: int) -> AbstractContextManager[None]:
        """Seed the global generators for ``position`` in the epoch; per rank, if each rank has samples of its own."""
        return self.fetcher.seed_rng(self.begin.epoch, position, self.rank if self.pre_sharded else -1)

    def _skip_consumed(self, consumed: int) -> Iterator[Any] | None:
        """Read the consumed samples again, with the same seeds, and return the stream after them."""
        stream = None
        for position in range(0, consumed, self.samples_per_step):
            with self._seed_rng(position):
                stream = self._open_stream() if stream is None else stream
                count = min(self.samples_per_step, consumed - position)
                next(islice(stream, count, count), None)
        return stream

    def _open_stream(self) -> Iterator[Any]:
        dataset = self.fetcher.dataset
        if hasattr(dataset, "set_epoch"):
            # A loaded state may hold for its own epoch only, so the epoch is set first.
            dataset.set_epoch(self.begin.epoch)
        if has_state(dataset) and not self.splits_over_workers and not restarts_each_iteration(dataset):
            self.reads.rewind(dataset)
        if self.state is not None and self.begin.samples > 0:
            # The dataset may keep and change the state that it loads.
            dataset.load_state_dict(deepcopy(self.state))
        stream: Iterator[Any] = iter(dataset)
        return stream

    def _next_payload(self, stream: Iterator[Any], position: int) -> Payload | None:
        """Return the next payload; None at the end."""
        fetcher, samples = self.fetcher, list(islice(stream, self.samples_per_step))
        skipped: list[tuple[int, str]] = []
        if not samples:
            return None
        count = len(samples)
        first, last = (0, count) if self.pre_sharded else rank_share(0, count, self.rank, self.ranks)
        offsets, balance = [*range(first, last)], cast("BatchBalance | None", None)
        parts: tuple[Sequence[int], ...] = ()
        if self.dealer is not None:
            shares = [range(*rank_share(0, count, rank, self.ranks)) for rank in range(self.ranks)]
            dealt = self.dealer.deal_samples(samples, self.rank, self.ranks, shares)
            offsets, parts, balance = dealt.offsets.tolist(), dealt.parts, dealt.balance
        # A rank without a sample reads the first sample twice, see ``MapBatchSource``.
        groups = []
        for part in cut_sequence(offsets or [0], [*map(len, parts)] or [max(len(offsets), 1)]):
            group = [samples[k] for k in part]
            if fetcher.transform is not None:
                step, offset = (self.ranks, self.rank) if self.pre_sharded else (1, 0)
                numbered = {(position + k) * step + offset: samples[k] for k in part}
                group, skipped_in_part = fetcher.read_each(self.begin.epoch, numbered, numbered.__getitem__)
                skipped += skipped_in_part
            groups.append(group if offsets else group * 2)
        batch = fetcher.collate_groups(groups, parts)
        # A checkpoint needs a state that is equal on all ranks. A dataset split over ranks has no such state.
        state = deepcopy(fetcher.dataset.state_dict()) if has_state(fetcher.dataset) and not self.pre_sharded else None
        return Payload(
            batch=batch,
            skipped=skipped,
            dataset_state=state,
            sample_count=count,
            balance=balance,
            content_hash=hash_global_batch(samples) if self.compares_ranks else 0,
        )


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
    reads: DatasetReads = field(init=False)
    is_indexed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.reads = reads_of(self.fetcher.dataset)

    @property
    def global_batch_size(self) -> int:
        """Samples of a full batch, over all ranks."""
        return cast("int", self.options.global_batch_size)

    @property
    def samples_per_step(self) -> int:
        """Samples to read per step: a global batch, or this rank's part if the dataset is split over ranks already."""
        return self.global_batch_size // self.options.ranks if self.pre_sharded else self.global_batch_size

    def begin_reading(self) -> Reading:
        """Begin a reading. A dataset that has a state and is read in this process has a single position."""
        return Reading(self.reads if self.options.workers.count == 0 and has_state(self.fetcher.dataset) else None)

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

    def order_identity(self, position: Position) -> dict[str, int]:
        """Return the seed, and the number of ranks over which the dataset splits itself."""
        return {"seed": self.fetcher.seed, "split": self.options.ranks if self.pre_sharded and self.adapter is None else 0}

    def resume(self, identity: Mapping[str, int], position: Position) -> None:
        """Check that ``identity`` agrees with this source; see ``MapBatchSource``."""
        check_same_state(identity, self.order_identity(position))

    def items(self, begin: Position, goal: Duration, *, state: Plain = None, evaluation: bool = False) -> Iterator[LoaderItem]:
        """Iterate over items; see ``MapBatchSource``."""
        position = begin
        if self.adapter is not None and state is None and begin.samples == 0 and not evaluation:
            # The dataset counts its iterations. A loop that begins with the same batch again needs the state before the batch.
            yield LoaderItem(position_after=position, position_only=True, dataset_state=self.adapter.state_at(position))
        while not is_reached(goal, position):
            epoch, before = position.epoch, position
            for item in self._epoch_items(position, goal, state, evaluation=evaluation):
                yield item
                position = item.position_after
            if is_reached(goal, position):
                return
            # The state holds for the first epoch only.
            state = None
            if position is before and position.samples == 0:
                raise ConfigError("loader: the dataset returned no sample in a whole epoch. Check the dataset.")
            # The dataset has no length, so the end of the epoch is known only now.
            if position.epoch == epoch:
                position = replace(position, epoch=epoch + 1, samples=0)
                yield LoaderItem(
                    position_after=position,
                    position_only=True,
                    dataset_state=self.adapter.state_at(position) if self.adapter is not None else None,
                )

    def _epoch_items(self, begin: Position, goal: Duration, state: Plain, *, evaluation: bool) -> Iterator[LoaderItem]:
        """Iterate over the rest of an epoch. Each item is delayed until the reader has found out if the item is the last."""
        template = EmptyBatchTemplate(self.options.batch_spec, is_split=self.options.makes_microbatches)
        position, delayed = begin, cast("LoaderItem | None", None)
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
            # A dealer gives the first ranks a sample, too.
            has_samples = self.pre_sharded or self.options.rank < payload.sample_count
            position = position.after_batch(self.global_batch_size if self.pre_sharded else payload.sample_count)
            delayed = template.fit(payload, position, has_samples=has_samples)
            delayed.dataset_state = payload.dataset_state if self.adapter is None else self.adapter.state_at(position)
            delayed.independent_epochs = self.pre_sharded
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
            template.fit(unpack_or_raise(worker_batch), begin, has_samples=True)
            return template.empty_item(begin.after_batch(self.global_batch_size))
        return None

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
            empty = template.empty_item(delayed.position_after.after_batch(self.global_batch_size))
            delayed = replace(empty, dataset_state=delayed.dataset_state, ends_epoch=True)
            yield delayed


BatchSource: TypeAlias = MapBatchSource | IterableBatchSource


def iterable_batch_source(
    fetcher: Fetcher, options: BatchOptions, shuffle: bool | BlockShuffle, pre_sharded: bool
) -> IterableBatchSource:
    """Return the source of an iterable dataset. Raise ConfigError for arguments of ``build_loader`` that it cannot take."""
    dataset, ranks = fetcher.dataset, options.ranks
    if not hasattr(dataset, "__iter__"):
        raise ConfigError(
            f"build_loader: dataset must have len and [], or be iterable, got a {type(dataset).__name__}. "
            "Define __len__ and __getitem__, or __iter__."
        )
    if shuffle is not False and not is_mosaic(dataset):
        raise ConfigError("build_loader: an iterable dataset has its own order. Use shuffle=False, and shuffle in the dataset.")
    if options.last_batch == "pad":
        raise ConfigError("build_loader: last_batch='pad' needs an indexed dataset. Use last_batch='short' or 'drop'.")
    batch = cast("int", options.global_batch_size)
    adapter = adapt_mosaic(dataset, global_batch_size=batch, ranks=ranks) if is_mosaic(dataset) else None
    if pre_sharded and batch % ranks:
        raise ConfigError(
            f"build_loader: pre_sharded needs a global_batch_size that is divisible by {ranks} ranks, got {batch}. "
            f"Pass a multiple of {ranks} as global_batch_size."
        )
    return IterableBatchSource(
        fetcher=replace(fetcher, dataset=as_iterable(dataset)),
        options=replace(options, workers=divide_workers(options.workers, at_most=None if adapter else 1)),
        pre_sharded=pre_sharded or adapter is not None,
        adapter=adapter,
    )
