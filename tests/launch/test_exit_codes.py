"""Exit codes of `dtrain launch` and the rank that it names, beyond the rows of the truth table."""

from __future__ import annotations

import re

import pytest


def test_success_is_silent_and_exits_0(run):
    result = run("print('done')")
    assert (result.code, result.errors) == (0, "")
    assert sorted(result.out.splitlines()) == ["[rank 0] done", "[rank 1] done"]


def test_exception_is_named_with_traceback_of_script_only(run):
    result = run(
        """
        import os, time

        def train():
            raise ValueError("loss is nan\\nsecond line")

        if os.environ["RANK"] == "1":
            train()
        time.sleep(600)
        """
    )
    assert result.code == 1
    (line,) = result.summary
    assert line.endswith(": ValueError: loss is nan; the other ranks were ended")
    trace = [line.removeprefix("[rank 1] ") for line in result.errors.splitlines() if line.startswith("[rank 1] ")]
    assert trace[0] == "Traceback (most recent call last):"
    assert [line.split('"')[1].rpartition("/")[2] for line in trace if line.startswith("  File")] == ["script.py"] * 2
    assert trace[-2:] == ["ValueError: loss is nan", "second line"]


def test_traceback_equals_that_of_plain_python(run, tmp_path):
    import subprocess
    import sys

    source = """
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def inner():
        try:
            1 / 0
        except ZeroDivisionError as error:
            raise Odd("x") from error
    inner()
    """
    result = run(source, n=1)
    plain = subprocess.run([sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=60)
    assert result.errors.splitlines()[:-1] == plain.stderr.splitlines()
    assert result.code == plain.returncode == 1
    assert result.summary == [result.errors.splitlines()[-1]]
    assert result.summary[0].endswith(": Odd")


def test_sys_exit_message_is_printed_and_named(run):
    result = run("import sys; sys.exit('no data in /nowhere')", n=1)
    assert result.code == 1
    assert result.errors.splitlines()[0] == "no data in /nowhere"
    assert result.summary[0].endswith(": no data in /nowhere")


def test_excepthook_of_script_prints_exception(run):
    source = """
    import sys
    sys.excepthook = lambda kind, error, trace: print("hook:", kind.__name__, error, file=sys.stderr)
    raise KeyError("k")
    """
    result = run(source, n=1)
    assert result.errors.splitlines()[0] == "hook: KeyError 'k'"
    assert result.code == 1


def test_exception_in_forked_child_is_not_a_rank_failure(run):
    source = """
    import os
    if os.fork() == 0:
        raise RuntimeError("in the copy")
    os.wait()
    """
    result = run(source, n=1)
    assert result.code == 0
    assert "RuntimeError: in the copy" in result.err
    assert not result.summary


def test_culprit_dying_after_its_peer_is_named(run):
    result = run(
        """
        import os, signal, sys, time
        pid = os.environ["FOLDER"] + "/pid"
        if os.environ["RANK"] == "0":
            with open(pid + ".partial", "w") as file:
                file.write(str(os.getpid()))
            os.rename(pid + ".partial", pid)
            raise ConnectionError("my peer is dying")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while not os.path.exists(pid):
            time.sleep(0.001)
        try:
            while True:
                os.kill(int(open(pid).read()), 0)
                time.sleep(0.001)
        except ProcessLookupError:  # the supervisor has seen the peer end
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert "ConnectionError: my peer is dying" in result.err
    assert result.code == 137
    assert "rank 1 of 2 was killed by SIGKILL" in result.summary[0]


LEAVES = {
    "at once": "os._exit(0)",
    "through the exit handlers": "sys.exit(0)",
    "through slow exit handlers": "import atexit; atexit.register(time.sleep, 1); sys.exit(0)",
    "with a child that holds its connections": "os._exit(0) if os.fork() else time.sleep(600)",  # until the groups' time-out
}


@pytest.mark.parametrize("leave", LEAVES.values(), ids=LEAVES)
def test_rank_exiting_0_during_run_is_named(run, leave):
    result = run(
        f"""
        import os, sys, time
        import torch
        import dtrain as dt
        with dt.init_dist(device="cpu", timeout_s=20) as info:
            torch.distributed.all_reduce(torch.ones(1))
            if info.rank == 1:
                {leave}
            torch.distributed.all_reduce(torch.ones(1))
        """,
        n=3,
    )
    assert result.code == 1
    begin = "dtrain: launch: rank 1 of 3 left early, with exit code 0, while others needed it; "
    assert result.summary[-1].startswith(begin), result


@pytest.mark.parametrize("options", [[], ["--no-preload"]], ids=["fork", "interpreter"])
def test_failed_rank_runs_exit_handlers_but_no_destructors_of_libraries(run, options):
    """After a failed collective the destructors of gloo abort some ranks."""
    result = run(
        """
        import atexit, ctypes, threading, time
        c = ctypes.CDLL(None)
        c.__cxa_atexit(c.abort, None, None)
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread has ended"))).start()
        atexit.register(print, "exit handler has run")
        raise ValueError("the loss is nan")
        """,
        n=1,
        options=options,
    )
    assert result.code == 1
    assert "exit handler has run" in result.out
    assert "thread has ended" in result.out
    assert result.summary[0].endswith("ValueError: the loss is nan")


def test_failure_record_of_earlier_launch_is_ignored(run, tmp_path):
    options = ["--run-dir", str(tmp_path / "again")]
    first = run("raise ValueError('old')", n=1, options=options)
    assert first.summary[0].endswith("ValueError: old")
    second = run("import os; os._exit(4)", n=1, options=options)
    assert second.code == 4
    assert "old" not in second.errors


PREEMPTED = {
    "75 from all": ("time.sleep(rank); sys.exit(75)", 75, ""),
    "75, and a rank that goes on": ("time.sleep(600 * rank); sys.exit(75)", 1, "exited with 75 .* but ranks 1 still running"),
    "75 and 0": ("sys.exit(75 * rank)", 1, "ranks 1 exited with 75 .* but ranks 0 ended with 0"),
    "75 and 3": ("time.sleep(rank / 2); sys.exit([75, 3][rank])", 3, "rank 1 of 2 failed with exit code 3"),
}


@pytest.mark.parametrize(("body", "code", "summary"), PREEMPTED.values(), ids=PREEMPTED)
def test_exit_code_75_counts_only_from_all_ranks(run, body, code, summary):
    result = run(f"import os, sys, time; rank = int(os.environ['RANK']); {body}", options=["--grace", "2"])
    assert result.code == code
    assert re.search(summary, result.errors)
    assert bool(result.errors) == bool(summary)


def test_sigterm_saved_by_all_ranks_returns_75(start):
    job = start(
        """
        import os, signal, sys, time
        def save(number, frame):
            time.sleep(1)
            sys.exit(75)
        signal.signal(signal.SIGTERM, save)
        with open(f"{os.environ['FOLDER']}/{os.environ['RANK']}", "w") as file:
            file.write("ready")
        time.sleep(600)
        """,
        options=["--grace", "60"],
    )
    job.wait_for("0", "1")
    job.process.terminate()
    result = job.wait()
    assert (result.code, result.errors) == (75, "")
