"""Runs that are killed several times within an epoch, and go on with other numbers of ranks."""

import pytest

from checkpoint.faults import chains


def test_short_chain_of_kills_preserves_results(collect):
    found = collect(chains.draw_short, count=2)
    assert found.wrong == []
    assert found.count == 2
    assert 1 <= found.largest["kills in a chain"] <= 4


@pytest.mark.slow
def test_long_chain_of_kills_preserves_results(collect):
    found = collect(chains.draw, count=10, seed=1)
    assert found.wrong == []
    assert 4 < found.largest["kills in a chain"] <= 10
