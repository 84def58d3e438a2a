"""``HandedOut``: the batch that a loader handed out last, and whether a step on it is still to come."""

from __future__ import annotations

from dataclasses import dataclass

from dtrain.data.loading.position import Position
from dtrain.dist.origin import UNPLACED, Agreement
from dtrain.types import Plain


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOut:
    """The batch that a loader handed out last.

    Args:
        agreement: the answers of the step on the batch.
        before: position before the batch, and the state of an iterable dataset there.
        after: position once the batch is consumed.
        stepped: if True, a step consumed the batch before it, so a step is to be expected on this batch.
        unplaced: steps over batches without a place when it was handed out. A later one may be over a slice of this batch.
    """

    agreement: Agreement
    before: tuple[Position, Plain]
    after: Position
    stepped: bool
    unplaced: int

    @property
    def is_pending(self) -> bool:
        """True if a step on the batch was begun or is to be expected, and is not complete."""
        expected = self.stepped and self.unplaced == UNPLACED.steps
        return not self.agreement.consumed and (self.agreement.over is not None or expected)
