"""Check that the tests leave no processes (and so no sockets), no files in shared memory and no temporary files."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SHARED = Path("/dev/shm")
MARK = "TESTS_OF_DTRAIN"

_PATIENCE_S = 60.0  # for processes that are ending
_END_WITH_US = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")  # they wait for the end of a pipe of ours
_CACHES = ("torchinductor_", "pytest-of-")  # kept on purpose, by torch's compiler and by pytest


@dataclass(frozen=True, kw_only=True)
class Before:
    """State before the tests began."""

    mark: str
    temporary: Path
    shared: frozenset[int]  # inodes
    environment: dict[str, str]


def look() -> Before:
    """Begin: all processes from here on carry a mark, and put their temporary files into a folder of their own.

    Mutates: this process's environment, and where ``tempfile`` works.
    """
    environment = dict(os.environ)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest's own folders stay where they are
    temporary = tempfile.mkdtemp(prefix="tests-")
    mark = uuid.uuid4().hex
    os.environ[MARK], os.environ["TMPDIR"], tempfile.tempdir = mark, temporary, temporary
    return Before(mark=mark, temporary=Path(temporary), shared=frozenset(_shared()), environment=environment)


def end(before: Before) -> None:
    """Remove the folder of temporary files, and restore what ``look`` changed: tests collect tests in their own process.

    Mutates: this process's environment, and where ``tempfile`` works.
    """
    shutil.rmtree(before.temporary, ignore_errors=True)
    for name in ("PYTEST_DEBUG_TEMPROOT", MARK, "TMPDIR"):
        os.environ.pop(name, None)
        os.environ.update({name: before.environment[name]} if name in before.environment else {})
    tempfile.tempdir = None


def left_since(before: Before, *, shared_memory: bool = True) -> list[str]:
    """List all leftovers that are there now and were not there before, one line each.

    Args:
        before: state before the tests.
        shared_memory: if False, ignore shared memory. Workers of pytest-xdist all use it, and semaphores of a killed process
            stay until its worker has ended.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while (alive := _marked(before.mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    files = [path.name for path in before.temporary.iterdir() if not path.name.startswith(_CACHES)]
    shared: list[str] = []
    while shared_memory and (shared := _left_in_shared_memory(before)) and time.monotonic() < deadline:
        time.sleep(0.1)  # of another program that is just ending
    return [
        *(f"process {pid} is alive: {command}" for pid, command in alive.items()),
        *(f"temporary file {name}" for name in files),
        *(f"{SHARED}/{name}" for name in shared),
    ]


def _left_in_shared_memory(before: Before) -> list[str]:
    """Names of the new files in shared memory that no process has mapped, and no launch beside these tests has locked."""
    new = {inode: name for inode, name in _shared().items() if inode not in before.shared}
    used = _mapped() if new else set()
    return [name for inode, name in _shared().items() if inode in new and inode not in used and not _is_locked(name)]


def _is_locked(name: str) -> bool:
    """Return True for the memory of a launch that runs, and for its lock."""
    if not name.startswith("dtrain-"):
        return False
    for lock in (SHARED / name, SHARED / f"{name}.lock"):
        with suppress(OSError):
            fd = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(fd)
    return False


def _marked(mark: str) -> dict[int, str]:
    """Processes that began below these tests, by pid with their command lines."""
    commands = {}
    for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()):
        with suppress(OSError):  # it has ended, or belongs to another user
            if f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if not any(word in command for word in _END_WITH_US):
                    commands[pid] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return commands


def _shared() -> dict[int, str]:
    """The files in the memory that processes share: name by inode."""
    return {entry.inode(): entry.name for entry in os.scandir(SHARED)} if SHARED.exists() else {}


def _mapped() -> set[int]:
    """Inodes of the files that a process has mapped: other users have files here. A semaphore is mapped by another name."""
    inodes = set()
    for pid in (name for name in os.listdir("/proc") if name.isdecimal()):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            inodes |= {int(line.split()[4]) for line in lines if f" {SHARED}/" in line}
    return inodes
