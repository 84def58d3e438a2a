"""Describe a batch's place in its loader's data (``BatchInfo``) and the loaders that a training state has used."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from dtrain.schedules.clock import Clock, EpochPosition
from dtrain.typing import Batch


@dataclass(slots=True, eq=False)
class BatchStatus:
    """Progress of the step on one batch. The step writes the status, the batch's loader reads it.

    Args:
        epoch_ended: True if the epoch ended with the batch for all ranks, None before a step on the batch.
        started: True once a step on the batch has begun.
        consumed: True once a step on the batch is complete.
        unread: True if some rank could not read the batch, so that no rank has made a step on it.
    """

    epoch_ended: bool | None = None
    started: bool = False
    consumed: bool = False
    unread: bool = False


# Not frozen, because a frozen record takes twice as long to make, and each batch makes a record.
@dataclass(slots=True, kw_only=True, eq=False)
class BatchInfo:
    """Facts about one batch that its loader knows. They travel with the batch; see ``dtrain.data.batch.attach_batch_info``.

    Args:
        loader: identity of the loader.
        begin: position in the loader's data before the batch.
        end: position in the loader's data after the batch.
        independent_epochs: if True, ranks end their epochs separately. The epoch is over when all ranks have ended it.
        position_hash: number below 2**48; equal on all ranks if they are at the same position in the same data. The bits from
            ``DATA_HASH_SHIFT`` on hash the data alone.
        padding_sample: real sample for a rank that has no sample in this batch.
        status: progress of the step on the batch, written by the step. The status also identifies the batch.
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
        """Encode position and end of the epoch as one number, not 0, that float64 holds exactly.

        The position is ``end`` if ``independent_epochs``, else ``position_hash``.
        """
        position = (
            self.end.epoch << BATCH_INDEX_BITS | (self.end.batch or 0) if self.independent_epochs else self.position_hash or 1
        )
        return position * 4 + 2 * self.independent_epochs + self.ends_epoch

    def __deepcopy__(self, memo: object) -> BatchInfo:
        """Return the same object: a copy of a batch is the same batch of the loader."""
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Reduce to an empty mapping, so that a batch sent to another process or saved loads without dtrain."""
        return OrderedDict, ()


# The remaining 20 bits of the position hold the epoch.
BATCH_INDEX_BITS = 28
DATA_HASH_SHIFT = 24


class TrackedLoader(Protocol):
    """Interface of the loaders whose epochs a ``Clock`` can count."""

    _last_batch_info: BatchInfo | None
    """Info of the last batch that the loader returned, None before the first batch."""

    @property
    def _identity(self) -> object:
        """Identity of this loader, as in ``BatchInfo.loader``."""
        ...

    def _join_run(self) -> None:
        """Expect a step on each batch from now on."""
        ...


class StepBatch(NamedTuple):
    """Batch of the step in progress. A tuple, because each step makes one.

    Args:
        info: facts about the batch, None if no loader returned the batch.
        repeated: if True, the last step was on the same batch.
        clock_before: clock before the step.
        statuses: statuses of all loader batches that the batch is made of.
    """

    info: BatchInfo | None
    repeated: bool
    clock_before: Clock
    statuses: tuple[BatchStatus, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderHistory:
    """Loaders that returned the batches of a state.

    Args:
        loaders: identities of the loaders, in the order of their first batches.
        epoch_offset: epochs completed before the current loader's first epoch.
        last_batch: identity of the batch of the last step.
        in_use: identities of the newest loader, and of others that returned a batch after its first batch.
        guessed: identity of the loader that issued a batch before the last step on new tensors, perhaps a copy of the batch.
    """

    loaders: tuple[object, ...] = ()
    epoch_offset: int = 0
    last_batch: object | None = None
    in_use: tuple[object, ...] = ()
    guessed: object | None = None

    def after_batch(self, status: BatchStatus) -> LoaderHistory:
        """Return the history after a step on a new batch of the current loader. Faster than ``dataclasses.replace``."""
        return LoaderHistory(
            loaders=self.loaders,
            epoch_offset=self.epoch_offset,
            last_batch=status,
            in_use=self.in_use,
            guessed=self.guessed,
        )

    def after_untracked_step(self, loader: object | None) -> LoaderHistory:
        """Return the history after a step on new tensors, before which ``loader`` issued a batch."""
        return self if loader is None or loader is self.guessed else replace(self, guessed=loader)

    def after_return_to(self, loader: object) -> LoaderHistory:
        """Return the history after a batch of an earlier loader, which takes turns with the newest loader."""
        if any(loader is used for used in self.in_use):
            return self
        return replace(self, in_use=(*self.in_use, loader))
