"""Whole files that are damaged, of another step, rank or run, missing or too many."""

import pytest

from checkpoint.faults import files
from checkpoint.faults.files import DAMAGE
from checkpoint.faults.samples import KINDS

ALL = 10**6  # more than there are: the draws end when each was made


@pytest.mark.costly
@pytest.mark.parametrize("stride", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_corrupt_file_error_names_file_and_older_step(collect, stride):
    # One rank without special options is ``test_damage.py``; several states are as one, as far as files go.
    assert (KINDS[1::2], len(KINDS)) == (("2 ranks", "frozen apart"), 4)
    tally = collect(files.draw, count=ALL, first=1, stride=stride)
    assert tally.wrong == []
    assert set(tally.kinds) == set(DAMAGE)
    assert {came for fault in tally.kinds.values() for came in fault} == {
        "refused by name, the older step offered",
        "not committed, the older step taken",
    }
