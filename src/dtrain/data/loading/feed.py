"""``Handout``: what a loader gives the loop for one step, and ``MapFeed``, which makes it of a dataset that is indexed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dtrain.batch import BatchSpec, narrow_batch
from dtrain.data.loading.parcel import Content, Parcel
from dtrain.data.loading.position import Grid, Position, reached
from dtrain.data.loading.reading import Reader, Ticket, described
from dtrain.data.loading.workers import Workers, parcels
from dtrain.data.order.base import Order, rank_positions
from dtrain.data.order.prepared import Prepared
from dtrain.data.order.tails import Tail, batch_indices
from dtrain.dist.origin import Agreement
from dtrain.durations import Duration
from dtrain.errors import DataError, DtrainError
from dtrain.types import Batch, Plain, Schedule

_READ_AHEAD = 8  # batches of which a dataset that fetches from far away is told in advance


@dataclass(frozen=True, slots=True, kw_only=True)
class Handout:
    """A batch, and where the loader is when it is consumed.

    Args:
        after: where the next one begins.
        batch: this rank's samples; empty where it has none.
        ends: whether it is the last of this rank's epoch.
        spare: for a rank with an empty batch, a real sample or two.
        unreadable: samples that were left out.
        state: of an iterable dataset, after this batch.
        alone: ranks end their epochs each for itself.
        agreement: the answer of the ranks about the end of the epoch, written by the step on the batch.
        moved_only: there is no batch; only the position is another.
    """

    after: Position
    batch: Batch = None
    ends: bool = False
    spare: Batch | None = None
    unreadable: list[tuple[int, str]] = field(default_factory=list)
    state: Plain = None
    alone: bool = False
    agreement: Agreement = field(default_factory=Agreement)
    moved_only: bool = False


class Feed(Protocol):
    """Where handouts come from."""

    @property
    def global_batch_size(self) -> int | Schedule:
        """Samples of a full batch, over all ranks."""
        ...

    @property
    def in_turns(self) -> bool:
        """Whether the dataset can be at one place only: a second reader of it moves the first one."""
        ...

    def skippable(self) -> bool:
        """Whether samples of the global batch can be left out."""
        ...

    def grid(self) -> Grid | None:
        """Batches of an epoch; None where only its end tells how many there are."""
        ...

    def identity(self, at: Position) -> dict[str, int]:
        """What the position ``at`` is only meaningful with."""
        ...

    def resume(self, identity: Mapping[str, int], at: Position) -> None:
        """Go on from ``at``, which was saved with ``identity``; CheckpointMismatchError where that means other samples."""
        ...

    def handouts(self, begin: Position, goal: Duration, *, state: Plain = None, once: bool = False) -> Iterator[Handout]:
        """From ``begin`` to ``goal``; ``once`` is an evaluation: each sample exactly once."""
        ...


@dataclass(slots=True, kw_only=True)
class MapFeed:
    """Handouts of a dataset that is indexed: which samples they hold is known before any is read."""

    reader: Reader
    order: Order
    global_batch_size: int | Schedule
    tail: Tail
    rank: int
    ranks: int
    workers: Workers
    batch_spec: BatchSpec | None = None

    @property
    def in_turns(self) -> bool:
        """Never: it is indexed."""
        return False

    def skippable(self) -> bool:
        """Always."""
        return True

    def grid(self) -> Grid:
        """Global batches over the epoch."""
        return self._grid(self.tail)

    def identity(self, at: Position) -> dict[str, int]:
        """Of the order."""
        return self.order.state(at.epoch, at.samples)

    def resume(self, identity: Mapping[str, int], at: Position) -> None:
        """Mutates: the order, where a mixture goes on with other weights."""
        self.order = self.order.resumed(identity, at.epoch, at.samples)

    def _grid(self, tail: Tail) -> Grid:
        return Grid(size=self.order.size, global_batch_size=self.global_batch_size, tail=tail)

    def handouts(self, begin: Position, goal: Duration, *, state: Plain = None, once: bool = False) -> Iterator[Handout]:
        """See ``Feed``."""
        grid, shapes = self._grid("short") if once else self.grid(), Shapes(self.batch_spec)
        planned: deque[tuple[Position, bool]] = deque()
        tickets = _Tickets(self._announced(self._tickets(grid, begin, goal, planned)))
        for parcel in parcels(self.reader, tickets, self.workers):
            content = opened(parcel)
            at, has_share = planned.popleft()
            batch, spare = shapes.fitted(content, has_share=has_share)
            yield Handout(batch=batch, spare=spare, after=at, ends=at.samples == 0, unreadable=content.unreadable)
        if tickets.failures:
            raise tickets.failures[0]

    def _tickets(self, grid: Grid, begin: Position, goal: Duration, planned: deque[tuple[Position, bool]]) -> Iterator[Ticket]:
        """A ticket per batch; where the loader is after it, and whether this rank has a sample in it, go to ``planned``."""
        at, order = begin, Prepared(self.order)
        while not reached(goal, at):
            start, stop = grid.bounds(at)
            # A rank without a sample reads one all the same: an empty batch needs the shapes of a real one. Twice, since
            # BatchNorm cannot run on a single value.
            share = self._share(start, stop)
            mine = share or range(start, start + 1)
            indices = batch_indices(order, at.epoch, mine.start, mine.stop)
            ticket = Ticket(at.epoch, mine.start, indices if mine.step == 1 else indices[:: mine.step], 1 if share else 2)
            at = grid.after(at)
            planned.append((at, bool(share)))
            yield ticket

    def _share(self, start: int, stop: int) -> range:
        """This rank's part of a global batch; empty where it has none."""
        return rank_positions(start, stop, self.rank, self.ranks, self.order.lanes)

    def _announced(self, tickets: Iterator[Ticket]) -> Iterator[Ticket]:
        """``tickets``, while a dataset that fetches from far away is told of later ones."""
        prefetch = getattr(self.reader.dataset, "prefetch", None)
        if prefetch is None:
            yield from tickets
            return
        told: deque[Ticket] = deque()
        for ticket in tickets:
            try:
                prefetch(ticket.indices)
            except DtrainError:
                raise
            except Exception as error:
                raise DataError(f"loader: prefetch of {type(self.reader.dataset).__name__}: {described(error)}") from error
            told.append(ticket)
            if len(told) > _READ_AHEAD:
                yield told.popleft()
        yield from told


@dataclass(frozen=True, slots=True)
class _Tickets:
    """What torch's ``DataLoader`` takes for a sampler. It ends where there is a failure, which is kept.

    torch would leave half of a loader behind, with its workers, when it is told of one while it starts.
    """

    tickets: Iterator[Ticket]
    failures: list[Exception] = field(default_factory=list)

    def __iter__(self) -> Iterator[Ticket]:
        try:
            yield from self.tickets
        except Exception as error:  # noqa: BLE001  # the dataset's prefetch and order may be the user's
            self.failures.append(error)


def opened(parcel: Parcel) -> Content:
    """What a worker sent.

    Raises:
        DataError: the reason why there is no batch.
    """
    content = parcel.open()
    if content.failure is None:
        return content
    error = DataError(f"loader: {content.failure}")
    if content.trace:
        error.add_note(content.trace.rstrip())
    raise error


class Shapes:
    """Remembers what this rank's batches look like, for one that is to be empty."""

    __slots__ = ("_last", "_spec")

    def __init__(self, spec: BatchSpec | None) -> None:
        self._spec = spec
        self._last: Batch | None = None

    def fitted(self, content: Content, *, has_share: bool) -> tuple[Batch, Batch | None]:
        """The batch to hand out, and a spare sample where that is empty.

        Raises:
            DataError: no sample could be read so far, so not even the shapes are known.
        """
        if content.batch is not None:
            self._last = content.batch
            return (content.batch, None) if has_share else (self.empty(), content.batch)
        if self._last is None:
            first = "".join(f": sample {index}: {error}" for index, error in content.unreadable[:1])
            raise DataError(f"loader: none of the {len(content.unreadable)} samples of the first batch could be read{first}")
        return self.empty(), self._last

    def empty(self) -> Batch:
        """A batch of no samples."""
        return narrow_batch(self._last, 0, 0, self._spec)

    @property
    def spare(self) -> Batch | None:
        """The last batch, if there was one."""
        return self._last
