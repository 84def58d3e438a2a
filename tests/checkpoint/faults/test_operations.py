"""Saves in which one file operation fails, is cut short, or is the last one of its process."""

import pytest

from checkpoint.faults import operations
from checkpoint.faults.operations import EVERY_WAY
from checkpoint.faults.watched import ACTIONS, ERRORS


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
    found = collect(draw, count=faults)
    assert found.wrong == []
    assert found.count == faults, "an operation was not reached"
    kinds = {fault.split(";")[0] for fault in found.kinds}
    assert kinds == {*ERRORS, "kill", "short write"}
    came = {came for fault in found.kinds.values() for came in fault}
    assert came >= {"raised, nothing published", "the older step 2 stays", "the new step 2 is committed"}
    assert found.largest["seconds until all had raised"] < operations.LATE_S


@pytest.mark.parametrize(
    ("draw", "least"), [(operations.draw_small, 50), pytest.param(operations.draw, 100, marks=pytest.mark.slow)]
)
def test_other_save_modes_survive_operation_faults(collect, draw, least):
    """Seven draws, one for each of the other ways to save."""
    kinds: set[str] = set()
    count = 0
    for k in range(1, len(EVERY_WAY)):
        found = collect(draw, count=1, first=k)
        assert found.wrong == []
        assert all(str(EVERY_WAY[k]) in fault for fault in found.kinds)
        kinds |= {fault.split(";")[0] for fault in found.kinds}
        count += found.count
    assert count >= least
    assert kinds == set(ACTIONS)
