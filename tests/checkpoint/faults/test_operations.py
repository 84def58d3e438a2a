"""Saves in which one file operation fails, is cut short, or is the last one of its process."""

import pytest

from checkpoint.faults import operations
from checkpoint.faults.operations import EVERY_WAY
from checkpoint.faults.watched import ACTIONS, ERRORS

OTHER_WAYS = range(1, len(EVERY_WAY))
SOME_WAYS = (2, 5, 7)  # two ranks, four threads in the background, and both


@pytest.mark.costly
@pytest.mark.parametrize(
    ("count", "draw"),
    [
        (operations.count_alternating, operations.draw_alternating),
        pytest.param(operations.count_simplest, operations.draw_simplest, marks=pytest.mark.slow),
    ],
    ids=["alternating", "all"],
)
def test_simplest_save_survives_fault_in_every_operation(nursery, collect, count, draw):
    faults = nursery.ask(count)
    tally = collect(draw, count=faults)
    assert tally.wrong == []
    assert tally.count == faults, "an operation was not reached"
    kinds = {fault.split(";")[0] for fault in tally.kinds}
    assert kinds == {*ERRORS, "kill", "short write"}
    came = {came for fault in tally.kinds.values() for came in fault}
    assert came >= {"raised, nothing published", "the older step 2 stays", "the new step 2 is committed"}
    assert tally.largest["seconds until all had raised"] < operations.LATE_S


@pytest.mark.costly
@pytest.mark.parametrize(
    ("draw", "ways", "least"),
    [
        (operations.draw_small, SOME_WAYS, 20),
        pytest.param(operations.draw_small, OTHER_WAYS, 50, marks=pytest.mark.slow),
        pytest.param(operations.draw, OTHER_WAYS, 100, marks=pytest.mark.slow),
    ],
)
def test_other_save_modes_survive_operation_faults(collect, draw, ways, least):
    """A draw for each of the other ways to save."""
    kinds: set[str] = set()
    count = 0
    for k in ways:
        tally = collect(draw, count=1, first=k)
        assert tally.wrong == []
        assert all(str(EVERY_WAY[k]) in fault for fault in tally.kinds)
        kinds |= {fault.split(";")[0] for fault in tally.kinds}
        count += tally.count
    assert count >= least
    assert kinds == set(ACTIONS)
