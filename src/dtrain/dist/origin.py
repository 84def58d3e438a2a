"""``Origin``: the facts about a batch that its loader knows and a step needs, and the loaders that a state follows."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from dtrain.clock import Clock, Place
from dtrain.types import Batch


@dataclass(slots=True, eq=False)
class Agreement:
    """The answers of a step about its batch, for the batch's loader.

    Args:
        over: True if the epoch ended with the batch for all ranks, None before a step on the batch.
        begun: True once a step on the batch has begun.
        consumed: True once a step on the batch is complete.
    """

    over: bool | None = None
    begun: bool = False
    consumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Origin:
    """The facts about one batch that its loader knows. They travel with the batch; see ``dtrain.batch.mark_batch``.

    Args:
        loader: identifies the loader.
        begin: place in the loader's data before the batch.
        end: place once the batch is consumed.
        alone: if True, ranks end their epochs separately; the epoch is over when all ranks have ended it.
        stamp: a number below 2**48 that is equal on all ranks if they are at the same place in the same data.
        spare: a real sample for a rank that has no sample in this batch.
        agreement: written by the step, read by the loader. It also identifies the batch.
    """

    loader: object
    begin: Place
    end: Place
    alone: bool = False
    stamp: int = 0
    spare: Batch | None = None
    agreement: Agreement = field(default_factory=Agreement)

    @property
    def ends_epoch(self) -> bool:
        """True if the batch is the last of this rank's epoch."""
        return self.end.epoch > self.begin.epoch

    def code(self) -> int:
        """Stamp and end of the epoch as one number, not 0, that float64 holds exactly; the place after if ``alone``."""
        stamp = self.end.epoch << BATCH_BITS | (self.end.batch or 0) if self.alone else self.stamp or 1
        return stamp * 4 + 2 * self.alone + self.ends_epoch

    def __deepcopy__(self, memo: object) -> Origin:
        """The same origin: a copy of a batch is still this batch."""
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """An empty mapping: a batch that is saved or sent to another process has no origin, and loads without dtrain."""
        return OrderedDict, ()


@dataclass(slots=True)
class _Unplaced:
    """The steps of this process over batches that know no loader."""

    steps: int = 0


UNPLACED = _Unplaced()
BATCH_BITS = 28  # for the batches of an epoch; 20 bits of a stamp remain for epochs


class HandsOut(Protocol):
    """A loader, as far as a state knows it."""

    handed_out: Origin | None
    """The origin of the batch that it handed out last, None before the first."""

    @property
    def identity(self) -> object:
        """The mark of this loader in the origins of its batches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The batch of the step in progress.

    Args:
        origin: place of the batch in its loader's data, None if it is not a loader's.
        again: if True, the last step was on the same batch.
        clock: the clock before the step.
        agreements: of all batches of loaders that the batch is made of.
    """

    origin: Origin | None
    again: bool
    clock: Clock
    agreements: tuple[Agreement, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """The loaders that the batches of a state came from.

    Args:
        loaders: their marks, in the order of their first batches.
        base: epochs that were done before the current loader's first one.
        batch: identifies the batch of the last step.
    """

    loaders: tuple[object, ...] = ()
    base: int = 0
    batch: object | None = None
