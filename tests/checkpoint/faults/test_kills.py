"""Runs that are killed with SIGKILL and resume."""

import pytest

from checkpoint.faults import kills
from checkpoint.faults.kills import IN_FLIGHT, TARGETS
from checkpoint.faults.training import EVERY


@pytest.mark.parametrize(
    ("draw", "count"), [(kills.draw_short, 12), pytest.param(kills.draw, 40, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_killed_run_resumes_without_loss_or_corruption(collect, draw, count):
    tally = collect(draw, count=count)
    assert tally.wrong == []
    assert tally.count >= count
    assert {fault.split(",")[0] for fault in tally.kinds} == set(TARGETS)
    assert tally.largest["steps of work lost, sync"] <= EVERY * IN_FLIGHT["sync"]
    assert tally.largest["steps of work lost, async"] <= EVERY * IN_FLIGHT["async"]


def test_checks_detect_every_simulated_kill_damage(nursery):
    said = nursery.ask(kills.spoiled)
    assert said.pop("nothing") == []
    assert {name for name, problems in said.items() if not problems} == set()
    assert len(said) == 6
