"""``MapBatchSource``: loader items of an indexed dataset; ``BatchSource``: the protocol between a loader and its dataset."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dtrain import heartbeats, spans
from dtrain.batch import BatchSpec, FailedBatch, narrow_batch
from dtrain.data.fetcher import BatchRequest, Fetcher, describe_error
from dtrain.data.position import EpochBatches, Position, is_reached
from dtrain.data.sampling.last_batch import LastBatch, batch_indices
from dtrain.data.sampling.sample_order import CachedOrder, SampleOrder, rank_positions
from dtrain.data.worker_batch import Payload, WorkerBatch
from dtrain.data.workers import WorkerConfig, load_batches
from dtrain.dist.batch_info import BatchStatus
from dtrain.durations import Duration
from dtrain.errors import DataError, DtrainError
from dtrain.typing import Batch, Plain, Schedule

# Number of batches that a dataset with prefetch() receives in advance.
_PREFETCH_BATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
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


class BatchSource(Protocol):
    """Source of the items of a loader."""

    @property
    def global_batch_size(self) -> int | Schedule:
        """Samples of a full batch, over all ranks."""
        ...

    @property
    def single_reader(self) -> bool:
        """True if the dataset has a single position, so that a second reader moves the first reader."""
        ...

    def can_skip(self) -> bool:
        """Return True if samples of a global batch can be skipped."""
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
    global_batch_size: int | Schedule
    last_batch: LastBatch
    rank: int
    ranks: int
    workers: WorkerConfig
    batch_spec: BatchSpec | None = None

    @property
    def single_reader(self) -> bool:
        """False: an indexed dataset has no position."""
        return False

    def can_skip(self) -> bool:
        """Return True: an indexed dataset can always skip samples."""
        return True

    def epoch_batches(self) -> EpochBatches:
        """Return the arithmetic of the epoch's batches."""
        return self._epoch_batches(self.last_batch)

    def order_identity(self, at: Position) -> dict[str, int]:
        """Return the state of the sample order."""
        return self.order.state(at.epoch, at.samples)

    def resume(self, identity: Mapping[str, int], at: Position) -> None:
        """Restore the sample order. Mutates: the order, if a mixture continues with other weights."""
        self.order = self.order.at_state(identity, at.epoch, at.samples)

    def _epoch_batches(self, last_batch: LastBatch) -> EpochBatches:
        return EpochBatches(size=self.order.size, global_batch_size=self.global_batch_size, last_batch=last_batch)

    def items(self, begin: Position, goal: Duration, *, state: Plain = None, evaluation: bool = False) -> Iterator[LoaderItem]:
        """Iterate over items; see ``BatchSource``."""
        batches, template = (
            self._epoch_batches("short") if evaluation else self.epoch_batches(),
            EmptyBatchTemplate(self.batch_spec),
        )
        planned: deque[tuple[Position, bool]] = deque()
        requests = _RequestSampler(self._prefetch(self._requests(batches, begin, goal, planned)))
        for worker_batch in load_batches(self.fetcher, requests, self.workers):
            payload = unpack_or_raise(worker_batch)
            at, has_samples = planned.popleft()
            batch, padding_sample = template.fit(payload, has_samples=has_samples)
            yield LoaderItem(
                batch=batch,
                padding_sample=padding_sample,
                position_after=at,
                ends_epoch=at.samples == 0,
                skipped=payload.skipped,
            )
        if requests.failures:
            raise requests.failures[0]

    def _requests(
        self, batches: EpochBatches, begin: Position, goal: Duration, planned: deque[tuple[Position, bool]]
    ) -> Iterator[BatchRequest]:
        """Yield a request per batch. Append to ``planned``: the position after the batch, and True if this rank has samples."""
        at, order = begin, CachedOrder(self.order)
        while not is_reached(goal, at):
            start, stop = batches.bounds(at)
            # A rank without a sample reads one sample, because an empty batch needs the shapes of a real sample.
            # The sample is repeated, since BatchNorm fails on a single value.
            positions = self._rank_positions(start, stop)
            to_read = positions or range(start, start + 1)
            indices = batch_indices(order, at.epoch, to_read.start, to_read.stop)
            request = BatchRequest(
                at.epoch,
                to_read.start,
                indices if to_read.step == 1 else indices[:: to_read.step],
                1 if positions else 2,
            )
            at = batches.advance(at)
            planned.append((at, bool(positions)))
            yield request

    def _rank_positions(self, start: int, stop: int) -> range:
        """Return this rank's part of a global batch; empty if the rank has no sample."""
        return rank_positions(start, stop, self.rank, self.ranks, self.order.streams)

    def _prefetch(self, requests: Iterator[BatchRequest]) -> Iterator[BatchRequest]:
        """Yield ``requests``, and announce later requests to a dataset with ``prefetch``."""
        prefetch = getattr(self.fetcher.dataset, "prefetch", None)
        if prefetch is None:
            yield from requests
            return
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
            DataError: no sample could be read so far, so the template are unknown.
        """
        if payload.batch is not None:
            self._last = payload.batch
            return (payload.batch, None) if has_samples else (self.empty_batch(), payload.batch)
        if self._last is None:
            first = "".join(f": sample {index}: {error}" for index, error in payload.skipped[:1])
            raise DataError(f"loader: none of the {len(payload.skipped)} samples of the first batch could be read{first}")
        return self.empty_batch(), self._last

    def empty_batch(self) -> Batch:
        """Build a batch without samples."""
        return narrow_batch(self._last, 0, 0, self._spec)

    @property
    def padding_sample(self) -> Batch | None:
        """The last batch; None before the first batch."""
        return self._last


def time_data_waits(items: Iterator[LoaderItem | FailedBatch]) -> Iterator[LoaderItem | FailedBatch]:
    """Yield the items, and measure the time in which the loop waits for the next item."""
    while True:
        spans.begin("data")
        try:
            item = next(items, None)
        finally:
            spans.end("data")
            # The wait is over. A rank that stops before its next heartbeat is not waiting for data.
            heartbeats.heartbeat("in the loop")
        if item is None:
            return
        yield item
