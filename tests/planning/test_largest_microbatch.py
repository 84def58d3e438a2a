"""The search for the largest microbatch, against trying them all; comparisons of layouts."""

from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtrain.errors import ConfigError
from dtrain.planning.estimate import _find_largest, compare_strategies, estimate_memory, largest_microbatch
from planning.workloads import linears

AT_MOST = 300


class Lines:
    """Estimates whose peak is the maximum of some lines over the size, as in a step."""

    def __init__(self, lines: list[tuple[int, int]]) -> None:
        self.lines = lines
        self.by_size: dict[int, SimpleNamespace] = {}

    def peak(self, size: int) -> int:
        return max(fixed + slope * size for fixed, slope in self.lines)

    def of(self, size: int) -> SimpleNamespace:
        assert size >= 1
        return self.by_size.setdefault(size, SimpleNamespace(peak=self.peak(size)))


@given(
    lines=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**4)), min_size=1, max_size=5),
    limit=st.integers(0, 2 * 10**6),
    at_most=st.integers(1, AT_MOST),
)
@example(lines=[(0, 1), (6, 0)], limit=6, at_most=9)  # exactly what is held whatever the size: flat, and then too large
@example(lines=[(0, 1), (150, 0)], limit=150, at_most=AT_MOST)
@example(lines=[(26, 2), (88, 1), (94, 0)], limit=102, at_most=AT_MOST)
@settings(max_examples=300, deadline=None)
def test_largest_microbatch_matches_exhaustive_search(lines, limit, at_most):
    found = _find_largest(Lines(lines), memory=limit, limit=limit, max_size=at_most)
    fitting = [size for size in range(1, at_most + 1) if Lines(lines).peak(size) <= limit]
    assert found.microbatch_size == max(fitting, default=0)
    assert found.sizes_tried <= 2 + 2 * len(lines)


def test_largest_microbatch_fits_and_the_next_size_does_not():
    memory, headroom = 2**18, 0.1
    found = largest_microbatch(linears(), memory, world_size=8, headroom=headroom)
    size = found.microbatch_size
    peaks = [estimate_memory(linears(), world_size=8, microbatch_size=n).peak for n in (size, size + 1)]
    assert peaks[0] <= memory * (1 - headroom) < peaks[1]
    assert found.estimate.peak == peaks[0]


def test_insufficient_memory_returns_zero_with_the_one_sample_estimate():
    found = largest_microbatch(linears(), 1000, world_size=8)
    assert (found.microbatch_size, found.estimate.microbatch_size) == (0, 1)
    assert found.estimate.peak > 1000


def test_comparison_lists_every_strategy_with_and_without_checkpointing():
    rows = compare_strategies(linears(), world_size=16, dp_replicate=2)
    layouts = [(row.estimate.config.strategy, row.estimate.config.checkpoint) for row in rows]
    names = ("replicate", "shard_grad_op", "full_shard", "hybrid_shard")
    assert layouts == [(name, keep) for name in names for keep in (None, "nothing")]
    held = {row.estimate.config.strategy: row.estimate.max_by_part.parameters for row in rows}
    assert held["full_shard"] < held["hybrid_shard"] < held["replicate"]


def test_comparison_omits_hybrid_checkpointing_and_largest_without_inputs():
    rows = compare_strategies(linears(blocks=()), world_size=2)
    assert [row.estimate.config.strategy for row in rows] == ["replicate", "shard_grad_op", "full_shard"]
    assert all(row.largest is None for row in rows)


REFUSED = {
    "no memory": ({"memory": 0}, "memory must be a finite number above 0, got 0. 80 GiB is"),
    "memory in words": ({"memory": "80GiB"}, "memory must be a finite number above 0, got '80GiB'"),
    "all headroom": ({"memory": 10, "headroom": 1.0}, "headroom must be a finite number at least 0 and below 1, got 1.0"),
    "no size allowed": ({"memory": 10, "max_size": 0}, "max_size must be an integer of at least 1, got 0"),
}


@pytest.mark.parametrize(("options", "expected"), REFUSED.values(), ids=REFUSED)
def test_invalid_bounds_are_refused(options, expected):
    with pytest.raises(ConfigError, match=expected):
        largest_microbatch(linears(), world_size=2, **options)
