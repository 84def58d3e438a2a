"""Jobs whose ranks are killed at random moments go on from memory: nothing is lost, torn, or seen twice."""

import os

import pytest

from checkpoint.faults import memory_kills

MOMENTS = int(os.environ.get("TEST_MOMENTS", "0"))


@pytest.mark.costly
@pytest.mark.parametrize("count", [6, pytest.param(max(MOMENTS, 60), marks=pytest.mark.slow)], ids=["short", "long"])
def test_killed_ranks_go_on_from_memory_without_loss(count):
    tally = memory_kills.draw(count, seed=MOMENTS)
    assert tally.wrong == []
    # A job may end before its last kills.
    assert tally.count >= count // 2
