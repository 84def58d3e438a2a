"""``MapBatchSource``: loader items of an indexed dataset; ``BatchSource``: the protocol between a loader and its dataset."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from dtrain import spans
from dtrain.data.batch import BatchSpec, narrow_batch
from dtrain.data.fetcher import BatchRequest, Fetcher, describe_error
from dtrain.data.position import EpochBatches, LastBatch, Position, batch_indices, is_reached
from dtrain.data.sample_order import CachedOrder, SampleOrder, rank_positions
from dtrain.data.workers import Payload, WorkerBatch, WorkerConfig, load_batches
from dtrain.dist.batch_info import BatchStatus
from dtrain.errors import DataError, DtrainError
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
    """

    global_batch_size: int | Schedule
    last_batch: LastBatch
    rank: int
    ranks: int
    workers: WorkerConfig
    batch_spec: BatchSpec | None = None


class BatchSource(Protocol):
    """Source of the items of a loader."""

    fetcher: Fetcher
    options: BatchOptions

    @property
    def single_reader(self) -> bool:
        """True if the dataset has a single position, so that a second reader moves the first reader."""
        ...

    @property
    def can_skip(self) -> bool:
        """True if samples of a global batch can be skipped."""
        ...

    def epoch_batches(self) -> EpochBatches | None:
        """Return the arithmetic of the epoch's batches; None if the length of the epoch is unknown."""
        ...

    def order_identity(self, at: Position) -> dict[str, int]:
        """Return the properties of the order (seed, shuffle, size) without which the position ``at`` has no meaning."""
        ...

    def resume(self, identity: Mapping[str, int], at: Position) -> None:
        """Continue from ``at``, saved with ``identity``. Raise CheckpointMismatchError if ``at`` means other samples here."""
        ...

    def items(self, begin: Position, goal: Duration, *, state: Plain = None, evaluation: bool = False) -> Iterator[LoaderItem]:
        """Iterate from ``begin`` to ``goal``. If ``evaluation`` is True, read each sample exactly once."""
        ...


@dataclass(slots=True, kw_only=True)
class MapBatchSource:
    """Source of the items of an indexed dataset. The samples of each batch are known before any sample is read."""

    fetcher: Fetcher
    order: SampleOrder
    options: BatchOptions
    single_reader: ClassVar[bool] = False
    can_skip: ClassVar[bool] = True

    def epoch_batches(self) -> EpochBatches:
        """Return the arithmetic of the epoch's batches."""
        options = self.options
        return EpochBatches(size=self.order.size, global_batch_size=options.global_batch_size, last_batch=options.last_batch)

    def order_identity(self, at: Position) -> dict[str, int]:
        """Return the state of the sample order."""
        return self.order.state(at.epoch, at.samples)

    def resume(self, identity: Mapping[str, int], at: Position) -> None:
        """Restore the sample order. Mutates: the order, if a mixture continues with other weights."""
        self.order = self.order.at_state(identity, at.epoch, at.samples)

    def items(self, begin: Position, goal: Duration, *, state: Plain = None, evaluation: bool = False) -> Iterator[LoaderItem]:
        """Iterate over items; see ``BatchSource``."""
        batches = replace(self.epoch_batches(), last_batch="short") if evaluation else self.epoch_batches()
        template = EmptyBatchTemplate(self.options.batch_spec)
        planned: deque[tuple[Position, bool]] = deque()
        plan = self._requests(batches, begin, goal, planned)
        requests = _RequestSampler(self._prefetch(plan) if hasattr(self.fetcher.dataset, "prefetch") else plan)
        for worker_batch in load_batches(self.fetcher, requests, self.options.workers):
            payload = unpack_or_raise(worker_batch)
            at, has_samples = planned.popleft()
            batch, padding_sample = template.fit(payload, has_samples=has_samples)
            yield LoaderItem(
                batch=batch,
                padding_sample=padding_sample,
                position_after=at,
                ends_epoch=at.samples == 0,
                skipped=payload.skipped,
                changed_by_reading=payload.changed_by_reading,
            )
        if requests.failures:
            raise requests.failures[0]

    def _requests(
        self, batches: EpochBatches, begin: Position, goal: Duration, planned: deque[tuple[Position, bool]]
    ) -> Iterator[BatchRequest]:
        """Yield a request per batch. Append to ``planned``: the position after the batch, and True if this rank has samples."""
        at, order, options = begin, CachedOrder(self.order), self.options
        while not is_reached(goal, at):
            start, stop = batches.bounds(at)
            # A rank without a sample reads one sample, because an empty batch needs the shapes of a real sample.
            # The sample is repeated, since BatchNorm fails on a single value.
            positions = rank_positions(start, stop, options.rank, options.ranks, self.order.streams)
            to_read = positions or range(start, start + 1)
            indices = batch_indices(order, at.epoch, to_read.start, to_read.stop)
            if to_read.step != 1:
                indices = indices[:: to_read.step]
            request = BatchRequest(at.epoch, to_read.start, indices, 1 if positions else 2)
            at = batches.after(at, start, stop)
            planned.append((at, bool(positions)))
            yield request

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
    """Shapes and dtypes of this rank's batches, kept to build an empty batch."""

    __slots__ = ("_last", "_spec")

    def __init__(self, spec: BatchSpec | None) -> None:
        self._spec = spec
        self._last: Batch | None = None

    def fit(self, payload: Payload, *, has_samples: bool) -> tuple[Batch, Batch | None]:
        """Return the batch to issue, and a padding sample if that batch is empty.

        Raises:
            DataError: no sample could be read so far, so the shapes are unknown.
        """
        if payload.batch is not None:
            self._last = payload.batch
            return (payload.batch, None) if has_samples else (self.empty_batch(), payload.batch)
        if self._last is None:
            first = "".join(f": sample {index}: {error}" for index, error in payload.skipped[:1])
            raise DataError(
                f"loader: none of the {len(payload.skipped)} samples of the first batch could be read{first}. "
                "Correct the dataset, or pass on_error='raise' to see the first error."
            )
        return self.empty_batch(), self._last

    def empty_batch(self) -> Batch:
        """Build a batch without samples."""
        return narrow_batch(self._last, 0, 0, self._spec)

    @property
    def padding_sample(self) -> Batch | None:
        """The last batch; None before the first batch."""
        return self._last


def next_item(items: Iterator[LoaderItem]) -> LoaderItem | None:
    """Return the next item, or None, and measure the time in which the training loop waits for the item."""
    spans.begin("data")
    try:
        return next(items, None)
    finally:
        spans.end("data")
        # The wait is over. A rank that stops before its next heartbeat is not waiting for data.
        heartbeats.heartbeat("in the loop")
