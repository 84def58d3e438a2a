"""The process that the user started ends the job after any end of its supervisor, and nothing that is not of the job."""

from __future__ import annotations

import fcntl
import os
import pty
import shlex
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from dtrain.launch import processes
from jobs import wait_until

SLEEPING = """
    import os, time
    with open(f"{os.environ['FOLDER']}/{os.environ['RANK']}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
"""
PLAIN = ["--no-preload"]  # these tests do not depend on it


def ask_until_it_ends(job, number=signal.SIGINT) -> int:
    """Ask twice, with a longer gap than that of one request; return the exit code."""
    job.process.send_signal(number)
    time.sleep(1)
    assert job.process.poll() is None, "the first time was enough, and the second is what is tested"
    job.process.send_signal(number)
    return job.process.wait(timeout=90)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_job_with_stopped_supervisor(start, number):
    job = start(SLEEPING, options=PLAIN)
    job.wait_for("0", "1")
    os.kill(job.supervisor(), signal.SIGSTOP)
    assert ask_until_it_ends(job, number) == 128 + number
    assert job.wait().summary == [f"dtrain: launch: {'interrupted' if number == signal.SIGINT else 'terminated'}; ranks ended"]


def test_front_does_not_block_on_unread_stderr(start):
    read, write = os.pipe()
    try:
        job = start(SLEEPING, options=PLAIN, stderr=write)
        job.wait_for("0", "1")
        os.set_blocking(write, False)
        for size in (4096, 1):
            try:
                while True:
                    os.write(write, b"x" * size)
            except BlockingIOError:
                pass
        os.set_blocking(write, True)
        os.kill(job.supervisor(), signal.SIGKILL)
        assert job.process.wait(timeout=90) == 128 + signal.SIGKILL
    finally:
        os.close(read)
        os.close(write)


def test_children_of_shell_replaced_by_launcher_survive(tmp_path):
    script, pid_file = tmp_path / "script.py", tmp_path / "pid"
    script.write_text("print('said')")
    out = shlex.quote(str(tmp_path / "out"))
    launch = shlex.join([sys.executable, "-m", "dtrain", "launch", "-n", "1", *PLAIN, str(script)])
    # The first child starts a second child when the job is over; the second child is in a session of its own.
    line = f"setsid sleep 600 & echo $! > {pid_file}; exec {launch} > >(cat > {out}.part; sleep 0.3; mv {out}.part {out})"
    assert subprocess.run(["bash", "-c", line], cwd=tmp_path, timeout=90, check=False).returncode == 0
    sleeper = int(pid_file.read_text())
    try:
        assert Path(f"/proc/{sleeper}/comm").read_text() == "sleep\n"
    finally:
        os.kill(sleeper, signal.SIGKILL)
    wait_until((tmp_path / "out").exists)
    assert (tmp_path / "out").read_text() == "said\n"


def test_supervisor_ends_ranks_when_front_is_killed(start):
    job = start(
        """
        import os, subprocess, sys, time
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open(f"{os.environ['FOLDER']}/{os.environ['RANK']}", "w") as file:
            file.write(str(child.pid))
        time.sleep(600)
        """,
        options=PLAIN,
    )
    job.wait_for("0", "1")
    supervisor = job.supervisor()
    named = Path(f"/proc/{supervisor}/comm").read_text(), Path(f"/proc/{supervisor}/cmdline").read_bytes().rstrip(b"\0")
    assert named == ("rank-supervisor\n", b"rank-supervisor")
    ours = [pid for pid, command in job.processes().items() if "dtrain launch" in command]  # as pkill -f finds them
    assert ours == [job.pid]
    os.kill(job.pid, signal.SIGKILL)
    job.process.wait(timeout=90)
    job.wait_until_gone()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ignored_at_start_ends_nothing(start, number):
    """Start a process as a shell starts background jobs of a script, or as ``nohup`` does."""
    job = start(SLEEPING, options=PLAIN, preexec_fn=lambda: signal.signal(number, signal.SIG_IGN))
    job.wait_for("0", "1")
    for _ in range(2):
        job.process.send_signal(number)
        time.sleep(0.5)
    assert job.process.poll() is None
    other = signal.SIGTERM if number != signal.SIGTERM else signal.SIGINT
    job.process.send_signal(other)
    assert job.wait().code == 128 + other


def test_unread_terminal_blocks_neither_training_nor_termination(start):
    reader, writer = pty.openpty()
    try:
        job = start(
            """
            import os, time
            for k in range(3000):
                print("x" * 1000)
            open(os.environ["FOLDER"] + "/done", "w").write("done")
            time.sleep(600)
            """,
            n=1,
            options=PLAIN,
            stdin=writer,
            stdout=writer,
            stderr=writer,
        )
        job.wait_for("done")
        assert not fcntl.fcntl(writer, fcntl.F_GETFL) & os.O_NONBLOCK
        assert ask_until_it_ends(job) == 130
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("often", [1, 2])
def test_ctrl_c_restores_terminal_state(start, often):
    """Typed at the terminal that the job has to itself, while a rank is in the middle of a coloured line."""
    reader, writer = pty.openpty()
    before = termios.tcgetattr(writer)
    try:
        job = start(
            f"""
            import os, signal, time
            if {often} == 2:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            print("\\033[31mred", end="", flush=True)
            open(os.environ["FOLDER"] + "/" + os.environ["RANK"], "w").write("up")
            time.sleep(600)
            """,
            options=[*PLAIN, "--grace", "3600"],
            wrap=["setsid", "--ctty"],
            stdin=writer,
            stdout=writer,
            stderr=writer,
        )
        job.wait_for("0", "1")
        for _ in range(often):
            os.write(reader, b"\x03")
            time.sleep(1 if often == 2 else 0)
        assert job.process.wait(timeout=90) == 130
        assert termios.tcgetattr(writer) == before
        assert not fcntl.fcntl(writer, fcntl.F_GETFL) & os.O_NONBLOCK
        shown = os.read(reader, 1 << 16).decode()
        begin, *lines = shown.split("\r\n")
        assert begin.startswith("dtrain: launch: starting 2 ranks; "), shown
        coloured = [line.removeprefix("^C" * often) for line in lines[:2]]
        assert sorted(coloured) == [f"[rank {rank}] \x1b[31mred\x1b[0m" for rank in (0, 1)], shown
        assert lines[2:] == ["dtrain: launch: interrupted; ranks ended", ""]
    finally:
        os.close(reader)
        os.close(writer)


def test_descendants_exclude_existing_sessions():
    child = subprocess.Popen(["sleep", "600"])
    before = processes.list_sessions()
    job = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        wait_until(lambda: os.getsid(job.pid) == job.pid)
        left = processes.descendants(exclude_sessions=before)
        assert job.pid in left
        assert child.pid not in left
    finally:
        for process in (child, job):
            process.kill()
            process.wait()


def test_interrupt_ends_wait_for_unread_output_and_keeps_exit_code(start):
    job = start(
        """
        import os, sys
        for k in range(3000):
            print("x" * 1000)
        with open(os.environ["FOLDER"] + "/pid", "w") as file:
            file.write(str(os.getpid()))
        sys.exit(3)
        """,
        n=1,
        options=PLAIN,
    )
    pid = job.wait_for("pid")[0]
    wait_until(lambda: int(pid) not in job.processes())  # from then on the supervisor waits for a reader only
    time.sleep(0.5)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(timeout=8) == 3  # less than the patience that it has otherwise
    job.wait()
