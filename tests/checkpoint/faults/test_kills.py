"""Runs that are killed with SIGKILL and go on."""

from checkpoint.faults import kills
from checkpoint.faults.kills import IN_FLIGHT, TARGETS
from checkpoint.faults.training import EVERY


def test_nothing_is_lost_torn_or_different_when_a_run_is_killed_at_random_times(collect):
    found = collect(kills.draw_short, count=40)
    assert found.wrong == []
    assert found.count >= 40
    assert {fault.split(",")[0] for fault in found.kinds} == set(TARGETS)
    assert found.largest["steps of work lost, sync"] <= EVERY * IN_FLIGHT["sync"]
    assert found.largest["steps of work lost, async"] <= EVERY * IN_FLIGHT["async"]


def test_what_a_kill_could_do_would_be_seen(nursery):
    said = nursery.ask(kills.spoiled)
    assert said.pop("nothing") == []
    assert {name for name, problems in said.items() if not problems} == set()
    assert len(said) == 6
