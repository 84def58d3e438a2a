"""Choose the next microbatch size to probe, as a pure function of the earlier probes: every rank computes the same size."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

# Next size = best + _BACKOFF * (failed - best), after a predicted size failed.
_BACKOFF = 0.75
# The whole batch is probed if the prediction allows at least 1 / _FULL_BATCH_MARGIN of it.
_FULL_BATCH_MARGIN = 1.25
# Relative: a size that is larger by less than this is not worth a further probe.
_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of one rank in one probe, in bytes.

    Args:
        before: bytes in use before the probe.
        forward_bytes: bytes that the first forward keeps for backward: activations and gathered parameters.
        peak: most bytes in use at once.
        capacity: bytes that the rank may use.
    """

    before: int
    peak: int
    capacity: int
    forward_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Outcome of one probe on all ranks.

    Args:
        size: samples or tokens per microbatch.
        fits: if True, no rank ran out of memory.
        rank_memory: memory by rank; empty if the device's memory cannot be measured.
        seconds: duration of the probe on this rank.
    """

    size: int
    fits: bool
    rank_memory: tuple[RankMemory, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeBounds:
    """Limits of a microbatch size.

    Args:
        min_size: smallest size.
        largest_batch: largest size: samples of the rank with the most samples, or tokens of the largest microbatch.
        divisor: divisor of every size except ``largest_batch``.
        headroom: share of a device's memory that stays free.
        measurable: if True, every rank can measure its memory.
        accumulation_bytes: bytes that a step of one microbatch saves by accumulating no gradients.
        sizes: all possible sizes, ascending, without regard to ``divisor``; empty if every size is possible.
    """

    min_size: int
    largest_batch: int
    divisor: int
    headroom: float
    measurable: bool
    accumulation_bytes: int = 0
    sizes: tuple[int, ...] = ()

    def round_down(self, size: float) -> int:
        """Return the largest allowed size up to ``size``, or the minimum. The whole batch needs no divisor."""
        if size >= self.largest_batch:
            return self.largest_batch
        if self.sizes:
            return max(self.min_size, self.sizes[max(bisect_right(self.sizes, size) - 1, 0)])
        return max(self.min_size, math.floor(size / self.divisor) * self.divisor)

    @property
    def max_probes(self) -> int:
        """Largest number of probes in one search."""
        return int(math.log2(self.largest_batch)) + 2


def next_size(probes: Sequence[ProbeResult], bounds: SizeBounds) -> int | None:
    """Return the next size to probe; None if the search is over, with the largest size that fits as its result.

    The minimum shows the memory per sample. A second size gives a line of memory over size; the search probes the size at
    which the line reaches the smallest free memory of any rank. If that size fails, or memory cannot be measured, the search
    narrows the interval between the largest size that fits and the smallest that fails. At the end the search probes the whole
    batch, because a single microbatch needs no accumulated gradients.
    """
    if any(t.fits and t.size >= bounds.largest_batch for t in probes):
        return None
    size = _next_partial_size(probes, bounds)
    if size is None and len(probes) < bounds.max_probes and _full_batch_may_fit(probes, bounds):
        return bounds.largest_batch
    return size


def split_by_fit(probes: Sequence[ProbeResult]) -> tuple[list[ProbeResult], int | None]:
    """Return the probes that fit, smallest first, and the smallest size that fails; probes above that size are ignored."""
    failed = min((t.size for t in probes if not t.fits), default=None)
    return sorted((t for t in probes if t.fits and (failed is None or t.size < failed)), key=lambda t: t.size), failed


def _next_partial_size(probes: Sequence[ProbeResult], bounds: SizeBounds) -> int | None:
    fitting, failed = split_by_fit(probes)
    best = fitting[-1].size if fitting else 0
    if failed is not None and failed <= bounds.min_size:
        return None
    if len(probes) >= bounds.max_probes:
        return None if fitting else bounds.min_size
    if not fitting:
        # The minimum if memory can be measured, else the whole batch and its halves.
        first = bounds.largest_batch if failed is None else bounds.round_down(failed / 2)
        return bounds.min_size if bounds.measurable else first
    measured = [t for t in fitting if t.rank_memory]
    # Two measured sizes may not be on one line yet, so a smaller improvement justifies a third probe.
    enough = best + int(best * (_TOLERANCE if len(measured) != 2 else _TOLERANCE / 4))
    if measured:
        ranks = range(len(measured[-1].rank_memory))
        guess = bounds.round_down(min(_predict_max_size(measured, rank, bounds.headroom) for rank in ranks))
        # A single size predicts too little, so the second probe is at least twice as large.
        if len(measured) == 1:
            guess = max(guess, bounds.round_down(2 * best))
        if guess <= enough:
            return None
        if failed is None or guess < failed:
            return guess
        # The prediction was slightly too large.
        backoff = bounds.round_down(best + (failed - best) * _BACKOFF)
        return backoff if enough < backoff < failed else None
    if failed is None:
        return bounds.round_down(2 * best)
    middle = bounds.round_down((best + failed) / 2)
    return None if middle <= enough else middle


def _full_batch_may_fit(probes: Sequence[ProbeResult], bounds: SizeBounds) -> bool:
    """Return True if the whole batch was not probed yet and is predicted to fit without accumulated gradients."""
    measured = sorted((t for t in probes if t.fits and t.rank_memory), key=lambda t: t.size)
    if not measured or any(t.size >= bounds.largest_batch for t in probes):
        return False
    saved = [
        replace(t, rank_memory=tuple(replace(memory, peak=memory.peak - bounds.accumulation_bytes) for memory in t.rank_memory))
        for t in measured
    ]
    near = bounds.largest_batch / _FULL_BATCH_MARGIN
    return all(_predict_max_size(saved, rank, bounds.headroom) >= near for rank in range(len(measured[-1].rank_memory)))


def _predict_max_size(measured: Sequence[ProbeResult], rank: int, headroom: float) -> float:
    """Return the size at which the line through the two largest sizes reaches the free memory of ``rank``.

    The peaks of small sizes may come from work without samples (such as a reduction) and then do not grow with the size. The
    memory kept by a forward grows, so the line is at least as steep as this memory.
    """
    last = measured[-1]
    memory = last.rank_memory[rank]
    room = memory.capacity * (1 - headroom)
    if len(measured) > 1:
        other = measured[-2]
        grown = max(memory.peak - other.rank_memory[rank].peak, memory.forward_bytes - other.rank_memory[rank].forward_bytes)
        slope = grown / (last.size - other.size)
    else:
        # One measurement: assume that samples use all of the added memory, which predicts a size that is too small.
        slope = (memory.forward_bytes or memory.peak - memory.before) / last.size
    if slope <= 0:
        return math.inf if memory.peak <= room else last.size
    return last.size + (room - memory.peak) / slope
