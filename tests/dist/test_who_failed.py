"""Ranks without a launcher name the rank that failed, and no other rank: rows of the truth table on real ranks."""

from __future__ import annotations

import pytest

from table.failures import FAULTS, Fault, named_ranks, run_fault

QUICK = {"a rank raises in its step", "one connection between two living ranks breaks", "a rank closes its control channel"}


def check(fault: Fault, world: int, grace_s: float | None = None) -> None:
    outcome = run_fault(fault, world, grace_s=grace_s)
    assert outcome.innocent == outcome.unclear == set(), outcome.errors


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in QUICK], ids=lambda fault: fault.name)
def test_failed_rank_is_named_by_all_others(fault):
    check(fault, 4)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("world", [4, 8])
def test_each_fault_names_no_innocent_rank(fault, world):
    check(fault, world)


def test_named_ranks_are_read_from_the_lines():
    assert named_ranks("step: ranks [1, 3-5] of 8 did not arrive, connection lost after 0.2 s. Rank 3 left with X.") == {
        1,
        3,
        4,
        5,
    }
    assert named_ranks("step: node 1 is gone (ranks 4-7): its ranks of 8 did not arrive") == {4, 5, 6, 7}
    assert named_ranks("step: the connection between ranks 2 and 3 of 8 was lost") == {2, 3}
