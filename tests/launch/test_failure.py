"""The rank that failed first, found from exits and records alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from dtrain.launch import failure
from dtrain.launch.failure import RankExit, RootCause, find_root_cause
from dtrain.launch_protocol import RankFailure


def exited(rank: int, code: int, when: float) -> RankExit:
    return RankExit(rank=rank, code=code, at=when)


def recorded(
    rank: int, when: float, *, kind: str = "ValueError", message: str = "m", exit_code: int = 1, in_collective: bool = False
) -> RankFailure:
    return RankFailure(
        rank=rank,
        at=when,
        error_type=kind,
        message=message,
        traceback_text="",
        exit_code=exit_code,
        in_collective=in_collective,
    )


CASES = {
    "nothing": ([], [], None),
    "all done": ([exited(0, 0, 1), exited(1, 0, 2)], [], None),
    "preempted is no failure": ([exited(0, 75, 1)], [recorded(0, 0.9, exit_code=75)], None),
    "preempted and still running": ([], [recorded(0, 0.9, exit_code=75)], None),
    "one code": ([exited(0, 0, 1), exited(1, 3, 2)], [], (1, 3)),
    "code 0 after a record, by an exit handler": ([exited(0, 0, 1)], [recorded(0, 0.9)], None),
    "earliest record, not earliest exit": (
        [exited(0, 1, 5.0), exited(1, 1, 5.4)],
        [recorded(0, 4.9), recorded(1, 4.1)],
        (1, 1),
    ),
    "a mistake that was recorded just after the peer lost its connection": (
        [exited(0, 1, 5.0), exited(1, 1, 5.1)],
        [recorded(0, 4.9, in_collective=True), recorded(1, 5.0)],
        (1, 1),
    ),
    "a mistake long after a collective failed is another one": (
        [exited(0, 1, 5.0), exited(1, 1, 6.1)],
        [recorded(0, 4.9, in_collective=True), recorded(1, 6.0)],
        (0, 1),
    ),
    "collectives of all ranks failed": (
        [exited(0, 1, 5.0), exited(1, 1, 5.1)],
        [recorded(0, 4.9, in_collective=True), recorded(1, 5.0, in_collective=True)],
        (0, 1),
    ),
    "record of a rank that still runs": ([exited(0, 1, 5.0)], [recorded(0, 4.9), recorded(1, 4.1, exit_code=7)], (1, 7)),
    "actual exit before the code in the record": ([exited(0, -6, 5.0)], [recorded(0, 4.9)], (0, -6)),
    "killed before the peer's exception": ([exited(1, -9, 5.0), exited(0, 1, 5.2)], [recorded(0, 5.1)], (1, -9)),
    "killed, seen late": ([exited(0, 1, 5.0), exited(1, -9, 5.3)], [recorded(0, 4.9)], (1, -9)),
    "killed long after an exception is a consequence": (
        [exited(0, 1, 5.0), exited(1, -6, 5.6)],
        [recorded(0, 4.9)],
        (0, 1),
    ),
    "os._exit before the peer's exception": ([exited(1, 9, 5.0), exited(0, 1, 5.2)], [recorded(0, 5.001)], (1, 9)),
    "earliest of the silent": ([exited(1, -9, 5.0), exited(0, -6, 5.1)], [], (1, -9)),
    "a signal before the abort of a peer, seen in one moment": ([exited(0, -6, 5.0), exited(1, -15, 5.0)], [], (1, -15)),
    "a signal before the abort of a peer, seen later": ([exited(0, -6, 5.0), exited(1, -15, 5.1)], [], (1, -15)),
    "a signal that a busy launcher sees late": (
        [exited(0, 1, 5.0), exited(1, -15, 8.0)],
        [replace(recorded(0, 4.9), maybe_from_peer=True)],
        (1, -15),
    ),
    "a signal long after an error of its own": ([exited(0, 1, 5.0), exited(1, -15, 8.0)], [recorded(0, 4.9)], (0, 1)),
    "a signal long after an abort": ([exited(0, -6, 5.0), exited(1, -15, 8.0)], [], (0, -6)),
    "a signal before a code, seen in one moment": ([exited(0, 1, 5.0), exited(1, -9, 5.0)], [], (1, -9)),
    "a real failure beside preempted": ([exited(0, 75, 4.0), exited(1, 3, 5.0)], [recorded(0, 3.9, exit_code=75)], (1, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_root_cause_is_independent_of_order(name):
    exits, failures, expected = CASES[name]
    for some_exits in itertools.permutations(exits):
        for some_failures in itertools.permutations(failures):
            cause = find_root_cause(some_exits, some_failures)
            assert (cause and (cause.rank, cause.code)) == expected


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 3), (255, 255), (-9, 137), (-15, 143)])
def test_exit_code_matches_shell_convention(code, expected):
    assert failure.shell_exit_code(code) == expected


@pytest.mark.parametrize(
    ("record", "code", "expected"),
    [
        (recorded(1, 0), 1, "failed with exit code 1 (pid 7 on here): ValueError: m"),
        (recorded(1, 0, message=""), 1, "failed with exit code 1 (pid 7 on here): ValueError"),
        (recorded(1, 0, message="\n first\nsecond"), 1, "failed with exit code 1 (pid 7 on here): ValueError: first"),
        (recorded(1, 0, kind="SystemExit", message="3"), 3, "failed with exit code 3 (pid 7 on here)"),
        (recorded(1, 0, kind="SystemExit", message="no data"), 1, "failed with exit code 1 (pid 7 on here): no data"),
        (None, -9, "was killed by SIGKILL (pid 7 on here; often the kernel, out of memory)"),
        (None, -11, "was killed by SIGSEGV (pid 7 on here)"),
        (None, -40, "was killed by signal 40 (pid 7 on here)"),
    ],
)
def test_failure_is_described_in_one_line(record, code, expected):
    cause = RootCause(rank=1, code=code, failure=record)
    line = failure.describe_failure(cause, world_size=2, location="pid 7 on here", others_stopped=False)
    assert line == f"dtrain: launch: rank 1 of 2 {expected}"
    line = failure.describe_failure(cause, world_size=2, location="pid 7 on here", others_stopped=True)
    assert line == f"dtrain: launch: rank 1 of 2 {expected}; the other ranks were ended"


@pytest.mark.parametrize(
    ("record", "named"),
    [
        (recorded(0, 0, kind="ConnectionResetError"), True),
        (replace(recorded(0, 0, kind="RuntimeError", message="Connection closed by peer"), in_collective=True), True),
        (recorded(0, 0), False),
        (None, False),
    ],
)
def test_early_exited_rank_is_culprit_when_peer_lost_connection(record, named):
    cause = RootCause(rank=0, code=1, failure=record)
    line = failure.describe_failure(cause, world_size=3, location="pid 7 on here", others_stopped=True, returned_early=[1])
    begin = "dtrain: launch: rank 1 of 3 left early, with exit code 0, while others needed it; rank 0 failed without it, "
    assert line.startswith(begin) == named
    assert ("; rank 1 had already ended with 0" in line) != named
    assert "exit code 1 (pid 7 on here)" in line
    assert line.endswith("; the other ranks were ended")


def test_long_message_is_truncated():
    cause = RootCause(rank=0, code=1, failure=recorded(0, 0, message="x" * 10_000))
    assert len(failure.describe_failure(cause, world_size=1, location="pid 1", others_stopped=False)) < 500
