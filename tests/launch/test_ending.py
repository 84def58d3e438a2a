"""Nothing outlives the launcher, whichever process dies; and signals reach the ranks. Plain cases are rows of the table."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from jobs import wait_until

# Every rank starts a child that has its own session and ignores all polite signals, and reports when all are up.
WITH_HIDING_CHILD = """
    import os, signal, subprocess, sys, time
    rank, folder = os.environ["RANK"], os.environ["FOLDER"]
    child = f'''
    import os, signal, time
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
    with open("{folder}/child-{rank}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
    '''
    import textwrap
    subprocess.Popen([sys.executable, "-c", textwrap.dedent(child)], start_new_session=True).wait()
    while not os.path.exists(f"{folder}/child-{rank}"):
        time.sleep(0.01)
    with open(f"{folder}/rank-{rank}", "w") as file:
        file.write(str(os.getpid()))
"""
ALL_UP = ("child-0", "child-1", "rank-0", "rank-1")

STUBBORN = """
    import os, signal, time
    signal.signal(signal.SIGINT, lambda *_: print("got SIGINT"))
    signal.signal(signal.SIGTERM, lambda *_: print("got SIGTERM"))
    with open(f"{os.environ['FOLDER']}/{os.environ['RANK']}", "w") as file:
        file.write("ready")
    while True:
        time.sleep(600)
"""

SLEEPING = """
    import os, time
    with open(f"{os.environ['FOLDER']}/{os.environ['RANK']}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
"""


def test_killed_supervisor_ends_ranks_and_detached_grandchildren(start):
    job = start(WITH_HIDING_CHILD + "    time.sleep(600)")
    pids = [int(text) for text in job.wait_for(*ALL_UP)]
    assert set(pids) <= set(job.processes())  # or the test would pass for nothing
    os.kill(job.supervisor(), signal.SIGKILL)
    result = job.wait()
    assert result.code == 128 + signal.SIGKILL
    assert "supervisor was killed by SIGKILL" in result.summary[0]
    assert not job.processes()


def test_ranks_die_with_supervisor_while_front_is_stopped(start):
    job = start(SLEEPING)
    ranks = {int(text) for text in job.wait_for("0", "1")}
    supervisor = job.supervisor()
    os.kill(job.pid, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: not ranks & set(job.processes()))  # a dead process that was not reaped shows no environment
    os.kill(job.pid, signal.SIGCONT)
    assert job.wait().code == 128 + signal.SIGKILL


WITH_WORKERS = """
    import os, time
    import torch
    import dtrain as dt
    loader = dt.build_loader(torch.zeros(64, 2**16), global_batch_size=8, seed=0, num_workers=1, shuffle=False)
    batches = iter(loader.until("1ep"))
    next(batches)
    with open(f"{os.environ['FOLDER']}/{os.environ['RANK']}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
"""


@pytest.mark.parametrize("killed", ["launcher", "supervisor", "rank"])
def test_killed_job_leaves_no_folders_of_loader_workers(start, killed):
    # The path of a socket may have 107 bytes, so pytest's folder is too deep.
    short = Path(tempfile.mkdtemp(prefix="t-"))
    job = start(WITH_WORKERS, env={"TMPDIR": str(short)}, options=["--grace", "1"])
    try:
        ranks = [int(text) for text in job.wait_for("0", "1")]
        folders = list(short.iterdir())
        assert len(folders) == 2, "a folder of each rank"
        assert all(len(list(folder.iterdir())) == 1 for folder in folders), "the socket of its worker"
        os.kill({"launcher": job.pid, "supervisor": job.supervisor(), "rank": ranks[1]}[killed], signal.SIGKILL)
        job.wait()
        job.wait_until_gone()
        assert not list(short.iterdir())
    finally:
        shutil.rmtree(short)


def test_leftover_child_gets_grace_to_end(start):
    job = start(
        """
        import os, signal, sys, time
        folder = os.environ["FOLDER"]
        if os.fork() == 0:
            def finish(number, frame):
                time.sleep(0.3)
                open(folder + "/finished", "w").write("yes")
                os._exit(0)
            signal.signal(signal.SIGTERM, finish)
            open(folder + "/up", "w").close()
            time.sleep(600)
        while not os.path.exists(folder + "/up"):
            time.sleep(0.01)
        """,
        n=1,
        options=["--grace", "60"],
    )
    assert job.wait().code == 0
    assert (job.folder / "finished").read_text() == "yes"


def test_other_ranks_get_sigterm_before_sigkill(run):
    result = run(
        """
        import os, signal, sys, time
        up = os.environ["FOLDER"] + "/up"
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("saved my logs"))
            open(up, "w").close()
            time.sleep(600)
        while not os.path.exists(up):
            time.sleep(0.01)
        sys.exit(6)
        """,
        options=["--grace", "60"],
    )
    assert result.code == 6
    assert "[rank 0] saved my logs" in result.err
    assert len(result.summary) == 1


def test_first_signal_is_forwarded_and_ranks_are_killed_after_grace(start):
    job = start(STUBBORN, options=["--grace", "1"])
    job.wait_for("0", "1")
    job.process.send_signal(signal.SIGINT)
    result = job.wait()
    assert result.code == 130
    assert sorted(result.out.splitlines()) == ["[rank 0] got SIGINT", "[rank 1] got SIGINT"]


def test_second_sigterm_kills_immediately(start):
    job = start(STUBBORN, options=["--grace", "3600"])
    job.wait_for("0", "1")
    job.process.terminate()
    time.sleep(1)  # longer than the time in which a repetition counts as the same request
    assert job.process.poll() is None
    job.process.terminate()
    assert job.wait().code == 143


def test_duplicated_signal_counts_as_one_request(start):
    """The command ``timeout`` signals its child and then the whole process group; a terminal beside it does the same."""
    job = start(
        """
        import os, signal, sys, time
        def save(number, frame):
            signal.signal(number, signal.SIG_IGN)
            time.sleep(1)
            sys.exit(75)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, save)
        with open(f"{os.environ['FOLDER']}/{os.environ['RANK']}", "w") as file:
            file.write("ready")
        time.sleep(600)
        """,
        options=["--grace", "60"],
    )
    job.wait_for("0", "1")
    job.process.send_signal(signal.SIGTERM)
    job.process.send_signal(signal.SIGINT)  # another signal: two of the same could melt into one
    assert job.wait().code == 75


@pytest.mark.parametrize(
    ("number", "code", "options"),
    [
        pytest.param(signal.SIGTERM, 75, ()),
        pytest.param(signal.SIGTERM, 75, ("--no-preload",), marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 75, (), marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, 75, ("--no-preload",)),
        pytest.param(signal.SIGUSR1, 0, ()),
        pytest.param(signal.SIGUSR1, 0, ("--no-preload",), marks=pytest.mark.slow),
    ],
)
def test_signal_during_interpreter_shutdown_keeps_exit_code(start, number, code, options):
    """While Python takes its modules down, it has given every signal that was handled its default back, which is death."""
    job = start(
        f"""
        import os, signal, sys, time
        import dtrain  # then it is worth preloading
        signal.signal({number:d}, lambda *_: None)
        class Slow:
            def __del__(self, open=open, name=os.environ["FOLDER"] + "/leaving-" + os.environ["RANK"], sleep=time.sleep):
                with open(name, "w") as file:
                    file.write("now")
                sleep(3)
        slow = Slow()
        sys.exit({code})
        """,
        options=["--grace", "60", "--stop-signal", "USR1", *options],
    )
    job.wait_for("leaving-0", "leaving-1")
    job.process.send_signal(number)
    result = job.wait()
    assert (result.code, result.errors) == (code, "")


def test_second_signal_after_failure_kills_immediately_and_keeps_cause(start):
    job = start(
        """
        import os, signal, sys, time
        folder = os.environ["FOLDER"]
        if os.environ["RANK"] == "0":
            def stay(number, frame):
                open(folder + "/asked", "w").write("yes")
                time.sleep(600)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, stay)
            open(folder + "/up", "w").close()
            time.sleep(600)
        while not os.path.exists(folder + "/up"):
            time.sleep(0.01)
        sys.exit(8)
        """,
        options=["--grace", "3600"],
    )
    job.wait_for("asked")
    job.process.send_signal(signal.SIGINT)
    time.sleep(1)  # longer than the time in which a repetition counts as the same request
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    result = job.wait()
    assert result.code == 8
    assert "rank 1 of 2" in result.summary[0]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_forwarded_signal_reaches_ranks_but_not_their_children(start, number):
    job = start(
        """
        import os, signal, sys, time
        rank, folder = os.environ["RANK"], os.environ["FOLDER"]
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGUSR1, lambda *_: open(f"{folder}/child-asked", "w").write("yes"))
            signal.signal(signal.SIGUSR2, signal.getsignal(signal.SIGUSR1))
            time.sleep(600)
        def asked(number, frame):
            time.sleep(0.5)  # for a child that was asked, too
            os.kill(child, signal.SIGKILL)
            os.wait()
            sys.exit(0)
        signal.signal(signal.SIGUSR1, asked)
        signal.signal(signal.SIGUSR2, asked)
        with open(f"{folder}/{rank}", "w") as file:  # or the handler's exit may come in its finalizer, and is lost there
            file.write("ready")
        time.sleep(600)
        """
    )
    job.wait_for("0", "1")
    job.process.send_signal(number)
    assert job.wait().code == 0
    assert not (job.folder / "child-asked").exists()


def test_ranks_have_default_signal_handlers_despite_inherited_ones(run):
    def ignore_all():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM})

    result = run(
        """
        import os, signal
        assert os.getsid(0) == os.getpid()
        handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]
        assert handlers == [signal.SIG_DFL] * 3, handlers
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
        """,
        preexec_fn=ignore_all,
    )
    assert (result.code, result.errors) == (0, "")


def test_interrupt_of_single_rank_shows_traceback_and_exits_130(start):
    job = start(SLEEPING)
    pid = int(job.wait_for("0", "1")[1])
    os.kill(pid, signal.SIGINT)
    result = job.wait()
    assert result.code == 130
    assert "[rank 1] KeyboardInterrupt" in result.err
    assert "rank 1 of 2 failed with exit code 130" in result.summary[0]
    assert result.summary[0].endswith(": KeyboardInterrupt; the other ranks were ended")


def few_files(most):
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def test_too_many_ranks_for_open_file_limit_are_refused(run):
    result = run(SLEEPING, n=16, preexec_fn=few_files(64))
    assert result.code == 2
    assert (
        result.err == "dtrain: launch: the hard limit of open files must be at least 100 for 16 ranks, got 64. "
        "Run `ulimit -n 100` as root before the start, or use at most 5 ranks.\n"
    )


def test_soft_limit_of_open_files_is_raised_to_hard_limit(run):
    soft = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 4096))  # noqa: E731
    result = run("print('here')", n=8, preexec_fn=soft)
    assert (result.code, len(result.out.splitlines())) == (0, 8), result.err


WITH_A_LOW_LIMIT = """
import os, resource, torch, dtrain as dt
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 4096))
with dt.init_dist() as info:
    model = dt.shard_model(torch.nn.Linear(4, 4), dt.build_mesh(), strategy="full_shard")
    model(torch.ones(1, 4))
    print("open", len(os.listdir("/proc/self/fd")), flush=True)
"""


@pytest.mark.parametrize("ranks", [2, *(pytest.param(more, marks=pytest.mark.slow) for more in (4, 8))])
def test_ranks_raise_their_limit_of_open_files_and_stay_below_the_number_asked_for(run, ranks):
    result = run(WITH_A_LOW_LIMIT, n=ranks)
    opened = [int(line.split()[-1]) for line in result.out.splitlines()]
    assert (result.code, len(opened)) == (0, ranks), result.err
    assert max(opened) <= 40 + 4 * ranks


# The fork of the third rank fails, wherever it is made: by the supervisor, which is a fork itself, or by the preloaded process.
FAILING_FORK = """
import errno, os
forks, first, real = 0, os.getpid(), os.fork
def fork():
    global forks
    if {condition}:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    forks += 1
    return real()
os.fork = fork
"""


@pytest.mark.parametrize(
    ("module", "condition", "option"),
    [
        ("sitecustomize", "forks == 3", ["--no-preload"]),
        ("forks", "forks == 3 and os.getpid() != first", ["--preload", "forks"]),
    ],
    ids=["plain", "preloaded"],
)
def test_rank_start_failure_ends_started_ranks(run, tmp_path, module, condition, option):
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / f"{module}.py").write_text(FAILING_FORK.format(condition=condition))
    result = run(SLEEPING, n=4, options=option, env={"PYTHONPATH": str(tmp_path / "path")})
    assert result.code == 1
    assert re.fullmatch(r"dtrain: launch: rank 2 of 4 could not be started: Resource .*; use fewer", result.summary[0]), (
        result.err
    )


def test_rank_stuck_after_exception_is_reported(run):
    source = """
    import os, threading, time
    if os.environ["RANK"] == "1":
        threading.Thread(target=time.sleep, args=(600,)).start()
        raise ValueError("boo")
    time.sleep(600)
    """
    result = run(source, options=["--grace", "0.5"])
    assert result.code == 1
    assert "rank 1 of 2 failed" in result.summary[0]
    assert "ValueError: boo" in result.summary[0]


@pytest.mark.parametrize(
    ("when", "number"),
    [
        ("while the ranks are on their way", signal.SIGUSR1),
        ("between two starts", signal.SIGUSR1),
        ("between two starts", signal.SIGTERM),
    ],
)
def test_stop_signal_ends_job_when_no_rank_is_running(start, tmp_path, when, number):
    (tmp_path / "slow").mkdir()
    slow = "import os, time; open(os.environ['FOLDER'] + '/importing', 'w').write('x'); time.sleep(600)"
    (tmp_path / "slow" / "slow_module.py").write_text(slow)
    options = ["--stop-signal", "USR1", "--max-restarts", "50"]
    if when == "between two starts":
        job = start("import sys; sys.exit(5)", options=options)
        line = ""
        while "in 4 s" not in line:
            line = job.process.stderr.readline()
            assert line, "the launcher has ended"
    else:
        job = start("pass", options=[*options, "--preload", "slow_module"], env={"PYTHONPATH": str(tmp_path / "slow")})
        job.wait_for("importing")
    job.process.send_signal(number)
    assert job.wait().code == 128 + number


def test_garbage_in_heartbeat_pipe_is_harmless(run):
    result = run(
        "", n=1, options=["-c"], target=["bash", "-c", "echo hello >&$DTRAIN_HEARTBEAT_FD; sleep 0.3; echo done"], shown=None
    )
    assert (result.code, result.out, result.errors) == (0, "done\n", "")


@pytest.mark.parametrize(
    ("body", "options"),
    [("store.set('alive', 'yes')", []), ("pass", ["--no-preload"])],
    ids=["preloaded, and ranks that notice it", "plain, and ranks that do not"],
)
def test_death_of_store_process_is_named(start, body, options):
    job = start(
        f"""
        import os, time
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()
        with open(f"{{os.environ['FOLDER']}}/{{os.environ['RANK']}}", "w") as file:
            file.write(str(os.getpid()))
        while True:
            {body}
            time.sleep(0.01)
        """,
        options=options,
    )
    ranks = {int(pid) for pid in job.wait_for("0", "1")}
    children = Path(f"/proc/{job.supervisor()}/task/{job.supervisor()}/children").read_text().split()
    listening = [int(pid) for pid in children if int(pid) not in ranks and len(os.listdir(f"/proc/{pid}/task")) > 1]
    assert len(listening) == 1  # the preloaded process has one thread, the store's has more
    os.kill(listening[0], signal.SIGKILL)
    result = job.wait()
    assert result.code != 0
    assert f"the process that serves the ranks' store ended early (killed by SIGKILL, pid {listening[0]})" in result.summary[-1]


@pytest.mark.parametrize("options", [["--no-preload"], ["--preload", "json"]], ids=["plain", "preloaded"])
def test_interrupt_during_interpreter_start_is_delivered_at_script_start(start, tmp_path, options):
    place = tmp_path / "customised"
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        textwrap.dedent(
            """
            import os, signal, sys, time
            if "RANK" in os.environ and "FOLDER" in os.environ:
                with open(f"{os.environ['FOLDER']}/up{os.environ['RANK']}", "w") as file:
                    file.write("here")
                while signal.SIGINT not in signal.sigpending():
                    time.sleep(0.01)
            """
        )
    )
    source = """
    import os, time
    print("begun", flush=True)
    with open(f"{os.environ['FOLDER']}/up{os.environ['RANK']}", "w") as file:
        file.write("here")
    time.sleep(600)
    """
    path = os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])
    job = start(source, options=options, env={"PYTHONPATH": path})
    job.wait_for("up0", "up1")
    job.process.send_signal(signal.SIGINT)
    result = job.wait()
    assert (result.code, result.errors) == (130, "dtrain: launch: interrupted; ranks ended\n")
    assert ("begun" in result.out) == (options != ["--no-preload"])


@pytest.mark.parametrize("options", [["--no-preload"], ["--preload", "json"]], ids=["plain", "preloaded"])
def test_children_of_script_have_no_blocked_signals(run, options):
    source = """
    import subprocess, sys
    code = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    subprocess.run([sys.executable, "-c", code], check=True)
    """
    result = run(source, n=1, options=options)
    assert (result.code, result.out) == (0, "[]\n"), result.err
