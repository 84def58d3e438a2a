"""The test tool itself: results, errors and stuck ranks come back, and nothing is left behind."""

import ctypes
import datetime
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dtrain as dt
from dtrain.dist.collectives import all_gather_json, raise_if_any_failed
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError, DistError, RankError
from dtrain.launch.local_ranks import PRELOADED, LocalRanks
from dtrain.testing import Ranks, inject_fault, ranks, run_ranks


def describe(greeting: str) -> dict:
    return {"rank": get_dist_info().rank, "world": dist.get_world_size(), "said": greeting, "pid": os.getpid()}


def raise_on_rank_1() -> None:
    if get_dist_info().rank == 1:
        raise ValueError("rank one is unhappy")
    dist.barrier()


def die_on_rank_1() -> None:
    if get_dist_info().rank == 1:
        os._exit(7)
    dist.barrier()


def sleep_on_rank_1() -> None:
    if get_dist_info().rank == 1:
        time.sleep(600)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def imported_by_a_loop(folder: str) -> list[str]:
    """Return the modules of torch and dtrain that a rank imports after its fork, to build a model, train and save."""
    before = set(sys.modules)
    model = dt.shard_model(torch.nn.Linear(4, 1), dt.build_mesh(), strategy="full_shard")
    step = dt.compose_step(lambda model, batch: dt.LossSum(total=model(batch).sum(), weight=len(batch)))
    state = step.init(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state, _ = step(state, torch.ones(4, 4) * get_dist_info().rank)
    dt.save_sharded(folder, state)
    return sorted(name for name in set(sys.modules) - before if name.partition(".")[0] in ("torch", "dtrain"))


def test_rank_of_a_loop_imports_hardly_anything_after_its_fork(tmp_path):
    assert all(len(names) < 5 for names in run_ranks(imported_by_a_loop, 2, str(tmp_path)))


def threads_that_ten_groups_add() -> tuple[int, float]:
    def count() -> int:
        return len(os.listdir("/proc/self/task"))

    before = count()
    groups = [dist.new_group(backend="gloo") for _ in range(10)]
    total = torch.ones(1)
    for group in groups:
        dist.all_reduce(total, group=group)
    return count() - before, total.item()


def test_groups_of_a_rank_share_the_thread_that_polls():
    # Each group has two threads that run its collectives. One of its own for a gloo device wakes 100 times a second.
    assert run_ranks(threads_that_ten_groups_add, 2) == [[20, 1024.0], [20, 1024.0]]


@pytest.mark.parametrize("name", PRELOADED)
def test_preloaded_module_exists(name):
    assert importlib.util.find_spec(name) is not None


def test_results_are_ordered_by_rank_and_processes_exit():
    results = run_ranks(describe, 3, "hello")
    assert [(r["rank"], r["world"], r["said"]) for r in results] == [(rank, 3, "hello") for rank in range(3)]
    assert not any(alive(r["pid"]) for r in results)


def test_pool_reuses_processes_for_several_functions():
    with Ranks(2) as ranks:
        pids = [r["pid"] for r in ranks.run(describe, "a")]
        assert [r["pid"] for r in ranks.run(describe, "b")] == pids
    assert not any(alive(pid) for pid in pids)


def open_run_at(folder: str) -> str:
    return str(dt.open_run(folder).path)


def test_run_that_a_function_opened_is_closed_when_it_returns(tmp_path):
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    with Ranks(2) as ranks:
        assert [ranks.run(open_run_at, folder) for folder in folders] == [[folder] * 2 for folder in folders]


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (raise_on_rank_1, "raise_on_rank_1: rank 1 of 2 raised\n.*ValueError: rank one is unhappy"),
        (die_on_rank_1, "die_on_rank_1: rank 1 of 2 died with exit code 7"),
    ],
)
def test_failing_rank_is_named_and_the_pool_restarts(fn, message):
    with Ranks(2) as ranks:
        pids = [r["pid"] for r in ranks.run(describe, "a")]
        with pytest.raises(RankError, match=f"(?s){message}"):
            ranks.run(fn)
        assert not any(alive(pid) for pid in pids)
        assert len(ranks.run(describe, "again")) == 2


def test_a_stuck_rank_is_named_with_its_stack():
    with Ranks(2) as ranks:
        ranks.run(describe, "what takes longest at the start is over")
        with pytest.raises(RankError, match=r"(?s)sleep_on_rank_1: ranks \[1\] of 2 did not finish.*in sleep_on_rank_1"):
            ranks.run(sleep_on_rank_1, timeout_s=2)


def end_soon() -> int:
    import threading

    threading.Timer(0.2, os._exit, (9,)).start()
    return os.getpid()


def test_a_rank_that_dies_between_two_runs_is_named():
    with Ranks(2) as ranks:
        pids = ranks.run(end_soon)
        assert wait_until(lambda: not any(map(alive, pids)))
        with pytest.raises(RankError, match=r"describe: rank 0 of 2 died with exit code 9"):
            ranks.run(describe, "a")
        assert len(ranks.run(describe, "again")) == 2


def leave_on_rank_1() -> None:
    if get_dist_info().rank == 1:
        os._exit(0)
    dist.barrier()


def test_a_rank_that_leaves_with_exit_code_0_is_named():
    # A slow rank 0 is ended before its barrier has failed.
    message = r"^run_ranks: leave_on_rank_1: rank 1 of 2 died with exit code 0($|\nrank 0 failed after it)"
    with pytest.raises(RankError, match=message):
        run_ranks(leave_on_rank_1, 2)


def test_non_importable_functions_are_refused():
    def inner() -> None: ...

    for fn in (lambda: None, inner, functools.partial(describe, "a")):
        with pytest.raises(ConfigError, match="run_ranks: fn must be a function at the top level of a file, got"):
            run_ranks(fn, 2)


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True, "2"])
def test_invalid_world_size_is_refused(world_size):
    with pytest.raises(ConfigError, match=f"world_size must be an integer of at least 1, got {world_size!r}"):
        Ranks(world_size)


def give_a_tensor() -> torch.Tensor:
    return torch.ones(2)


def test_non_json_arguments_and_results_are_refused(ranks):
    with pytest.raises(ConfigError, match=r"run_ranks: describe: args must be plain data .*Tensor is not JSON serializable"):
        ranks(1).run(describe, torch.ones(2))
    with pytest.raises(
        RankError, match=r"ConfigError: run_ranks: give_a_tensor: a result must be plain data .*Tensor is not JSON"
    ):
        run_ranks(give_a_tensor, 1)


def surroundings() -> list:
    return [os.getcwd(), os.environ.get("DTRAIN_TEST_FLAG"), os.environ.get("OMP_NUM_THREADS")]


def test_ranks_start_with_the_callers_current_folder_and_environment(tmp_path, monkeypatch):
    run_ranks(surroundings, 1)  # the fork server is there from now on
    monkeypatch.setenv("DTRAIN_TEST_FLAG", "set later")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.chdir(tmp_path)
    assert run_ranks(surroundings, 1) == [[str(tmp_path), "set later", "1"]]
    monkeypatch.delenv("DTRAIN_TEST_FLAG")
    assert run_ranks(surroundings, 1)[0][1] is None


def raise_after_closing() -> None:
    """The culprit takes its connections away, and its exception leaves the function later."""
    group = dist.new_group()
    dist.barrier(group=group)
    if get_dist_info().rank == 1:
        try:
            raise ValueError("rank one is unhappy")
        finally:
            dist.destroy_process_group(group)
            del group
            time.sleep(0.5)
    dist.barrier(group=group)


def raise_together_on_rank_1() -> None:
    raise_if_any_failed(ValueError("rank one is unhappy") if get_dist_info().rank == 1 else None, caller="here")


def miss_rank_1() -> None:
    """Return the error of a collective when rank 1 does not come and has not yet reported a reason."""
    if get_dist_info().rank == 0:
        raise DistError("rank 1 did not come")
    time.sleep(0.5)
    raise ValueError("rank one is unhappy")


def lose_a_peer_while_waiting() -> None:
    """The error leaves no collective of torch's, but a wait in this file."""
    if get_dist_info().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier(async_op=True).wait()


def crash_in_a_collective() -> None:
    if get_dist_info().rank == 1:
        dist.distributed_c10d._rank_not_in_group = lambda group: ctypes.string_at(0)
    dist.all_reduce(torch.ones(2))


def test_rank_that_crashes_names_the_signal_the_collective_and_the_stack():
    with pytest.raises(RankError) as caught:
        run_ranks(crash_in_a_collective, 2)
    first, *stack = str(caught.value).splitlines()
    assert first == "run_ranks: crash_in_a_collective: rank 1 of 2 died with exit code -11 (SIGSEGV in all_reduce)"
    assert any("in crash_in_a_collective" in line for line in stack)


def abort_with_last_words() -> None:
    # The libraries below Python write to the file descriptor.
    os.write(2, b"terminate called: the pair is closed\n")
    if get_dist_info().rank == 1:
        os.abort()


def test_last_words_of_a_rank_that_aborts_are_in_the_error():
    with pytest.raises(RankError) as caught:
        run_ranks(abort_with_last_words, 2)
    first, second, *_ = str(caught.value).splitlines()
    assert first == "run_ranks: abort_with_last_words: rank 1 of 2 died with exit code -6 (SIGABRT)"
    assert second == "terminate called: the pair is closed"


WARNS = """
import sys
from dtrain.testing import run_ranks

def warn():
    print("a warning", file=sys.stderr)

if __name__ == "__main__":
    run_ranks(warn, 2)
"""


@pytest.mark.costly
def test_standard_error_of_ranks_is_shown(tmp_path):
    (tmp_path / "warns.py").write_text(WARNS)
    command = [sys.executable, str(tmp_path / "warns.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr.count("a warning\n") == 2


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (raise_after_closing, "rank 1 of 2 raised\n.*ValueError: rank one is unhappy\nrank 0 failed after it: RuntimeError"),
        (raise_together_on_rank_1, "rank 1 of 2 raised\n.*ValueError: rank one is unhappy"),
        (miss_rank_1, "rank 1 of 2 raised\n.*ValueError: rank one is unhappy\nrank 0 failed after it: .*DistError"),
        (lose_a_peer_while_waiting, "rank 1 of 2 died with exit code -9"),
    ],
)
def test_first_failed_rank_is_reported_instead_of_affected_peers(fn, message):
    with pytest.raises(RankError, match=f"(?s)^run_ranks: {fn.__name__}: {message}"):
        run_ranks(fn, 2)


class SlowToSay(Exception):
    def __str__(self) -> str:
        Path(self.args[0]).touch()
        time.sleep(0.5)
        return "first"


def raise_in_turn(file: str) -> None:
    """Rank 1 raises; while its report is being written, rank 0 raises."""
    if get_dist_info().rank == 1:
        raise SlowToSay(file)
    while not os.path.exists(file):
        time.sleep(0.01)
    raise ValueError("second")


def test_earlier_error_is_reported_despite_a_delayed_report(tmp_path, monkeypatch):
    monkeypatch.setattr("dtrain.testing.ranks.SETTLE_S", 60.0)
    with pytest.raises(
        RankError, match=r"(?s)rank 1 of 2 raised\n.*SlowToSay: first\nrank 0 failed after it: ValueError: second"
    ):
        run_ranks(raise_in_turn, 2, str(tmp_path / "raised"))


def give_up_on_rank_1() -> None:
    if get_dist_info().rank == 0:
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=0.5))
    time.sleep(600)


def test_timed_out_rank_report_includes_the_stack_of_its_peer(monkeypatch):
    monkeypatch.setattr("dtrain.testing.ranks.ROOT_CAUSE_WAIT_S", 0.1)
    message = r"(?s)rank 0 of 2 raised\n.*monitored_?[bB]arrier.*ranks \[1\] had not finished:\nrank 1:\n.*in give_up_on_rank_1"
    with pytest.raises(RankError, match=message):
        run_ranks(give_up_on_rank_1, 2)


def raise_at_once(rank: int, folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    if get_dist_info().rank == rank:
        while len(os.listdir(folder)) < 2:
            time.sleep(0.01)
        raise ValueError("at once")
    time.sleep(30)
    Path(folder, "the end").touch()


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_error_terminates_the_other_ranks_immediately(tmp_path, rank):
    with pytest.raises(RankError, match="ValueError: at once"):
        run_ranks(raise_at_once, 2, rank, str(tmp_path), timeout_s=600)
    pids = os.listdir(tmp_path)
    assert len(pids) == 2
    assert "the end" not in pids
    assert not any(alive(int(pid)) for pid in pids)


def stop_rank_1(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    with inject_fault("stop", at="dtrain.dist.collectives.get_dist_info", rank=1):
        all_gather_json("hello")


def test_a_stopped_rank_is_named_and_ended_with_the_others(tmp_path):
    message = r"(?s)ranks \[0, 1\] of 2 did not finish within 3 s\nrank 0:\n.*all_gather_json.*rank 1:\n\(stopped by a signal"
    with Ranks(2) as ranks:
        ranks.run(describe, "what takes longest at the start is over")
        with pytest.raises(RankError, match=message):
            ranks.run(stop_rank_1, str(tmp_path), timeout_s=3)
    assert len(os.listdir(tmp_path)) == 2
    assert not any(alive(int(pid)) for pid in os.listdir(tmp_path))


def busy(folder: str) -> None:
    """Rank 0 is busy and leaves signals alone, rank 1 is stopped."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    Path(folder, f"{os.getpid()}-{os.getppid()}").touch()
    if get_dist_info().rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        pass


def wait_until(what: Callable[[], bool]) -> bool:
    """Return True if the condition came true within a time that is long even on a busy machine."""
    deadline = time.monotonic() + 60
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    return what()


def caller(tmp_path: Path, body: str) -> subprocess.Popen:
    script = tmp_path / "caller.py"
    script.write_text(
        "import sys, tempfile\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        f"sys.path[:0] = {[str(Path(__file__).parent)]}\n"
        "import test_ranks\n"
        "from dtrain.testing import Ranks, run_ranks\n"
        f"if __name__ == '__main__':\n    {body}\n"
    )
    return subprocess.Popen([sys.executable, str(script)])


@pytest.mark.costly
def test_rank_processes_exit_when_the_caller_is_killed(tmp_path):
    folder = tmp_path / "pids"
    folder.mkdir()
    process = caller(tmp_path, f"run_ranks(test_ranks.busy, 2, {str(folder)!r})")
    try:
        assert wait_until(lambda: len(os.listdir(folder)) == 2)
        process.kill()
        process.wait()
        pids = {int(pid) for name in os.listdir(folder) for pid in name.split("-")}
        assert len(pids) == 3, "two ranks and the server they were forked from"
        assert wait_until(lambda: not any(alive(pid) for pid in pids))
        assert wait_until(lambda: not list(tmp_path.glob("dtrain-ranks-*")))
    finally:
        process.kill()
        process.wait()
        for name in os.listdir(folder):
            with suppress(ProcessLookupError):
                os.kill(int(name.split("-")[0]), signal.SIGKILL)


@pytest.mark.costly
def test_interpreter_exits_with_open_ranks(tmp_path):
    process = caller(tmp_path, "kept = Ranks(1); print(kept.run(test_ranks.describe, 'a'))")
    try:
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()


def _change_environment(monkeypatch, change):
    """Add the variables ``change(rank)`` to the environment of each rank."""
    environment = LocalRanks.environment
    monkeypatch.setattr(
        LocalRanks, "environment", lambda self, rank, inherited: {**environment(self, rank, inherited), **change(rank)}
    )


def test_rank_that_dies_at_startup_is_named(monkeypatch):
    _change_environment(monkeypatch, lambda rank: {"RANK": "two"} if rank == 1 else {})
    message = r"(?s)before all ranks were ready, rank 1 of 2 died with exit code 1\n.*rank variables must be whole numbers"
    with pytest.raises(RankError, match=message):
        run_ranks(describe, 2, "a")


def test_ranks_that_hang_at_startup_are_named(monkeypatch):
    # Both ranks wait for a third rank, which never starts.
    _change_environment(monkeypatch, lambda rank: {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"})
    monkeypatch.setattr(ranks, "START_TIMEOUT_S", 1.0)
    with pytest.raises(RankError, match=r"run_ranks: ranks \[0, 1\] of 2 did not start within 1 s"):
        run_ranks(describe, 2, "a")
