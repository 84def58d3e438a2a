"""``Prepared``: an order with a stretch of it worked out ahead, since one call for many positions costs what few cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from dtrain.data.order.base import Order

_FIRST, _MOST = 1 << 10, 1 << 16  # positions; the first stretch is short, so that a resume has its first batch at once
_NEAR = 1 << 13  # a call costs as much as this many positions; a rank that leaves out more than that does not go on, it jumps


@dataclass(frozen=True, slots=True, eq=False)
class _Stretch:
    epoch: int
    start: int
    indices: Tensor

    @property
    def stop(self) -> int:
        return self.start + len(self.indices)


@dataclass(slots=True)
class Prepared:
    """``indices`` of ``order``, and nothing else of it, at a small cost per call when positions are asked for in turn.

    Each stretch is twice as long as the one before it, up to 65,536 positions (512 KiB); a jump starts over with a short one. A
    rank leaves out what is the others' of each batch, which is no jump as long as it is little.
    What is kept is replaced as one value, so threads and forked processes may share it: at worst they work out the same again.
    """

    order: Order
    _kept: _Stretch | None = field(init=False, repr=False, default=None)

    @property
    def size(self) -> int:
        """Samples in one epoch."""
        return self.order.size

    def indices(self, epoch: int, start: int, stop: int) -> Tensor:
        """Dataset indices at positions ``start`` to ``stop`` of ``epoch``: ``[stop - start]`` int64, not to be written into."""
        kept = self._kept
        if kept is None or epoch != kept.epoch or not kept.start <= start <= stop <= kept.stop:
            end = min(start + self._length(kept, epoch, start, stop), self.order.size)
            kept = self._kept = _Stretch(epoch, start, self.order.indices(epoch, start, max(end, stop)))
        return kept.indices[start - kept.start : stop - kept.start]

    def _length(self, kept: _Stretch | None, epoch: int, start: int, stop: int) -> int:
        if kept is None or epoch != kept.epoch or not kept.start <= start <= kept.stop + _NEAR:
            return _FIRST
        return min(2 * max(len(kept.indices), stop - start), _MOST)
