"""Writing past the page cache: what is saved is not read again soon, and copying it there costs more than the disk does."""

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

_BLOCK_BYTES = 4096  # to which positions, sizes and memory are aligned: enough for every usual disk
_MEMMOVE_MIN_BYTES = 64 * 2**10


class DirectWriter:
    """A second handle on a file that is being written. A context manager.

    It takes whole blocks that lie at block boundaries; what it does not take is for the caller to write as usual. Nothing is
    taken where the file system does not know such a handle.

    Args:
        path: the file, which exists.
        system: the module ``os``, or what stands in for it.
        enabled: whether to try at all.

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
        """Put the buffers one after the other at byte ``begin``. Threads may call it for ranges that do not overlap.

        Returns:
            How many bytes it took, from the first one on.
        """
        size = sum(map(len, buffers))
        if self._handle is None or self._unsupported or begin % _BLOCK_BYTES or size % _BLOCK_BYTES or not size:
            return 0
        view, done = self._gather(buffers, size), 0
        while done < size:
            try:
                taken = self._system.pwritev(self._handle, [view[done:]], begin + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._unsupported = True  # it could be opened, but does not take this alignment
                return done
            done += taken
            if taken % _BLOCK_BYTES:
                break
        return done

    def _gather(self, buffers: Sequence[memoryview], size: int) -> memoryview:
        """The bytes in memory that begins at a page: where they are, or a copy of the thread's own."""
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
    """Put the bytes into ``memory`` from ``at`` on. Other threads run meanwhile when there are many of them."""
    if data.readonly or len(data) < _MEMMOVE_MIN_BYTES:
        memory[at : at + len(data)] = data
        return
    into, source = ctypes.c_char.from_buffer(memory, at), ctypes.c_char.from_buffer(data)
    ctypes.memmove(ctypes.addressof(into), ctypes.addressof(source), len(data))
