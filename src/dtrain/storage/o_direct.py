"""Write files past the page cache, because copying data that are not read again soon costs more than the disk."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

# Alignment of positions, sizes and memory, which is sufficient for every common disk.
_BLOCK_BYTES = 4096
_MEMMOVE_MIN_BYTES = 64 * 2**10


class DirectWriter:
    """Second handle on a file that is being written, opened with O_DIRECT. A context manager.

    The handle writes whole blocks at block boundaries. The caller must write all other data through the first handle. If the
    file system does not support O_DIRECT, no data are written.

    Args:
        path: existing file.
        system: the module ``os``, or a stand-in for tests.
        enabled: if False, no data are written.

    Source: the notes on O_DIRECT in open(2) of the Linux man-pages.
    """

    def __init__(self, path: Path, system: Any, *, enabled: bool) -> None:
        self._system = system
        self._handle: int | None = None
        self._unsupported = False
        self._memory = threading.local()
        if enabled and hasattr(system, "O_DIRECT"):
            with contextlib.suppress(OSError):
                self._handle = system.open(path, system.O_WRONLY | system.O_DIRECT)

    def write_at(self, begin: int, buffers: Sequence[memoryview]) -> int:
        """Write consecutive buffers at byte ``begin``. Threads may write ranges that do not overlap.

        Returns:
            The number of bytes written, from the first byte on.
        """
        size = sum(map(len, buffers))
        if self._handle is None or self._unsupported or begin % _BLOCK_BYTES or size % _BLOCK_BYTES or not size:
            return 0
        view, done = self._gather(buffers, size), 0
        while done < size:
            try:
                count = self._system.pwritev(self._handle, [view[done:]], begin + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # The file system supports O_DIRECT, but not this alignment.
                self._unsupported = True
                return done
            done += count
            if count % _BLOCK_BYTES:
                break
        return done

    def _gather(self, buffers: Sequence[memoryview], size: int) -> memoryview:
        """Return the bytes in page-aligned memory: the buffer itself, or a copy in memory of the thread."""
        if len(buffers) == 1 and _is_page_aligned(buffers[0]):
            return buffers[0]
        memory = getattr(self._memory, "own", None)
        if memory is None or len(memory) < size:
            memory = self._memory.own = mmap.mmap(-1, size)
        at = 0
        for data in buffers:
            _copy_into(memory, at, data)
            at += len(data)
        return memoryview(memory)[:size]

    def __enter__(self) -> DirectWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._handle is not None:
            self._system.close(self._handle)


def _is_page_aligned(data: memoryview) -> bool:
    return not data.readonly and ctypes.addressof(ctypes.c_char.from_buffer(data)) % _BLOCK_BYTES == 0


def _copy_into(memory: mmap.mmap, at: int, data: memoryview) -> None:
    """Copy bytes into ``memory`` from ``at`` on. Large copies release the GIL."""
    if data.readonly or len(data) < _MEMMOVE_MIN_BYTES:
        memory[at : at + len(data)] = data
        return
    into, source = ctypes.c_char.from_buffer(memory, at), ctypes.c_char.from_buffer(data)
    ctypes.memmove(ctypes.addressof(into), ctypes.addressof(source), len(data))
