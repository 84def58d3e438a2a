"""The decisions about the ranks of a node, with a clock and ends of processes that the test makes up."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from dtrain.dist.incident import call_with_timeout
from dtrain.errors import DistError
from dtrain.launch.launch_plan import LaunchPlan, NodeLayout, OutputPlan, Target
from dtrain.launch.processes import descendants
from dtrain.launch.result import describe_failures, summarize
from dtrain.launch.worker_group import NODE_NEWS_S, WorkerGroup
from dtrain.launch_protocol import RankFailure

SCRIPT = Target(kind="script", name="a.py")


@pytest.fixture
def attempt(tmp_path):
    plan = LaunchPlan(target=SCRIPT, layout=NodeLayout.one_node(3), run_dir=tmp_path, output=OutputPlan(prefix="<{rank}> "))
    (tmp_path / "failures").mkdir()
    # Processes that other tests have below this process, however deep, do not belong to the attempt: it would signal them.
    others = set(descendants())
    # Pids that no process has: the kernel's highest is 2**22.
    return WorkerGroup(plan=plan, services=others, pids={0: 2**22 + 1, 1: 2**22 + 2, 2: 2**22 + 3})


def ended(attempt, rank, code, now):
    attempt.record_exits([(attempt.pids[rank], code)], now)
    attempt.advance(now)


def record(attempt, rank, error):
    RankFailure.from_exception(rank, error).write(attempt.plan.failure_file(rank))


def end_of(attempt, **settings):
    return summarize(attempt, host="here", **{"oom_killed": False, **settings})


@pytest.mark.parametrize(
    ("error", "at_once"),
    [
        (ValueError("x"), True),
        (SystemExit(3), True),
        (ConnectionResetError(), False),
        (RuntimeError("Connection closed"), False),
    ],
    ids=["ValueError", "SystemExit", "lost connection", "as gloo says it"],
)
def test_collective_error_waits_for_failure_of_peer(attempt, error, at_once):
    record(attempt, 1, error)
    ended(attempt, 1, 1, now=10.0)
    assert attempt.stopping is at_once
    attempt.advance(10.6)
    assert attempt.stopping
    assert attempt.root_cause.rank == 1


def lost_peer() -> DistError:
    """Return the error of an exchange that lost a rank."""
    with pytest.raises(DistError) as caught:
        call_with_timeout(lambda: time.sleep(60), timeout_s=0.01, message="step: ranks [2] of 6 did not arrive")
    return caught.value


def test_lost_connection_waits_for_the_news_of_another_node(attempt):
    attempt.plan = replace(attempt.plan, layout=NodeLayout(nproc=3, world_size=6, nodes=2))
    for rank in range(3):
        record(attempt, rank, lost_peer())
        ended(attempt, rank, 1, now=10.0)
    attempt.advance(19.0)
    assert (attempt.is_finished, attempt.stopping, attempt.diagnosis.awaits_news) == (True, False, True)
    attempt.fail(["dtrain: launch: node 1 (n07) is gone (ranks 3-5): it was silent for 10 s"], 20.0)
    attempt.advance(20.0)
    assert end_of(attempt).lines == ("dtrain: launch: node 1 (n07) is gone (ranks 3-5): it was silent for 10 s",)


def test_lost_connection_is_the_cause_if_no_node_reports_another(attempt):
    attempt.plan = replace(attempt.plan, layout=NodeLayout(nproc=3, world_size=6, nodes=2))
    record(attempt, 1, lost_peer())
    ended(attempt, 1, 1, now=10.0)
    attempt.advance(10.6)
    attempt.advance(10.6 + NODE_NEWS_S - 0.1)
    assert not attempt.stopping
    attempt.advance(10.6 + NODE_NEWS_S)
    assert (attempt.stopping, attempt.root_cause.rank) == (True, 1)


def test_error_of_the_own_node_does_not_wait_for_news(attempt):
    attempt.plan = replace(attempt.plan, layout=NodeLayout(nproc=3, world_size=6, nodes=2))
    record(attempt, 1, ValueError("x"))
    ended(attempt, 1, 1, now=10.0)
    assert (attempt.stopping, attempt.root_cause.rank) == (True, 1)


def test_killed_rank_is_root_cause_of_lost_connection(attempt):
    record(attempt, 0, ConnectionResetError())
    ended(attempt, 0, 1, now=RankFailure.read(attempt.plan.failure_file(0)).at)
    ended(attempt, 2, -signal.SIGKILL, now=attempt.exits[0].at + 0.1)
    attempt.advance(attempt.exits[0].at + 0.6)
    assert (attempt.root_cause.rank, attempt.root_cause.code) == (2, -signal.SIGKILL)


@pytest.mark.parametrize(
    ("grew", "words"), [(True, "the kernel killed a process of this job for want of memory"), (False, "often the kernel")]
)
def test_oom_kill_is_reported_as_far_as_known(attempt, grew, words):
    ended(attempt, 2, -signal.SIGKILL, now=1.0)
    end = end_of(attempt, oom_killed=grew)
    assert (end.code, end.failed_rank, end.may_restart) == (137, 2, True)
    assert words in end.lines[-1]
    assert "on here" in end.lines[-1]


def test_early_returned_rank_is_named_beside_failure(attempt):
    ended(attempt, 1, 0, now=1.0)
    ended(attempt, 0, 9, now=2.0)
    attempt.advance(2.6)
    assert "; rank 1 had already ended with 0" in end_of(attempt).lines[-1]


def test_exit_received_before_pid_is_recorded(attempt):
    attempt.pids[1] = None
    attempt.record_exits([(2**22 + 77, 5)], 1.0)
    assert 1 not in attempt.exits
    attempt.record_start(1, 2**22 + 77, 1.1)
    assert attempt.exits[1].code == 5


def test_rank_started_during_stop_gets_signal(attempt):
    attempt.pids[1] = None
    attempt.stop(1.0, signal.SIGTERM, 5.0)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    attempt.record_start(1, process.pid, 1.1)
    assert process.wait(timeout=60) == -signal.SIGTERM


def test_stop_request_before_first_rank_is_kept(attempt):
    attempt.pids.clear()
    attempt.request_stop(signal.SIGTERM, 1.0)
    assert attempt.stopping  # it starts no more ranks
    assert end_of(attempt).code == 143


def test_failure_before_stop_request_is_the_cause(attempt):
    ended(attempt, 1, 3, now=1.0)  # without a record: a peer's failure may still turn up
    attempt.request_stop(signal.SIGTERM, 1.1)
    assert end_of(attempt).code == 3


def test_rank_stuck_after_exception_is_root_cause_after_grace(attempt):
    record(attempt, 1, ValueError("boo"))
    attempt.record_script_exit(1, 1, 1.0)
    attempt.advance(5.9)
    assert not attempt.stopping
    assert 6.0 in attempt.deadlines()
    attempt.advance(6.1)
    assert (attempt.stopping, attempt.root_cause.rank) == (True, 1)


def test_saved_ranks_are_ended_after_grace_and_count_as_saved(attempt):
    for rank in range(3):
        record(attempt, rank, SystemExit(75))
        attempt.record_script_exit(rank, 75, 1.0 + rank)
    attempt.advance(30.9)
    assert not attempt.stopping
    assert attempt.deadlines() == [31.0]
    attempt.advance(31.0)
    assert (attempt.stopping, attempt.root_cause, attempt.ending.kill_at) == (True, None, 36.0)
    ended(attempt, 0, -signal.SIGTERM, now=31.1)
    ended(attempt, 1, -signal.SIGKILL, now=36.0)
    ended(attempt, 2, 75, now=36.0)
    assert (end_of(attempt).code, end_of(attempt).lines) == (75, ())


def test_saved_ranks_killed_after_signal_count_as_saved(attempt):
    attempt.request_stop(signal.SIGTERM, 1.0)
    for rank in range(3):
        attempt.record_script_exit(rank, 75, 2.0)
    assert attempt.ending.kill_at == 31.0
    for rank in range(3):
        ended(attempt, rank, -signal.SIGKILL, now=31.0)
    assert end_of(attempt).code == 75


def test_unsaved_rank_ended_with_saved_ranks_is_a_failure(attempt):
    attempt.record_script_exit(0, 75, 1.0)
    attempt.record_script_exit(1, 75, 1.0)
    attempt.advance(31.0)
    for rank in range(3):
        ended(attempt, rank, -signal.SIGTERM, now=31.1)
    assert end_of(attempt).code == 1
    assert end_of(attempt).lines == (
        "dtrain: launch: ranks 0, 1 exited with 75 (preempted and saved) but ranks 2 still running, and were ended; "
        "75 counts only from all ranks",
    )


def test_rank_crashing_in_exit_handlers_after_save_is_a_failure(attempt):
    attempt.record_script_exit(1, 75, 1.0)
    ended(attempt, 1, -signal.SIGSEGV, now=2.0)
    attempt.advance(2.5)
    assert (attempt.stopping, attempt.root_cause.rank) == (True, 1)


def test_first_signal_after_failure_keeps_grace_and_second_ends_it(attempt):
    ended(attempt, 1, -signal.SIGKILL, now=1.0)
    assert (attempt.stopping, attempt.ending.kill_at) == (True, 6.0)
    attempt.request_stop(signal.SIGINT, 2.0)
    assert attempt.ending.kill_at == 6.0
    attempt.request_stop(signal.SIGINT, 3.0)
    assert attempt.ending.kill_at == 3.0


@pytest.mark.parametrize(("grace_s", "expected"), [(None, 2.0), (9.0, 10.0)], ids=["default", "as asked"])
def test_ranks_that_start_again_are_killed_soon(attempt, grace_s, expected):
    attempt.plan = replace(attempt.plan, max_restarts=1, grace_s=grace_s)
    ended(attempt, 1, -signal.SIGKILL, now=1.0)
    assert (attempt.stopping, attempt.ending.kill_at) == (True, expected)


def test_unstarted_ranks_are_dropped(attempt):
    attempt.pids[2] = None
    attempt.drop_ranks([2])
    assert attempt.alive == [0, 1]


@pytest.mark.parametrize(
    ("left", "is_finished", "named"),
    [([7, 8, 9], False, "8, 9"), ([7], False, ""), ([7, 8], True, "")],
    ids=["two", "ended meanwhile", "all ended"],
)
def test_processes_that_no_kill_ends_are_named(attempt, monkeypatch, left, is_finished, named):
    monkeypatch.setattr("dtrain.launch.result.descendants", lambda: left)
    attempt.services = {7}
    if is_finished:
        attempt.pids.clear()
    lines = end_of(attempt).lines
    assert lines == ((f"dtrain: launch: SIGKILL did not end these processes, which wait in the kernel: {named}",) * bool(named))


def test_only_first_launcher_failure_is_reported(attempt):
    attempt.fail(["first"], 1.0, code=124)
    attempt.fail(["second"], 2.0)
    end = end_of(attempt)
    assert (end.code, end.lines[-1]) == (124, "first")


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({0: 75, 1: 75, 2: 75, 3: 75}, 75),
        ({0: 75, 1: 75, 2: 75, 3: 0}, 1),
        ({0: 0, 1: 0, 2: 0, 3: 0}, 0),
    ],
)
def test_preemption_exit_code_depends_on_ranks_of_all_nodes(attempt, codes, expected):
    for rank in range(3):
        ended(attempt, rank, codes[rank], now=1.0)
    assert end_of(attempt, exit_codes=codes).code == expected


def test_traceback_of_hidden_rank_is_printed_with_its_prefix(attempt):
    try:
        raise ValueError("boo")
    except ValueError as error:
        record(attempt, 1, error)
    ended(attempt, 1, 1, now=1.0)
    log = ["step 1", "[rank1]: Traceback (most recent call last):", "[rank1]: ValueError: boo", "step 2", "a", "b", "c"]
    said = describe_failures(attempt, end_of(attempt), is_shown=lambda _: False, read_tail=lambda rank, n: log, full=False)
    assert said[:5] == ["<1> step 2", "<1> a", "<1> b", "<1> c", "<1> Traceback (most recent call last):"]
    assert said[-1] == "<1> ValueError: boo"
    assert len([line for line in said if "Traceback" in line]) == 1


def test_last_lines_of_rank_without_traceback_are_printed(attempt):
    ended(attempt, 1, -signal.SIGKILL, now=1.0)
    said = describe_failures(
        attempt, end_of(attempt), is_shown=lambda _: False, read_tail=lambda rank, n: [f"line {rank}"], full=False
    )
    assert said == ["<1> line 1"]
