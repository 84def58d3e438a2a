"""The batch that a loader handed out last, and whether its step is complete; the samples that were left out."""

from __future__ import annotations

from dataclasses import dataclass, field

from dtrain.data.loading.position import Position
from dtrain.dist.origin import UNPLACED, Agreement
from dtrain.types import Plain

_LISTED = 1000


@dataclass(slots=True, kw_only=True)
class Unreadable:
    """Samples that ``on_error="skip"`` left out on this rank: how many, and the first thousand with the reason.

    A sample is named by its index in the dataset, or by its place in the epoch where the dataset is iterable.
    """

    count: int = 0
    samples: list[tuple[int, str]]

    def add(self, more: list[tuple[int, str]]) -> None:
        """Mutates: this list."""
        self.count += len(more)
        self.samples += more[: _LISTED - len(self.samples)]

    def take_back(self, added: list[tuple[int, str]]) -> None:
        """Remove what ``add`` was given, since the same samples will be read again. Mutates: this list."""
        self.count -= len(added)
        self.samples = [sample for sample in self.samples if not any(sample is one for one in added)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOut:
    """The batch that a loader handed out last.

    Args:
        agreement: the answers of the step on the batch; the same object if the batch is handed out again.
        before: position before the batch.
        dataset: state of an iterable dataset there.
        after: position once the batch is consumed.
        unreadable: samples of the batch that were left out.
        expected: if True, a step was made on the batch before it, so a step is to be expected on this batch.
        unplaced: steps over batches without a place when it was handed out. A later one may be over a slice of this batch.
    """

    agreement: Agreement
    before: Position
    dataset: Plain
    after: Position
    unreadable: list[tuple[int, str]]
    expected: bool
    unplaced: int = field(default_factory=lambda: UNPLACED.steps)

    @property
    def is_stepped(self) -> bool:
        """True if a step on the batch, or perhaps on a slice of it, is complete."""
        return self.agreement.consumed or self.unplaced != UNPLACED.steps

    @property
    def is_pending(self) -> bool:
        """True if a step on the batch was begun or is to be expected, and is not complete."""
        expected = self.expected and self.unplaced == UNPLACED.steps
        return not self.agreement.consumed and (self.agreement.begun or expected)
