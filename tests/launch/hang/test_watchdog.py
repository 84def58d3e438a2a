"""Asking real processes for their stacks: with the interpreter held, in a fork, stopped, and one that cannot answer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from dtrain import launch_protocol
from dtrain.launch.rank_records import RankProgress
from dtrain.launch.watchdog import PATIENCE_S, DumpTargets, RankDump, remove_empty_dumps
from dtrain.testing.fault_injection import patch_calls
from jobs import LONG_S, wait_until

START = """
import os, re, signal, sys, time
from pathlib import Path
from dtrain.launch.rank_main import register_stack_dump
says, stacks = map(Path, sys.argv[1:])
partial = says.with_suffix(".partial")
def prepare():
    partial.write_text(str(os.getpid()))
def ready():
    prepare()
    partial.rename(says)
"""
PROGRAMS = {
    "sleeps": """
register_stack_dump(stacks)
prepare()
def here():
    os.rename(partial, says)  # in C: who sees that it is ready finds it here
    time.sleep(600)
here()
""",
    # One call of the regular expression engine, which never releases the interpreter and outlasts every timeout.
    "holds-the-gil": """
register_stack_dump(stacks)
prepare()
def here():
    os.rename(partial, says)  # in C: who sees that it is ready finds it here
    re.match("(a|a)+b", "a" * 99)
here()
""",
    "forked": """
if os.fork():
    os.wait()
    sys.exit()
register_stack_dump(stacks)
prepare()
def here():
    os.rename(partial, says)  # in C: who sees that it is ready finds it here
    time.sleep(600)
here()
""",
    "stopped": """
register_stack_dump(stacks)
ready()
os.kill(os.getpid(), signal.SIGSTOP)
""",
    "no-handler": """
ready()
time.sleep(600)
""",
    "tells-of-the-signal": """
from dtrain import launch_protocol
signal.signal(launch_protocol.STACKS_SIGNAL, lambda *_: says.with_name("signalled").touch())
ready()
while True:
    time.sleep(600)
""",
    # A handler that is no code, as the kernel sees it: the process dies of SIGSEGV where faulthandler would have walked.
    "dies-of-the-signal": """
import ctypes
from dtrain import launch_protocol
stacks.parent.mkdir()
stacks.write_text('Thread 0x01 (most recent call first):\\n  File "/of/another/thread.py", line 1 in run\\n')
libc = ctypes.CDLL(None)
libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.signal(launch_protocol.STACKS_SIGNAL, 16)
ready()
time.sleep(600)
""",
}


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], int]]:
    """Start a program, and give the pid of the process that has said that it is ready."""
    pids: list[int] = []
    processes: list[subprocess.Popen[bytes]] = []

    def start_one(program: str) -> int:
        says, script = tmp_path / "ready", tmp_path / "program.py"
        script.write_text(START + PROGRAMS[program])
        processes.append(subprocess.Popen([sys.executable, script, says, launch_protocol.stacks_file(tmp_path, 0)]))
        wait_until(says.exists)
        pids.append(int(says.read_text()))
        return pids[-1]

    yield start_one
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in processes:
        process.wait(LONG_S)


def suspects(folder: Path, pid: int, *, phase: bool = False) -> DumpTargets:
    seen = {0: RankProgress(phase="open", at=0.0, passed=3, doing="step")} if phase else {}
    return DumpTargets(run_dir=folder, world_size=2, timeout_s=7.0, pids={0: pid}, exit_codes={1: 0}, progress=seen)


def inspected(asked: DumpTargets, *, ask: int | None = None) -> list[str]:
    now = time.monotonic()
    inspection = RankDump(asked, query_fd=ask, now=now)
    while (poll_at := inspection.poll(now, exit_codes={})) is not None:
        assert now < poll_at <= now + PATIENCE_S
        time.sleep(poll_at - now)
        now = time.monotonic()
    return inspection.finish()


@pytest.mark.parametrize("program", ["sleeps", "holds-the-gil", "forked"])
def test_inspection_reports_stack_of_rank(start, tmp_path, program):
    pid = start(program)
    lines = inspected(suspects(tmp_path, pid))
    assert lines[1].startswith(f"  rank 0: {tmp_path / 'program.py'}:"), lines
    assert lines[1].endswith(" in here"), lines
    assert state(pid) in "SR"  # it continues as before


def test_stopped_rank_is_named_and_not_resumed(start, tmp_path):
    pid = start("stopped")
    wait_until(lambda: state(pid) == "T")
    lines = inspected(suspects(tmp_path, pid, phase=True))
    # The other rank has ended, so its end is reported first.
    assert "rank 1 of 2 ended while the others went on" in lines[0]
    assert lines[1] == "  rank 0: its stack is not known (step, point of progress 3 or later)"
    alone = DumpTargets(run_dir=tmp_path, world_size=1, timeout_s=7.0, pids={0: pid}, exit_codes={}, progress={})
    assert "rank 0 of 1 made no progress for 7 s (stopped, as by SIGSTOP)" in inspected(alone)[0]
    assert state(pid) == "T"


def test_process_without_signal_handler_survives_inspection(start, tmp_path):
    pid = start("no-handler")
    lines = inspected(suspects(tmp_path, pid))
    assert lines[1] == "  rank 0: its stack is not known"
    assert state(pid) == "S"


def test_inspection_requests_records_and_removes_old_ones(start, tmp_path, monkeypatch):
    monkeypatch.setattr("dtrain.launch.watchdog.PATIENCE_S", 0.5)  # this process writes no record
    pid = start("sleeps")
    record = launch_protocol.flight_record_file(tmp_path, 0)
    record.write_text('{"passed": 99, "doing": "old", "groups": []}')
    read, write = os.pipe()
    lines = inspected(suspects(tmp_path, pid, phase=True), ask=write)
    assert os.read(read, 9) == b"?"
    os.close(read)
    assert not record.exists()
    assert "(step, point of progress 3 or later)" in lines[1]
    assert inspected(suspects(tmp_path, pid), ask=write)  # no process is there to read
    os.close(write)


def test_rank_that_writes_record_gets_no_signal(start, tmp_path):
    """The signal's handler would walk the frames of the thread that is just answering, and the rank could die of it."""
    pid = start("tells-of-the-signal")
    read, write = os.pipe()
    now = time.monotonic()
    inspection = RankDump(suspects(tmp_path, pid, phase=True), query_fd=write, now=now)
    assert inspection.poll(now + PATIENCE_S * 0.4, exit_codes={1: 0}) is not None  # it takes its time
    assert os.read(read, 9) == b"?"
    launch_protocol.stacks_file(tmp_path, 0).parent.mkdir()
    launch_protocol.stacks_file(tmp_path, 0).write_text(
        'Thread 0x01 (most recent call first):\n  File "/loop.py", line 7 in train\n'
    )
    launch_protocol.flight_record_file(tmp_path, 0).write_text('{"passed": 4, "doing": "step", "groups": []}')
    then = now + PATIENCE_S * 0.9
    assert inspection.poll(then, exit_codes={1: 0}) is not None
    assert inspection.poll(then + 0.5, exit_codes={1: 0}) is None  # nothing else is waited for
    for fd in (read, write):
        os.close(fd)
    assert inspection.finish()[1] == "  rank 0: /loop.py:7 in train (step, point of progress 4)"
    os.kill(pid, launch_protocol.STACKS_SIGNAL)  # it would have noticed
    wait_until((tmp_path / "signalled").exists)


def test_rank_without_record_gets_signal_after_patience(start, tmp_path):
    pid = start("tells-of-the-signal")
    now = time.monotonic()
    inspection = RankDump(suspects(tmp_path, pid, phase=True), query_fd=None, now=now)
    inspection.poll(now + PATIENCE_S * 0.4, exit_codes={1: 0})
    time.sleep(0.2)
    assert not (tmp_path / "signalled").exists()
    late = now + 10 * PATIENCE_S  # the launcher itself had no time: the rank has the rest of its own from now on
    assert inspection.poll(late, exit_codes={1: 0}) is not None
    wait_until((tmp_path / "signalled").exists)
    assert inspection.poll(late + PATIENCE_S, exit_codes={1: 0}) is None


def test_rank_killed_by_signal_is_still_explained(start, tmp_path):
    pid = start("dies-of-the-signal")
    asked = DumpTargets(run_dir=tmp_path, world_size=1, timeout_s=7.0, pids={0: pid}, exit_codes={}, progress={})
    now = time.monotonic()
    inspection = RankDump(asked, query_fd=None, now=now)
    wait_until(lambda: state(pid) == "Z")
    assert inspection.poll(now, exit_codes={}) is not None
    assert inspection.poll(now, exit_codes={0: -signal.SIGSEGV}) is None  # no process is left to wait for
    first, second = inspection.finish()
    assert "rank 0 of 1 never came to init_dist's block" in first
    assert second == "  rank 0: its stack is not known; it ended when it was asked (killed by SIGSEGV)"


def test_rank_that_ended_before_inspection_is_tolerated(tmp_path):
    process = subprocess.Popen(["true"])
    process.wait(LONG_S)
    (first, second) = inspected(suspects(tmp_path, process.pid))
    assert "rank 1 of 2 ended while the others went on" in first
    assert second == "  rank 0: its stack is not known"


def test_remove_empty_dumps_removes_only_empty_files(tmp_path):
    remove_empty_dumps(tmp_path, range(2))
    files = [launch_protocol.stacks_file(tmp_path, rank) for rank in range(3)]
    files[0].parent.mkdir()
    for file, text in zip(files, ("", "Thread", ""), strict=True):
        file.write_text(text)
    remove_empty_dumps(tmp_path, range(2))
    assert [file.exists() for file in files] == [False, True, True]  # the last file is open in a rank of another node
    files[1].write_text("")
    remove_empty_dumps(tmp_path, range(2))
    assert [file.exists() for file in files] == [False, False, True]
    remove_empty_dumps(tmp_path, range(2, 3))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", range(3))
def test_remove_empty_dumps_tolerates_concurrent_launcher(tmp_path, moment):
    """On a disk that nodes share: the other one does it between two calls of this one to the system."""
    files = [launch_protocol.stacks_file(tmp_path, rank) for rank in range(2)]
    files[0].parent.mkdir()
    for file in files:
        file.touch()
    calls = count()

    def the_other() -> None:
        if next(calls) == moment:
            remove_empty_dumps(tmp_path, [1])

    with contextlib.ExitStack() as stack:
        for name in ("stat", "scandir", "unlink", "rmdir"):
            stack.enter_context(patch_calls(f"os.{name}", before=the_other))
        remove_empty_dumps(tmp_path, [0])
    assert next(calls) > moment
    assert list(tmp_path.iterdir()) == []


def test_read_only_folder_loses_only_stacks(tmp_path):
    (tmp_path / "hang").write_text("no folder")
    module = "dtrain.launch.rank_main"
    code = f"import sys, pathlib, {module} as stacks; stacks.register_stack_dump(pathlib.Path(sys.argv[1]))"
    result = subprocess.run(
        [sys.executable, "-c", code, launch_protocol.stacks_file(tmp_path, 0)], timeout=LONG_S, capture_output=True
    )
    assert (result.returncode, result.stderr) == (0, b"")
