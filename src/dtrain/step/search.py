"""The search for the largest microbatch that fits, as a pure function of the tries so far: every rank proposes the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

_NEARER = 0.75  # of the way to a size that failed by a little
_HOPEFUL = 1.25  # the whole batch is worth a try if so much less of it would fit
_GOOD_ENOUGH = 0.05  # relative: a size that much below the largest is not worth another try


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one rank in one try.

    Args:
        before: held before it.
        kept: what the first forward left for its backward: activations, and parameters that it gathered.
        peak: the most that was held.
        capacity: what the rank may hold.
    """

    before: int
    peak: int
    capacity: int
    kept: int = 0


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

    ``headroom`` is the share of a device's memory that is to stay free; ``measurable``: every rank can tell how much it holds;
    ``spared``: bytes that a step of one microbatch does not need, since it adds up no gradients.
    """

    minimum: int
    largest: int
    divisor: int
    headroom: float
    measurable: bool
    spared: int = 0

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

    The smallest size shows how much a sample takes at most. A second one makes a line of memory over size, and the size where
    it meets the least room of any rank is tried. Where that fails, or nothing is known of the memory, the gap between the
    largest that worked and the smallest that did not is narrowed. At last the whole batch at once, if it may need less than its
    parts.
    """
    if any(t.fits and t.size >= bounds.largest for t in tries):
        return None
    found = _propose(tries, bounds)
    if found is None and len(tries) < bounds.most_tries and _whole_may_fit(tries, bounds):
        return bounds.largest
    return found


def sorted_out(tries: Sequence[Try]) -> tuple[list[Try], int | None]:
    """The tries that worked, the smallest first, and the smallest size that failed: what is not below that no longer counts."""
    failed = min((t.size for t in tries if not t.fits), default=None)
    return sorted((t for t in tries if t.fits and (failed is None or t.size < failed)), key=lambda t: t.size), failed


def _propose(tries: Sequence[Try], bounds: Bounds) -> int | None:
    worked, failed = sorted_out(tries)
    best = worked[-1].size if worked else 0
    if failed is not None and failed <= bounds.minimum:
        return None
    if len(tries) >= bounds.most_tries:
        return None if worked else bounds.minimum
    if not worked:
        return _without_success(failed, bounds)
    measured = [t for t in worked if t.ranks]
    enough = best + int(best * (_GOOD_ENOUGH if len(measured) != 2 else _GOOD_ENOUGH / 4))  # two may not be on one line yet
    if measured:
        guess = bounds.down(min(_fits(measured, rank, bounds.headroom) for rank in range(len(measured[-1].ranks))))
        if len(measured) == 1:
            guess = max(guess, bounds.down(2 * best))  # one size says too little about what more would take
        if guess <= enough:
            return None
        if failed is None or guess < failed:
            return guess
        nearer = bounds.down(best + (failed - best) * _NEARER)  # the line was a little too hopeful
        return nearer if enough < nearer < failed else None
    if failed is None:
        return bounds.down(2 * best)
    middle = bounds.down((best + failed) / 2)
    return None if middle <= enough else middle


def _whole_may_fit(tries: Sequence[Try], bounds: Bounds) -> bool:
    """Whether the whole batch was not tried yet, and would fit by the line less what it spares."""
    measured = sorted((t for t in tries if t.fits and t.ranks), key=lambda t: t.size)
    if not measured or any(t.size >= bounds.largest for t in tries):
        return False
    saved = [replace(t, ranks=tuple(replace(memory, peak=memory.peak - bounds.spared) for memory in t.ranks)) for t in measured]
    near = bounds.largest / _HOPEFUL
    return all(_fits(saved, rank, bounds.headroom) >= near for rank in range(len(measured[-1].ranks)))


def _without_success(failed: int | None, bounds: Bounds) -> int:
    """Nothing has worked yet. Where memory can be measured it begins small, else with everything."""
    if bounds.measurable:
        return bounds.minimum
    return bounds.largest if failed is None else bounds.down(failed / 2)


def _fits(measured: Sequence[Try], rank: int, headroom: float) -> float:
    """How large a microbatch the line through the two largest sizes allows on ``rank``.

    Peaks of small sizes may be of something else than samples (a reduction, say), and then do not grow. What a forward keeps
    does, so the line is at least as steep as that.
    """
    last = measured[-1]
    memory = last.ranks[rank]
    room = memory.capacity * (1 - headroom)
    if len(measured) > 1:
        other = measured[-2]
        grown = max(memory.peak - other.ranks[rank].peak, memory.kept - other.ranks[rank].kept)
        slope = grown / (last.size - other.size)
    else:
        slope = (memory.kept or memory.peak - memory.before) / last.size  # as if samples took it all: rather too careful
    if slope <= 0:
        return math.inf if memory.peak <= room else last.size
    return last.size + (room - memory.peak) / slope
