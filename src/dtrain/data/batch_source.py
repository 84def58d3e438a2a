"""``Handout``: what a loader gives the loop for one step, and ``MapBatchSource``, which makes it of a dataset that is indexed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dtrain.batch import BatchSpec, narrow_batch
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

_PREFETCH_BATCHES = 8  # batches of which a dataset that fetches from far away is told in advance


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderItem:
    """A batch, and where the loader is when it is consumed.

    Args:
        position_after: where the next one begins.
        batch: this rank's samples; empty where it has none.
        ends_epoch: whether it is the last of this rank's epoch.
        padding_sample: for a rank with an empty batch, a real sample or two.
        skipped: samples that were left out.
        dataset_state: of an iterable dataset, after this batch.
        independent_epochs: ranks end their epochs each for itself.
        agreement: the answer of the ranks about the end of the epoch, written by the step on the batch.
        position_only: there is no batch; only the position is another.
    """

    position_after: Position
    batch: Batch = None
    ends_epoch: bool = False
    padding_sample: Batch | None = None
    skipped: list[tuple[int, str]] = field(default_factory=list)
    dataset_state: Plain = None
    independent_epochs: bool = False
    agreement: BatchStatus = field(default_factory=BatchStatus)
    position_only: bool = False


class BatchSource(Protocol):
    """Where handouts come from."""

    @property
    def global_batch_size(self) -> int | Schedule:
        """Samples of a full batch, over all ranks."""
        ...

    @property
    def single_reader(self) -> bool:
        """Whether the dataset can be at one place only: a second reader of it moves the first one."""
        ...

    def can_skip(self) -> bool:
        """Whether samples of the global batch can be left out."""
        ...

    def epoch_batches(self) -> EpochBatches | None:
        """Batches of an epoch; None where only its end tells how many there are."""
        ...

    def order_identity(self, at: Position) -> dict[str, int]:
        """What the position ``at`` is only meaningful with."""
        ...

    def resume(self, identity: Mapping[str, int], at: Position) -> None:
        """Go on from ``at``, which was saved with ``identity``; CheckpointMismatchError where that means other samples."""
        ...

    def items(self, begin: Position, goal: Duration, *, state: Plain = None, evaluation: bool = False) -> Iterator[LoaderItem]:
        """From ``begin`` to ``goal``; ``evaluation`` is an evaluation: each sample exactly once."""
        ...


@dataclass(slots=True, kw_only=True)
class MapBatchSource:
    """Handouts of a dataset that is indexed: which samples they hold is known before any is read."""

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
        """Never: it is indexed."""
        return False

    def can_skip(self) -> bool:
        """Always."""
        return True

    def epoch_batches(self) -> EpochBatches:
        """Global batches over the epoch."""
        return self._epoch_batches(self.last_batch)

    def order_identity(self, at: Position) -> dict[str, int]:
        """Of the order."""
        return self.order.state(at.epoch, at.samples)

    def resume(self, identity: Mapping[str, int], at: Position) -> None:
        """Mutates: the order, where a mixture goes on with other weights."""
        self.order = self.order.at_state(identity, at.epoch, at.samples)

    def _epoch_batches(self, tail: LastBatch) -> EpochBatches:
        return EpochBatches(size=self.order.size, global_batch_size=self.global_batch_size, last_batch=tail)

    def items(self, begin: Position, goal: Duration, *, state: Plain = None, evaluation: bool = False) -> Iterator[LoaderItem]:
        """See ``Feed``."""
        grid, shapes = self._epoch_batches("short") if evaluation else self.epoch_batches(), EmptyBatchTemplate(self.batch_spec)
        planned: deque[tuple[Position, bool]] = deque()
        tickets = _RequestSampler(self._prefetch(self._requests(grid, begin, goal, planned)))
        for parcel in load_batches(self.fetcher, tickets, self.workers):
            content = unpack_or_raise(parcel)
            at, has_share = planned.popleft()
            batch, spare = shapes.fit(content, has_samples=has_share)
            yield LoaderItem(
                batch=batch, padding_sample=spare, position_after=at, ends_epoch=at.samples == 0, skipped=content.skipped
            )
        if tickets.failures:
            raise tickets.failures[0]

    def _requests(
        self, grid: EpochBatches, begin: Position, goal: Duration, planned: deque[tuple[Position, bool]]
    ) -> Iterator[BatchRequest]:
        """A ticket per batch; where the loader is after it, and whether this rank has a sample in it, go to ``planned``."""
        at, order = begin, CachedOrder(self.order)
        while not is_reached(goal, at):
            start, stop = grid.bounds(at)
            # A rank without a sample reads one all the same: an empty batch needs the shapes of a real one. Twice, since
            # BatchNorm cannot run on a single value.
            share = self._rank_positions(start, stop)
            mine = share or range(start, start + 1)
            indices = batch_indices(order, at.epoch, mine.start, mine.stop)
            ticket = BatchRequest(at.epoch, mine.start, indices if mine.step == 1 else indices[:: mine.step], 1 if share else 2)
            at = grid.advance(at)
            planned.append((at, bool(share)))
            yield ticket

    def _rank_positions(self, start: int, stop: int) -> range:
        """This rank's part of a global batch; empty where it has none."""
        return rank_positions(start, stop, self.rank, self.ranks, self.order.streams)

    def _prefetch(self, tickets: Iterator[BatchRequest]) -> Iterator[BatchRequest]:
        """``tickets``, while a dataset that fetches from far away is told of later ones."""
        prefetch = getattr(self.fetcher.dataset, "prefetch", None)
        if prefetch is None:
            yield from tickets
            return
        told: deque[BatchRequest] = deque()
        for ticket in tickets:
            try:
                prefetch(ticket.indices)
            except DtrainError:
                raise
            except Exception as error:
                raise DataError(
                    f"loader: prefetch of {type(self.fetcher.dataset).__name__}: {describe_error(error)}"
                ) from error
            told.append(ticket)
            if len(told) > _PREFETCH_BATCHES:
                yield told.popleft()
        yield from told


@dataclass(frozen=True, slots=True)
class _RequestSampler:
    """What torch's ``DataLoader`` takes for a sampler. It ends where there is a failure, which is kept.

    torch would leave half of a loader behind, with its workers, when it is told of one while it starts.
    """

    requests: Iterator[BatchRequest]
    failures: list[Exception] = field(default_factory=list)

    def __iter__(self) -> Iterator[BatchRequest]:
        try:
            yield from self.requests
        except Exception as error:  # noqa: BLE001  # the dataset's prefetch and order may be the user's
            self.failures.append(error)


def unpack_or_raise(parcel: WorkerBatch) -> Payload:
    """What a worker sent.

    Raises:
        DataError: the reason why there is no batch.
    """
    content = parcel.unpack()
    if content.failure is None:
        return content
    error = DataError(f"loader: {content.failure}")
    if content.trace:
        error.add_note(content.trace.rstrip())
    raise error


class EmptyBatchTemplate:
    """Remembers what this rank's batches look like, for one that is to be empty."""

    __slots__ = ("_last", "_spec")

    def __init__(self, spec: BatchSpec | None) -> None:
        self._spec = spec
        self._last: Batch | None = None

    def fit(self, content: Payload, *, has_samples: bool) -> tuple[Batch, Batch | None]:
        """The batch to hand out, and a spare sample where that is empty.

        Raises:
            DataError: no sample could be read so far, so not even the shapes are known.
        """
        if content.batch is not None:
            self._last = content.batch
            return (content.batch, None) if has_samples else (self.empty_batch(), content.batch)
        if self._last is None:
            first = "".join(f": sample {index}: {error}" for index, error in content.skipped[:1])
            raise DataError(f"loader: none of the {len(content.skipped)} samples of the first batch could be read{first}")
        return self.empty_batch(), self._last

    def empty_batch(self) -> Batch:
        """A batch of no samples."""
        return narrow_batch(self._last, 0, 0, self._spec)

    @property
    def padding_sample(self) -> Batch | None:
        """The last batch, if there was one."""
        return self._last
