"""Hang detection from the ranks' progress reports and the time."""

from __future__ import annotations

import pytest

from dtrain.launch.heartbeats import ProgressKind, ProgressRecord
from dtrain.launch.watchdog import ProgressTimer


def pulse(kind: ProgressKind, rank: int, when: float, value: int = 0, doing: str = "") -> ProgressRecord:
    return ProgressRecord(kind=kind, rank=rank, value=value, at=when, activity=doing)


OPEN = [pulse(ProgressKind.OPENED, 0, 10.0), pulse(ProgressKind.OPENED, 1, 11.0)]


@pytest.mark.parametrize(
    ("pulses", "ended", "deadline"),
    [
        pytest.param([], [], None, id="nobody-has-opened"),
        pytest.param([pulse(ProgressKind.PROGRESS, 0, 12.0)], [], None, id="progress-without-opening"),
        pytest.param(OPEN, [], 41.0, id="opening-counts"),
        pytest.param([*OPEN, pulse(ProgressKind.PROGRESS, 0, 20.0)], [], 50.0, id="one-that-goes-on-is-enough"),
        pytest.param([*OPEN, pulse(ProgressKind.COMMITTED, 0, 20.0)], [], 41.0, id="a-commit-may-come-from-another-thread"),
        pytest.param([*OPEN, pulse(ProgressKind.LEAVING, 1, 25.0)], [], 55.0, id="leaving-is-progress"),
        pytest.param([*OPEN, pulse(ProgressKind.CLOSED, 0, 30.0)], [], 60.0, id="one-still-inside"),
        pytest.param(
            [*OPEN, pulse(ProgressKind.CLOSED, 0, 30.0), pulse(ProgressKind.CLOSED, 1, 30.0)], [], None, id="all-outside"
        ),
        pytest.param([*OPEN, pulse(ProgressKind.CLOSED, 0, 30.0)], [1], 65.0, id="outside-while-another-has-ended"),
        pytest.param([*OPEN, pulse(ProgressKind.CLOSED, 0, 36.0)], [1], 66.0, id="left-the-block-after-another-has-ended"),
        pytest.param([*OPEN, pulse(ProgressKind.CLOSED, 0, 30.0)], [1, 0], None, id="all-have-ended"),
        pytest.param(
            [*OPEN, pulse(ProgressKind.CLOSED, 0, 30.0), pulse(ProgressKind.PROGRESS, 0, 50.0)],
            [1],
            80.0,
            id="works-on-outside",
        ),
        pytest.param([], [1], None, id="one-has-ended-and-nobody-was-inside"),
        pytest.param(
            [*OPEN, pulse(ProgressKind.CLOSED, 0, 30.0), pulse(ProgressKind.OPENED, 0, 40.0)], [], 70.0, id="opened-again"
        ),
    ],
)
def test_deadline_follows_the_last_progress_of_any_rank(pulses, ended, deadline):
    watch = ProgressTimer(30.0)
    for one in pulses:
        watch.record(one)
    for rank in ended:
        watch.record_exit(rank, 35.0)
        watch.record_exit(rank, 99.0)  # recorded twice
    assert watch.deadline() == deadline
    assert watch.is_hung(deadline - 0.1 if deadline else 1e9) is False
    assert watch.is_hung(deadline if deadline else 1e9) is (deadline is not None)


def test_deadline_is_extended_after_watcher_was_suspended():
    watch = ProgressTimer(30.0)
    watch.record(OPEN[0])
    assert not watch.is_hung(1000.0)
    assert watch.deadline() == 1030.0
    assert watch.is_hung(1030.0)


def test_progress_records_last_report_of_each_rank():
    watch = ProgressTimer(30.0)
    for one in [*OPEN, pulse(ProgressKind.PROGRESS, 1, 12.0, 7, "save"), pulse(ProgressKind.LEAVING, 1, 13.0)]:
        watch.record(one)
    seen = watch.progress
    assert (seen[0].phase, seen[0].passed, seen[0].doing) == ("open", 0, "")
    assert (seen[1].phase, seen[1].passed, seen[1].doing, seen[1].at) == ("leaving", 7, "save", 13.0)
