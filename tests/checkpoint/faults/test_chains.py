"""Runs that are killed several times within an epoch, and resume with other numbers of ranks."""

import pytest

from checkpoint.faults import chains


@pytest.mark.costly
def test_short_chain_of_kills_preserves_results(collect):
    tally = collect(chains.draw_short, count=2)
    assert tally.wrong == []
    assert tally.count == 2
    assert 1 <= tally.largest["kills in a chain"] <= 4


@pytest.mark.slow
def test_long_chain_of_kills_preserves_results(collect):
    tally = collect(chains.draw, count=10, seed=1)
    assert tally.wrong == []
    assert 4 < tally.largest["kills in a chain"] <= 10
