"""The check at the end of a run reports leftovers, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch

import leftovers

LEAVING = {
    "a process": "subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)",
    "a temporary file": "tempfile.mkstemp()",
    "shared memory": "open(f'/dev/shm/left-{os.getpid()}', 'w').close()",
}


def look_after(statement, tmp_path):
    """Return the report of the check in a process of its own after ``statement``."""
    source = f"""
    import os, subprocess, tempfile
    import leftovers
    leftovers._PATIENCE_S = 1.0
    before = leftovers.look()
    {statement}
    print("\\n".join(leftovers.left_since(before)))
    """
    tests = os.path.dirname(os.path.abspath(__file__))
    environment = {**os.environ, "PYTHONPATH": tests, "TMPDIR": str(tmp_path), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


@pytest.mark.parametrize("what", LEAVING)
def test_leftover_check_detects_leftovers(what, tmp_path):
    lines = look_after(LEAVING[what], tmp_path)
    for line in lines:  # so that this very run leaves nothing
        if line.startswith("process "):
            os.kill(int(line.split()[1]), 9)
        if line.startswith("/dev/shm/"):
            os.unlink(line)
    assert len(lines) == 1, lines
    assert lines[0].startswith({"a process": "process ", "a temporary file": "temporary file "}.get(what, "/dev/shm/"))


def test_leftover_check_finds_nothing_after_a_clean_command(tmp_path):
    assert look_after("subprocess.run(['true'])", tmp_path) == [""]


def test_memory_of_a_launch_beside_the_tests_is_no_leftover(tmp_path):
    # Locks of one process exclude each other, too.
    held = "import fcntl; name = f'/dev/shm/dtrain-{os.getpid()}'; os.mkdir(name); lock = open(f'{name}.lock', 'w')"
    locked = f"{held}; fcntl.flock(lock, fcntl.LOCK_EX)"
    for statement, count in ((locked, 0), (held, 2)):
        clean = "import atexit; atexit.register(lambda: (os.rmdir(name), os.unlink(lock.name)))"
        lines = look_after(f"{statement}; {clean}", tmp_path)
        assert len([line for line in lines if line]) == count, lines


def test_tests_that_collect_tests_keep_their_temporary_folder():
    folder, environment = tempfile.gettempdir(), dict(os.environ)
    inner = leftovers.look()
    assert Path(tempfile.gettempdir()) == inner.temporary
    leftovers.end(inner)
    assert (tempfile.gettempdir(), dict(os.environ)) == (folder, environment)
    assert not inner.temporary.exists()


def test_replaced_function_is_reported_and_restored(monkeypatch):
    before, rand = leftovers.functions_of_libraries(), torch.rand
    monkeypatch.setattr(torch, "rand", rand)  # if the check fails
    torch.rand = lambda *shape: rand(*shape)
    assert leftovers.restore_functions(before) == ["torch.rand"]
    assert torch.rand is rand
