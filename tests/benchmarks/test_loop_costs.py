"""The messages and bytes of a rank grow no faster in each part of a loop than the table in docs/scale.md says."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from loop_costs import measure_costs

PAGE = Path(__file__).parents[2] / "docs/scale.md"
HEAD = "| part of the loop |"


def laws_of_the_page() -> dict[str, tuple[int, int]]:
    """Exchanges, and bytes for each rank of the job, by part of the loop."""
    lines = PAGE.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(HEAD)) + 2
    rows = [line.strip("|").split("|") for line in lines[first : lines.index("", first)]]
    return {row[0].strip(): (int(row[1]), int(re.sub(r"\D", "", row[2]) or 0)) for row in rows}


@pytest.mark.costly
@pytest.mark.parametrize("worlds", [[2, 4], pytest.param([8, 16], marks=pytest.mark.slow)], ids=str)
def test_each_part_of_a_loop_sends_what_its_row_says(worlds):
    laws, costs = laws_of_the_page(), measure_costs(worlds)
    assert [cost.name for cost in costs] == list(laws)
    for cost in costs:
        exchanges, bytes_per_rank = laws[cost.name]
        for world in worlds:
            sent = cost.by_world[world]
            assert sent.exchanges == exchanges, cost
            assert sent.messages <= exchanges * math.ceil(math.log2(world)), cost
            assert sent.bytes <= bytes_per_rank * world, cost
