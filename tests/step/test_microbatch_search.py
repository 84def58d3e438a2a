"""The search for a size, against made-up devices: how many tries it takes, and how near it comes."""

from __future__ import annotations

import math
import random

import pytest

from dtrain.step.microbatch_search import ProbeResult, RankMemory, SizeBounds, next_size


def search(
    limit: list[int],
    *,
    fixed: int,
    per_sample: float,
    largest: int,
    measurable: bool = True,
    headroom: float = 0.0,
    **bounds: int,
) -> tuple[int, list[ProbeResult]]:
    """Run a search on ranks with these limits, where a microbatch of n takes ``fixed + n * per_sample``."""
    box = SizeBounds(
        min_size=bounds.get("minimum", 1),
        largest_batch=largest,
        divisor=bounds.get("divisor", 1),
        headroom=headroom,
        measurable=measurable,
    )
    tries: list[ProbeResult] = []
    while (size := next_size(tries, box)) is not None:
        assert box.min_size <= size <= largest
        assert size not in [t.size for t in tries]
        peak = int(fixed + math.ceil(size * per_sample))
        fits = all(peak <= capacity for capacity in limit)
        measured = fits and measurable
        ranks = tuple(RankMemory(before=fixed // 2, peak=peak, capacity=capacity) for capacity in limit) if measured else ()
        tries.append(ProbeResult(size=size, fits=fits, rank_memory=ranks))
    assert len(tries) <= int(math.log2(largest)) + 2
    return max((t.size for t in tries if t.fits), default=0), tries


@pytest.mark.parametrize("seed", range(40))
def test_measured_search_finds_size_close_to_the_largest(seed):
    draw = random.Random(seed)
    per_sample, fixed, largest = draw.uniform(0.5, 5000), draw.randrange(10_000_000), draw.randrange(1, 5000)
    limits = [int(fixed + per_sample * draw.uniform(1, 2 * largest)) + 1 for _ in range(draw.randrange(1, 5))]
    size, tries = search(limits, fixed=fixed, per_sample=per_sample, largest=largest)
    best = min(largest, int((min(limits) - fixed) / per_sample))
    assert best - max(1, 0.06 * best) <= size <= best, tries
    assert len(tries) <= 6


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 100, 1000])
@pytest.mark.parametrize("share", [0.05, 0.4, 0.99, 2.0])
def test_search_without_memory_gauge_bisects(largest, share):
    limit = max(1, int(share * largest))
    size, _ = search([limit], fixed=0, per_sample=1, largest=largest, measurable=False)
    best = min(largest, limit)
    assert best - max(1, 0.1 * best) <= size <= best


def test_search_stops_after_the_minimum_size_fails():
    assert search([10], fixed=100, per_sample=1, largest=64) == (0, [ProbeResult(size=1, fits=False)])
    size, tries = search([10], fixed=100, per_sample=1, largest=64, measurable=False, minimum=4)
    assert size == 0
    assert [t.size for t in tries] == [64, 32, 16, 8, 4]


def test_search_needs_two_probes_when_the_whole_batch_fits():
    size, tries = search([10**9], fixed=100, per_sample=1, largest=64)
    assert (size, len(tries)) == (64, 2)


def test_headroom_is_left_free():
    size, _ = search([1000], fixed=0, per_sample=1, largest=5000, headroom=0.25)
    assert 700 <= size <= 750


def test_sizes_are_multiples_of_the_divisor_or_the_whole_batch():
    size, tries = search([1000], fixed=0, per_sample=1, largest=5001, divisor=8, minimum=8)
    assert all(t.size % 8 == 0 for t in tries)
    assert 940 <= size <= 1000
    assert search([10**9], fixed=0, per_sample=1, largest=5001, divisor=8, minimum=8)[0] == 5001


def test_nonlinear_memory_growth_falls_back_to_bisection():
    """A line through small sizes promises more than there is: an algorithm that changes with the size, say."""
    box = SizeBounds(min_size=1, largest_batch=256, divisor=1, headroom=0.0, measurable=True)
    tries: list[ProbeResult] = []
    while (size := next_size(tries, box)) is not None:
        fits = size <= 37
        tries.append(
            ProbeResult(size=size, fits=fits, rank_memory=(RankMemory(before=0, peak=size, capacity=1000),) if fits else ())
        )
    assert 34 <= max(t.size for t in tries if t.fits) <= 37
    assert len(tries) <= 10


def test_later_failure_overrides_an_earlier_fit():
    box = SizeBounds(min_size=1, largest_batch=64, divisor=1, headroom=0.0, measurable=False)
    tries = [ProbeResult(size=32, fits=True), ProbeResult(size=16, fits=False)]
    assert next_size(tries, box) == 8


def test_whole_batch_is_probed_when_it_avoids_accumulation_memory():
    box = SizeBounds(min_size=1, largest_batch=8, divisor=1, headroom=0.0, measurable=True, accumulation_bytes=50)
    tries: list[ProbeResult] = []
    while (size := next_size(tries, box)) is not None:
        peak = 10 * size + (50 if size < 8 else 0)  # parts add up gradients
        fits = peak <= 85
        tries.append(
            ProbeResult(size=size, fits=fits, rank_memory=(RankMemory(before=0, peak=peak, capacity=85),) if fits else ())
        )
    assert [t.size for t in tries] == [1, 2, 3, 8]  # 3 is where the line of parts ends
    assert tries[-1].fits


def test_forward_memory_sets_the_slope_when_peaks_are_flat():
    box = SizeBounds(min_size=1, largest_batch=1000, divisor=1, headroom=0.0, measurable=True)
    tries: list[ProbeResult] = []
    while (size := next_size(tries, box)) is not None:
        peak = max(1000, 500 + 10 * size)
        memory = RankMemory(before=100, peak=peak, capacity=4500, forward_bytes=50 + 9 * size)
        tries.append(ProbeResult(size=size, fits=peak <= 4500, rank_memory=(memory,) if peak <= 4500 else ()))
    assert max(t.size for t in tries if t.fits) >= 380
    assert len(tries) <= 5
