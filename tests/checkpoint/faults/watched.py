"""Stands between ``dtrain.storage.local`` and the operating system: counts its file operations, and acts at one of them."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from dtrain.storage import local

WRITES = {"write", "pwrite", "writev", "pwritev"}
CALLS = frozenset(
    {
        *WRITES, "open", "close", "read", "pread", "preadv", "fsync", "fdatasync", "sync_file_range", "fstat", "stat", "lstat",
        "listdir", "scandir", "mkdir", "makedirs", "rmdir", "unlink", "remove", "rename", "replace", "link", "symlink",
        "readlink", "truncate", "ftruncate", "posix_fallocate", "statvfs", "fstatvfs", "utime", "chmod",
    }
)  # fmt: skip
ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EACCES": errno.EACCES}
ACTIONS = (*ERRORS, "short write", "kill")

_Call = Callable[..., Any]


class Faulty:
    """``os`` for a module. Call number ``operation`` (from 0, over all threads) does ``action``; other calls are real."""

    def __init__(self, *, operation: int | None = None, action: str = "") -> None:
        self.operation, self.action = operation, action
        self.calls: list[str] = []
        self.fired = ""
        self._lock = threading.Lock()
        self._writers: set[int] = set()

    @property
    def writers(self) -> int:
        """Return the number of threads that have written parts of files."""
        return len(self._writers)

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return partial(self._call, name, real) if name in CALLS else real

    def _call(self, name: str, real: _Call, *args: Any, **options: Any) -> Any:
        with self._lock:
            number = len(self.calls)
            self.calls.append(name)
            if name == "pwritev":
                self._writers.add(threading.get_ident())
        if name == "pwritev":
            time.sleep(0.002)  # small parts are written so fast that one thread would write them all
        if number != self.operation:
            return real(*args, **options)
        self.fired = name
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "short write":
            return _half(name, real, args, options)
        if name == "close":
            real(*args, **options)  # a close that fails has let go of the file all the same
        raise OSError(ERRORS[self.action], os.strerror(ERRORS[self.action]))


def _half(name: str, real: _Call, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Write half of the given bytes; any other call is unchanged."""
    if name not in WRITES:
        return real(*args, **options)
    handle, data, *rest = args
    if name in ("write", "pwrite"):
        return real(handle, memoryview(data).cast("B")[: max(1, len(data) // 2)], *rest, **options)
    first = memoryview(data[0]).cast("B")
    return real(handle, [first[: max(1, len(first) // 2)]], *rest, **options)


@contextmanager
def watching(*, operation: int | None = None, action: str = "") -> Iterator[Faulty]:
    """Have the module of local files work through a ``Faulty``."""
    faulty = Faulty(operation=operation, action=action)
    local.os = faulty  # type: ignore[assignment]
    try:
        yield faulty
    finally:
        local.os = os
