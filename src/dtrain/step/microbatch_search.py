"""The search for the largest microbatch that fits, as a pure function of the tries so far: every rank proposes the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

_BACKOFF = 0.75  # of the way to a size that failed by a little
_FULL_BATCH_MARGIN = 1.25  # the whole batch is worth a try if so much less of it would fit
_TOLERANCE = 0.05  # relative: a size that much below the largest is not worth another try


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on one rank in one try.

    Args:
        before: held before it.
        forward_bytes: what the first forward left for its backward: activations, and parameters that it gathered.
        peak: the most that was held.
        capacity: what the rank may hold.
    """

    before: int
    peak: int
    capacity: int
    forward_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """A try of one size on all ranks.

    Args:
        size: samples in a microbatch.
        fits: no rank ran out of memory.
        rank_memory: by rank; empty where nothing is known of a device.
        seconds: how long it took on this rank.
    """

    size: int
    fits: bool
    rank_memory: tuple[RankMemory, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeBounds:
    """What a size may be: at least ``minimum``, at most ``largest_batch`` (samples of the fullest rank), a multiple of ``divisor``.

    ``headroom`` is the share of a device's memory that is to stay free; ``measurable``: every rank can tell how much it holds;
    ``accumulation_bytes``: bytes that a step of one microbatch does not need, since it adds up no gradients.
    """

    minimum: int
    largest_batch: int
    divisor: int
    headroom: float
    measurable: bool
    accumulation_bytes: int = 0

    def round_down(self, size: float) -> int:
        """The largest size allowed that is not above ``size``, or the smallest there is. The whole batch needs no divisor."""
        if size >= self.largest_batch:
            return self.largest_batch
        return max(self.minimum, math.floor(size / self.divisor) * self.divisor)

    @property
    def max_probes(self) -> int:
        """How many tries a search may take."""
        return int(math.log2(self.largest_batch)) + 2


def next_size(probes: Sequence[ProbeResult], bounds: SizeBounds) -> int | None:
    """The next size to try; None when the search is over: the answer is the largest that fitted.

    The smallest size shows how much a sample takes at most. A second one makes a line of memory over size, and the size where
    it meets the least room of any rank is tried. Where that fails, or nothing is known of the memory, the gap between the
    largest that worked and the smallest that did not is narrowed. At last the whole batch at once, if it may need less than its
    parts.
    """
    if any(t.fits and t.size >= bounds.largest_batch for t in probes):
        return None
    found = _next_partial_size(probes, bounds)
    if found is None and len(probes) < bounds.max_probes and _full_batch_may_fit(probes, bounds):
        return bounds.largest_batch
    return found


def split_by_fit(probes: Sequence[ProbeResult]) -> tuple[list[ProbeResult], int | None]:
    """The tries that worked, the smallest first, and the smallest size that failed: what is not below that no longer counts."""
    failed = min((t.size for t in probes if not t.fits), default=None)
    return sorted((t for t in probes if t.fits and (failed is None or t.size < failed)), key=lambda t: t.size), failed


def _next_partial_size(probes: Sequence[ProbeResult], bounds: SizeBounds) -> int | None:
    worked, failed = split_by_fit(probes)
    best = worked[-1].size if worked else 0
    if failed is not None and failed <= bounds.minimum:
        return None
    if len(probes) >= bounds.max_probes:
        return None if worked else bounds.minimum
    if not worked:
        return _next_size_before_first_fit(failed, bounds)
    measured = [t for t in worked if t.rank_memory]
    enough = best + int(best * (_TOLERANCE if len(measured) != 2 else _TOLERANCE / 4))  # two may not be on one line yet
    if measured:
        guess = bounds.round_down(
            min(_predict_max_size(measured, rank, bounds.headroom) for rank in range(len(measured[-1].rank_memory)))
        )
        if len(measured) == 1:
            guess = max(guess, bounds.round_down(2 * best))  # one size says too little about what more would take
        if guess <= enough:
            return None
        if failed is None or guess < failed:
            return guess
        nearer = bounds.round_down(best + (failed - best) * _BACKOFF)  # the line was a little too hopeful
        return nearer if enough < nearer < failed else None
    if failed is None:
        return bounds.round_down(2 * best)
    middle = bounds.round_down((best + failed) / 2)
    return None if middle <= enough else middle


def _full_batch_may_fit(probes: Sequence[ProbeResult], bounds: SizeBounds) -> bool:
    """Whether the whole batch was not tried yet, and would fit by the line less what it spares."""
    measured = sorted((t for t in probes if t.fits and t.rank_memory), key=lambda t: t.size)
    if not measured or any(t.size >= bounds.largest_batch for t in probes):
        return False
    saved = [
        replace(t, rank_memory=tuple(replace(memory, peak=memory.peak - bounds.accumulation_bytes) for memory in t.rank_memory))
        for t in measured
    ]
    near = bounds.largest_batch / _FULL_BATCH_MARGIN
    return all(_predict_max_size(saved, rank, bounds.headroom) >= near for rank in range(len(measured[-1].rank_memory)))


def _next_size_before_first_fit(failed: int | None, bounds: SizeBounds) -> int:
    """Nothing has worked yet. Where memory can be measured it begins small, else with everything."""
    if bounds.measurable:
        return bounds.minimum
    return bounds.largest_batch if failed is None else bounds.round_down(failed / 2)


def _predict_max_size(measured: Sequence[ProbeResult], rank: int, headroom: float) -> float:
    """How large a microbatch the line through the two largest sizes allows on ``rank``.

    Peaks of small sizes may be of something else than samples (a reduction, say), and then do not grow. What a forward keeps
    does, so the line is at least as steep as that.
    """
    last = measured[-1]
    memory = last.rank_memory[rank]
    room = memory.capacity * (1 - headroom)
    if len(measured) > 1:
        other = measured[-2]
        grown = max(memory.peak - other.rank_memory[rank].peak, memory.forward_bytes - other.rank_memory[rank].forward_bytes)
        slope = grown / (last.size - other.size)
    else:
        slope = (
            memory.forward_bytes or memory.peak - memory.before
        ) / last.size  # as if samples took it all: rather too careful
    if slope <= 0:
        return math.inf if memory.peak <= room else last.size
    return last.size + (room - memory.peak) / slope
