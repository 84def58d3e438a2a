"""The search for the largest microbatch that fits, as a pure function of the tries so far: every rank proposes the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_GOOD_ENOUGH = 0.05  # relative: a size that much below the largest is not worth another try


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one rank in one try: held before it, at its peak, and what the rank may hold."""

    before: int
    peak: int
    capacity: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """A try of one size on all ranks.

    Args:
        size: samples in a microbatch.
        fits: no rank ran out of memory.
        ranks: by rank; empty where nothing is known of a device.
        seconds: how long it took on this rank.
    """

    size: int
    fits: bool
    ranks: tuple[Memory, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a size may be: at least ``minimum``, at most ``largest`` (samples of the fullest rank), a multiple of ``divisor``.

    ``headroom`` is the share of a device's memory that is to stay free; ``measurable``: every rank can tell how much it holds.
    """

    minimum: int
    largest: int
    divisor: int
    headroom: float
    measurable: bool

    def down(self, size: float) -> int:
        """The largest size allowed that is not above ``size``, or the smallest there is. The whole batch needs no divisor."""
        if size >= self.largest:
            return self.largest
        return max(self.minimum, math.floor(size / self.divisor) * self.divisor)

    @property
    def most_tries(self) -> int:
        """How many tries a search may take."""
        return int(math.log2(self.largest)) + 2


def propose(tries: Sequence[Try], bounds: Bounds) -> int | None:
    """The next size to try; None when the search is over: the answer is the largest that fitted.

    First the smallest size shows what a sample costs at most. Then two sizes make a line of memory over size, and the size
    where it meets the least room of any rank is tried. Where that fails, or nothing is known of the memory, the gap between the
    largest that worked and the smallest that did not is halved.
    """
    failed = min((t.size for t in tries if not t.fits), default=None)
    worked = sorted((t for t in tries if t.fits and (failed is None or t.size < failed)), key=lambda t: t.size)
    best = worked[-1].size if worked else 0
    if best >= bounds.largest or (failed is not None and failed <= bounds.minimum):
        return None
    if len(tries) >= bounds.most_tries:
        return None if worked else bounds.minimum
    measured = [t for t in worked if t.ranks]
    if not worked:
        return _without_success(failed, bounds)
    ceiling = bounds.largest if failed is None else failed - 1
    if measured:
        guess = bounds.down(min(_fits(measured, rank, bounds.headroom) for rank in range(len(measured[-1].ranks))))
        if len(measured) == 1:
            guess = max(guess, bounds.down(min(2 * best, ceiling)))  # one size says too little about what more would take
        if guess <= best + int(best * _GOOD_ENOUGH):
            return None
        if guess <= ceiling:
            return guess
    if failed is None:
        return bounds.down(min(bounds.largest, 2 * best))
    middle = bounds.down((best + failed) / 2)
    return None if middle <= best + int(best * _GOOD_ENOUGH) else middle


def _without_success(failed: int | None, bounds: Bounds) -> int:
    """Nothing has worked yet. Where memory can be measured it begins small, else with everything."""
    if bounds.measurable:
        return bounds.minimum
    return bounds.largest if failed is None else bounds.down(failed / 2)


def _fits(measured: Sequence[Try], rank: int, headroom: float) -> float:
    """How large a microbatch the line through the two largest sizes allows on ``rank``."""
    last = measured[-1]
    memory = last.ranks[rank]
    room = memory.capacity * (1 - headroom)
    if len(measured) > 1:
        other = measured[-2]
        slope = (memory.peak - other.ranks[rank].peak) / (last.size - other.size)
    else:
        slope = (memory.peak - memory.before) / last.size  # as if nothing but samples took memory: rather too careful
    if slope <= 0:
        return math.inf if memory.peak <= room else last.size
    return last.size + (room - memory.peak) / slope
