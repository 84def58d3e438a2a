"""``spawn``: real ranks of any function; an error names its rank, and no process stays."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dtrain as dt
from dtrain.dist.collectives import all_gather_numbers
from dtrain.launch import spawn_function
from jobs import LONG_S, wait_until

NEVER_S = 600


def children() -> set[int]:
    """The pids of this process's children, zombies too."""
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before, files = children(), len(os.listdir("/proc/self/fd"))
    yield
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) <= files  # connections of earlier tests may end meanwhile


def spawned(fn, *args, nproc=2, timeout_s=LONG_S):
    return dt.spawn(fn, *args, world_size=nproc, timeout_s=timeout_s)


def fails(fn, *args, nproc=2, timeout_s=LONG_S) -> str:
    with pytest.raises(dt.errors.RankError) as caught:
        spawned(fn, *args, nproc=nproc, timeout_s=timeout_s)
    return str(caught.value)


def load_with_worker(*, then_die: bool) -> int:
    with dt.init_dist():
        # A batch that is too large for a pipe, so the worker opens a socket to send it.
        data, mesh = torch.zeros(8, 2**16), dt.build_mesh()
        loader = dt.build_loader(data, global_batch_size=8, seed=0, num_workers=1, mesh=mesh)
        count = len(next(iter(loader.until("1ep"))))
        if then_die:
            os.kill(os.getpid(), signal.SIGKILL)
        return count


@pytest.mark.costly
def test_loader_workers_of_ranks_leave_no_folders(monkeypatch):
    # The path of a socket may have 107 bytes, so pytest's folder is too deep.
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        assert spawned(lambda: load_with_worker(then_die=False)) == [4, 4]
        assert os.listdir(folder) == []
        assert "was killed by SIGKILL" in fails(lambda: load_with_worker(then_die=True))
        assert os.listdir(folder) == []


def gone(pid: int) -> bool:
    """Return True if no process with this pid runs. A zombie does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_closure_runs_on_spawned_ranks():
    factor, lock = 10, threading.Lock()  # a lock travels to no other process but by a fork

    def run(start: int) -> dict:
        with dt.init_dist(device="cpu") as info, lock:
            return {"rank": info.rank, "sum": sum(row[0] for row in all_gather_numbers([factor * (start + info.rank)]))}

    assert spawned(run, 1) == [{"rank": 0, "sum": 30.0}, {"rank": 1, "sum": 30.0}]


@pytest.mark.costly
def test_single_process_world_can_spawn_and_be_reopened(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)

    def world_size() -> int:
        with dt.init_dist(device="cpu") as info:
            return info.world_size

    for nproc in (1, 2):
        assert world_size() == 1
        assert spawned(world_size, nproc=nproc) == [nproc] * nproc
    assert world_size() == 1
    assert "GLOO_SOCKET_IFNAME" not in os.environ, "a world of one leaves no trace in the environment"


def train() -> float:
    with dt.init_dist(device="cpu"):
        mesh = dt.build_mesh(dp_replicate=-1, dp_shard=1)
        model = dt.shard_model(torch.nn.Linear(2, 1), mesh, strategy="full_shard")
        model(torch.ones(1, 2)).sum().backward()
        gc.collect()
        return dt.dist.global_norm([p.grad for p in model.parameters()]).item()


def test_trained_process_can_spawn():
    """Groups, meshes and a sharded model of the caller are in the fork; to free them there would never end."""
    (answers,) = spawned(lambda: [train(), *dt.spawn(train, world_size=2, timeout_s=LONG_S / 2)], nproc=1)
    assert answers == pytest.approx([3**0.5] * 3, abs=1e-5)  # the norm of three partial derivatives of 1


class Holder:
    """A cycle that holds a process group."""

    def __init__(self) -> None:
        with dt.init_dist(device="cpu"):
            self.group, self.me = torch.distributed.group.WORLD, self


def test_garbage_collected_group_of_caller_does_not_block_rank():
    def run() -> list:
        held = [Holder()]

        def drop() -> int:
            held.clear()
            return gc.collect() >= 0

        return dt.spawn(drop, world_size=1, timeout_s=LONG_S / 3)

    assert spawned(run, nproc=1) == [[True]]


def world_size() -> int:
    with dt.init_dist(device="cpu") as info:
        return info.world_size


def test_rank_that_served_the_store_can_spawn():
    answers = spawned(lambda: [world_size(), *dt.spawn(world_size, world_size=1, timeout_s=LONG_S / 3)])
    assert answers == [[2, 1], [2, 1]]


def test_ranks_have_rank_variables_and_none_of_outer_launch(monkeypatch):
    monkeypatch.setenv("DTRAIN_RUN_DIR", "/outer")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "DTRAIN_LOOPBACK",
        "DTRAIN_RUN_DIR",
        "TORCHELASTIC_USE_AGENT_STORE",
    )
    answers = spawned(lambda: [os.environ.get(name) for name in names])
    assert answers == [[rank, rank, "2", "127.0.0.1", "1", None, None] for rank in ("0", "1")]
    assert "MASTER_PORT" not in os.environ


def test_large_result_is_returned_completely():
    assert spawned(lambda: "x" * 5_000_000, nproc=1) == ["x" * 5_000_000]


@pytest.mark.costly
def test_rank_computes_after_caller_used_torch_threads():
    script = """
        import torch, dtrain as dt
        torch.set_num_threads(4)
        x = torch.ones(800, 800)
        (x @ x).sum(), torch.sin(torch.ones(4_000_000)).sum()  # OpenMP's threads are started
        print(dt.spawn(lambda: [float((x @ x)[0, 0]), torch.get_num_threads()], world_size=1, timeout_s=60))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=LONG_S)
    assert done.stdout == "[[800.0, 1]]\n", done.stderr


def test_first_failure_ends_other_ranks_and_raises_its_traceback():
    def run() -> None:
        with dt.init_dist(device="cpu") as info:
            if info.rank == 1:
                raise ValueError("disk full")
            all_gather_numbers([1.0])  # fails because of rank 1, and is not reported

    text = fails(run, nproc=3)
    head, *rest = text.splitlines()
    assert head.endswith("run: rank 1 of 3 failed: ValueError: disk full")
    assert rest[0] == "Traceback (most recent call last):"
    assert 'raise ValueError("disk full")' in text
    assert rest[-1] == "ValueError: disk full"


def test_other_ranks_are_killed_when_they_ignore_sigterm(monkeypatch, tmp_path):
    monkeypatch.setattr(spawn_function, "GRACE_S", 0.2)

    def run() -> None:
        if os.environ["RANK"] == "1":
            wait_until(lambda: (tmp_path / "ready").exists())
            raise KeyError("x")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (tmp_path / "pid").write_text(str(os.getpid()))
        (tmp_path / "ready").touch()
        time.sleep(NEVER_S)

    assert "rank 1 of 2 failed: KeyError: 'x'" in fails(run)
    assert gone(int((tmp_path / "pid").read_text()))


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raised() -> None:
    try:
        raise ValueError("disk full")
    finally:
        threading.Timer(0.3, torch.distributed.destroy_process_group).start()
        time.sleep(0.4)  # the peers fail before this rank's error leaves the function


@pytest.mark.costly
@pytest.mark.parametrize(
    ("way", "text"), [(killed, "was killed by SIGKILL; often the"), (raised, "failed: ValueError: disk full")]
)
def test_rank_with_lost_peer_is_not_reported_as_cause(way, text):
    def run() -> None:
        info = dt.init_dist(device="cpu")
        if info.rank == 1:
            way()
        torch.distributed.barrier()  # torch's own error, at once

    assert f"rank 1 of 3 {text}" in fails(run, nproc=3)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("way", "text"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGUSR1), "rank 0 of 1 was killed by SIGUSR1"),
        (lambda: os._exit(3), "rank 0 of 1 exited with code 3"),
        (lambda: os._exit(0), "rank 0 of 1 exited with code 0 before it returned"),
        (lambda: sys.exit(3), "rank 0 of 1 exited with code 3"),
        (lambda: sys.exit("no data"), "rank 0 of 1 exited with code 1: no data"),
        (lambda: sys.exit(75), "rank 0 of 1 exited with code 75 before it returned"),
        (lambda: signal.raise_signal(signal.SIGINT), "rank 0 of 1 failed: KeyboardInterrupt: "),
    ],
)
def test_rank_failure_is_described_for_every_exit(way, text):
    assert text in fails(way, nproc=1)


def test_exit_code_0_is_no_failure():
    assert spawned(lambda: sys.exit(), nproc=2) == [None, None]


def test_dist_error_without_other_failure_is_reported():
    def run() -> None:
        with dt.init_dist(device="cpu") as info:
            if info.rank == 1:
                raise dt.errors.DistError("mine")
            time.sleep(NEVER_S)

    assert "rank 1 of 2 failed: DistError: mine" in fails(run)


@pytest.mark.costly
def test_ranks_exceeding_timeout_are_named_and_killed(monkeypatch):
    monkeypatch.setattr(spawn_function, "GRACE_S", 0.2)

    def run() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)

    text = fails(run, nproc=3, timeout_s=10.0)
    assert text.endswith(
        "ranks [1] of 3 did not finish within timeout_s and were ended. Check whether the ranks wait for each other."
    )


def test_child_processes_of_rank_end_with_it(tmp_path):
    def run() -> int:
        return subprocess.Popen(["sleep", str(NEVER_S)]).pid

    (pid,) = spawned(run, nproc=1)
    wait_until(lambda: gone(pid))
    assert gone(pid)


def test_buffered_output_is_printed_once(capfd):
    print("before", end="", flush=False)
    spawned(lambda: print("hello"), nproc=2)
    assert sorted(capfd.readouterr().out.removeprefix("before").splitlines()) == ["hello", "hello"]


def test_ranks_have_default_signal_handlers_and_own_process_group():
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        answers = spawned(lambda: [signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, os.getpgid(0) == os.getpid()], nproc=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert answers == [[True, True]]


def test_spawn_works_in_threaded_caller_without_warnings(recwarn):
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert spawned(lambda: 1) == [1, 1]
    finally:
        stop.set()
        thread.join()
    assert not recwarn.list


def test_fork_deprecation_warning_does_not_leak_child(monkeypatch):
    import warnings

    real = os.fork

    def fork_of_python_3_12() -> int:
        pid = real()
        if pid:
            warnings.warn(  # noqa: TID251
                "This process is multi-threaded, use of fork() may lead to deadlocks", DeprecationWarning, stacklevel=2
            )
        return pid

    monkeypatch.setattr(spawn_function.os, "fork", fork_of_python_3_12)
    assert spawned(lambda: 1) == [1, 1]


def test_ctrl_c_ends_all_ranks(tmp_path):
    def run() -> None:
        (tmp_path / os.environ["RANK"]).write_text(str(os.getpid()))
        time.sleep(NEVER_S)

    def interrupt() -> None:
        wait_until(lambda: all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        spawned(run)
    thread.join()
    assert all(gone(int((tmp_path / rank).read_text())) for rank in "01")


@pytest.mark.costly
@pytest.mark.parametrize("call", ["fork", "waitpid"])
@pytest.mark.parametrize("first", [1, 2])
def test_ctrl_c_during_fork_or_wait_leaves_no_rank(monkeypatch, call, first):
    """At that moment the process is there, or has just ended, and no record of it exists yet."""
    pids, moments = [], []

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: int) -> Any:
            result = real(*args)
            if name == "fork":
                pids.append(result)
            if name == call and result != 0:  # 0: this is the fork
                moments.append(result)
                if len(moments) == first:
                    signal.raise_signal(signal.SIGINT)
            return result

        return run

    for name in ("fork", "waitpid"):
        monkeypatch.setattr(os, name, watched(name, getattr(os, name)))
    with pytest.raises(KeyboardInterrupt):
        spawned(lambda: time.sleep(NEVER_S if call == "fork" else 0))
    assert pids
    assert all(map(gone, pids))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells children of their parent's death on Linux")
def test_ranks_die_with_caller(tmp_path):
    script = f"""
        import os, time, dtrain as dt
        def run():
            open(os.path.join({str(tmp_path)!r}, os.environ["RANK"]), "w").write(str(os.getpid()) + "\\n")
            time.sleep({NEVER_S})
        dt.spawn(run, world_size=2)
    """
    caller = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    files = [tmp_path / "0", tmp_path / "1"]
    wait_until(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files))
    caller.kill()
    caller.wait()
    wait_until(lambda: all(gone(int(file.read_text())) for file in files))
    assert caller.returncode == -signal.SIGKILL


def test_rank_start_failure_raises_and_ends_started_ranks(monkeypatch):
    real, started = os.fork, []

    def no_third() -> int:
        if len(started) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(1)
        return real()

    monkeypatch.setattr(spawn_function.os, "fork", no_third)
    assert "spawn: rank 2 of 4 could not be started: Resource temporarily unavailable. Use fewer ranks." in fails(
        lambda: time.sleep(NEVER_S), nproc=4
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [({"world_size": value}, "world_size must be an integer from 1 to 256, got") for value in (0, -1, 257, 1.5, True, "2")]
    + [({"timeout_s": value}, "timeout_s must be a finite number above 0, got") for value in (0, -1, float("nan"))],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(dt.errors.ConfigError, match=f"spawn: {message}"):
        dt.spawn(print, **{"world_size": 1, **options})


def test_open_process_group_is_refused(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with (
        dt.init_dist(device="cpu"),
        pytest.raises(dt.errors.ConfigError, match=r"spawn: a process group is open in this process. Call spawn"),
    ):
        dt.spawn(print, world_size=1)


def test_initialized_cuda_is_refused(monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    with pytest.raises(dt.errors.ConfigError, match="spawn: CUDA has started in this process, and a fork cannot use it"):
        dt.spawn(print, world_size=1)


def test_non_json_result_is_refused():
    with pytest.raises(
        dt.errors.ConfigError,
        match=r"spawn: .*: the result of rank 0 must be plain data, which JSON can hold, got Tensor: .*not JSON serializable",
    ):
        spawned(lambda: torch.ones(1), nproc=1)
