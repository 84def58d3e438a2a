"""Check that the tests leave no processes (and so no sockets), no files in shared memory and no temporary files.

A file of tests also leaves the functions of torch, of the libraries beside it and of the package as they were: a later test
that runs in the same process would compute with the replaced function.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import time
import types
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

SHARED = Path("/dev/shm")
MARK = "TESTS_OF_DTRAIN"

_PATIENCE_S = 60.0  # for processes that are ending
_END_WITH_US = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")  # they wait for the end of a pipe of ours
_CACHES = ("torchinductor_", "pytest-of-")  # kept on purpose, by torch's compiler and by pytest

# Modules, and classes of modules, whose functions and classes no test may leave replaced.
_SHARED_OWNERS = (
    *("torch", "torch.Tensor", "torch.nn.Module", "torch.nn.functional", "torch.nn.init", "torch.nn.utils.rnn"),
    *("torch.distributed", "torch.optim.Optimizer", "torch.utils.data", "torch.utils.data.DataLoader"),
    *("numpy", "numpy.random", "random", "time", "os", "pathlib.Path", "subprocess", "threading"),
)
_FUNCTIONS = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodDescriptorType, type(lru_cache(len))),
    *(types.WrapperDescriptorType, type, staticmethod, classmethod, property),
)


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


def functions_of_libraries() -> dict[tuple[str, str], tuple[Any, Any]]:
    """Return the owner and the value of each function and class that tests share, by the names of its owner and its own."""
    return {
        (name, key): (owner, value)
        for name, owner in _owners()
        for key, value in vars(owner).items()
        # torch's compiler puts functions into modules, and removes them.
        if not key.startswith(("__compiled_fn", "__resume_at"))
        and issubclass(type(value), _FUNCTIONS)  # isinstance would ask the value, and some warn that they are deprecated
    }


def _owners() -> Iterator[tuple[str, Any]]:
    for name, module in list(sys.modules.items()):
        if name == "dtrain" or name.startswith("dtrain."):
            yield name, module
    for name in _SHARED_OWNERS:
        module, _, attribute = name.rpartition(".")
        owner = sys.modules.get(name) or getattr(sys.modules.get(module), attribute, None)
        if owner is not None:
            yield name, owner


def restore_functions(before: dict[tuple[str, str], tuple[Any, Any]]) -> list[str]:
    """Return the names of the functions and classes that were replaced since ``before``. Mutates: their owners.

    torch itself replaces functions of its own, when its compiler is imported.
    """
    replaced = []
    for (name, key), (owner, value) in before.items():
        now = vars(owner).get(key)
        if now is not value and not _is_of_torch(now):
            replaced.append(f"{name}.{key}")
            setattr(owner, key, value)
    return replaced


def _is_of_torch(value: Any) -> bool:
    code = getattr(value, "__code__", None)
    return code is not None and Path(code.co_filename).is_relative_to(Path(sys.modules["torch"].__file__).parent)
