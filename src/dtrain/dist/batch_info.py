"""``Origin``: the facts about a batch that its loader knows and a step needs, and the loaders that a state follows."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from dtrain.clock import Clock, EpochPosition
from dtrain.typing import Batch


@dataclass(slots=True, eq=False)
class BatchStatus:
    """The answers of a step about its batch, for the batch's loader.

    Args:
        epoch_ended: True if the epoch ended with the batch for all ranks, None before a step on the batch.
        started: True once a step on the batch has begun.
        consumed: True once a step on the batch is complete.
    """

    epoch_ended: bool | None = None
    started: bool = False
    consumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchInfo:
    """The facts about one batch that its loader knows. They travel with the batch; see ``dtrain.batch.attach_batch_info``.

    Args:
        loader: identifies the loader.
        begin: place in the loader's data before the batch.
        end: place once the batch is consumed.
        independent_epochs: if True, ranks end their epochs separately; the epoch is over when all ranks have ended it.
        position_hash: a number below 2**48 that is equal on all ranks if they are at the same place in the same data.
        padding_sample: a real sample for a rank that has no sample in this batch.
        status: written by the step, read by the loader. It also identifies the batch.
    """

    loader: object
    begin: EpochPosition
    end: EpochPosition
    independent_epochs: bool = False
    position_hash: int = 0
    padding_sample: Batch | None = None
    status: BatchStatus = field(default_factory=BatchStatus)

    @property
    def ends_epoch(self) -> bool:
        """True if the batch is the last of this rank's epoch."""
        return self.end.epoch > self.begin.epoch

    def encode(self) -> int:
        """Stamp and end of the epoch as one number, not 0, that float64 holds exactly; the place after if ``alone``."""
        stamp = (
            self.end.epoch << BATCH_INDEX_BITS | (self.end.batch or 0) if self.independent_epochs else self.position_hash or 1
        )
        return stamp * 4 + 2 * self.independent_epochs + self.ends_epoch

    def __deepcopy__(self, memo: object) -> BatchInfo:
        """The same origin: a copy of a batch is still this batch."""
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """An empty mapping: a batch that is saved or sent to another process has no origin, and loads without dtrain."""
        return OrderedDict, ()


@dataclass(slots=True)
class _UntrackedBatches:
    """The steps of this process over batches that know no loader."""

    steps: int = 0


UNTRACKED_BATCHES = _UntrackedBatches()
BATCH_INDEX_BITS = 28  # for the batches of an epoch; 20 bits of a stamp remain for epochs


class TrackedLoader(Protocol):
    """A loader, as far as a state knows it."""

    last_batch_info: BatchInfo | None
    """The origin of the batch that it handed out last, None before the first."""

    @property
    def identity(self) -> object:
        """The mark of this loader in the origins of its batches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The batch of the step in progress.

    Args:
        info: place of the batch in its loader's data, None if it is not a loader's.
        repeated: if True, the last step was on the same batch.
        clock_before: the clock before the step.
        statuses: of all batches of loaders that the batch is made of.
    """

    info: BatchInfo | None
    repeated: bool
    clock_before: Clock
    statuses: tuple[BatchStatus, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderHistory:
    """The loaders that the batches of a state came from.

    Args:
        loaders: their marks, in the order of their first batches.
        epoch_offset: epochs that were done before the current loader's first one.
        last_batch: identifies the batch of the last step.
    """

    loaders: tuple[object, ...] = ()
    epoch_offset: int = 0
    last_batch: object | None = None
