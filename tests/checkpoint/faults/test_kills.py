"""Runs that are killed with SIGKILL and resume."""

import pytest

from checkpoint.faults import kills
from checkpoint.faults.kills import IN_FLIGHT, TARGETS
from checkpoint.faults.training import EVERY


@pytest.mark.costly
@pytest.mark.parametrize(
    ("draw", "count"), [(kills.draw_short, 12), pytest.param(kills.draw, 40, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_killed_run_resumes_without_loss_or_corruption(collect, draw, count):
    # One run of a slow machine can take all kills of a mode: each mode has kills of its own.
    tallies = {mode: collect(draw, count=count // 2, first=first, stride=2) for first, mode in enumerate(IN_FLIGHT)}
    assert [tally.wrong for tally in tallies.values()] == [[], []]
    assert all(tally.count >= count // 2 for tally in tallies.values())
    assert {fault.split(",")[0] for tally in tallies.values() for fault in tally.kinds} == set(TARGETS)
    for mode, tally in tallies.items():
        assert tally.largest[f"steps of work lost, {mode}"] <= EVERY * IN_FLIGHT[mode]


@pytest.mark.costly
def test_checks_detect_every_simulated_kill_damage(nursery):
    said = nursery.ask(kills.spoiled)
    assert said.pop("nothing") == []
    assert {name for name, problems in said.items() if not problems} == set()
    assert len(said) == 6
