"""The launcher's own standard output and error, written without ever waiting for whoever reads them."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from collections import deque

from dtrain.launch.output.lost import count_lines, describe

_MOST_PENDING = 64 << 20  # bytes that wait for a slow reader; what comes on top is dropped
_AT_ONCE = min(select.PIPE_BUF, 4096)  # bytes that a pipe which polls as writable takes without blocking
_GONE = {errno.EPIPE, errno.EBADF, errno.EIO, errno.ENXIO, errno.ECONNRESET}
_TOO_SLOW = "they came faster than they were read"
_NOT_READ = "nobody read them"
_LINE_FEED = ord("\n")


class Outlet:
    """One of the launcher's own output streams. A reader that is gone, or a full disk, costs the output only.

    The descriptor is left in blocking mode, because that mode is shared with the shell and everybody else who has it
    open; instead no more is written than it has room for.
    """

    def __init__(self, fd: int, name: str = "output") -> None:
        self.fd = fd
        self.name = name
        self._queue: deque[tuple[memoryview, int]] = deque()  # what to write, and for a note how many lines it is about
        self._pending = 0  # bytes in the queue
        self._dropped = 0  # lines that nobody has been told of
        self._reason = _TOO_SLOW
        self._mid_line = False  # what was written last
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._open, self._is_file = True, False
        try:
            self._is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        except OSError as error:  # closed by whoever started the launcher
            self._open, self._reason = False, describe(error)

    @property
    def waiting(self) -> bool:
        """Whether something is left that the reader has no room for yet."""
        return bool(self._queue)

    @property
    def dropped(self) -> int:
        """Lines that were dropped and of which no note has been written to the stream itself."""
        return self._dropped

    @property
    def reason(self) -> str:
        """Why the last lines were dropped."""
        return self._reason

    def put(self, lines: bytes) -> None:
        """Write whole lines, now or when there is room."""
        if not lines:
            return
        if not self._open:
            self._drop(count_lines(lines), self._reason)
            return
        if self._pending + len(lines) > _MOST_PENDING:
            self._drop(count_lines(lines), _TOO_SLOW)
            return
        self._note_dropped()
        self._enqueue(lines)
        self.pump()

    def pump(self) -> int:
        """Write as much of what waits as there is room for; returns the number of bytes that went out."""
        sent = 0
        while self._queue and self._poll.poll(0):
            data, about = self._queue[0]
            try:
                count = os.write(self.fd, data if self._is_file else data[:_AT_ONCE])
            except BlockingIOError:  # somebody else made it non-blocking
                break
            except OSError as error:
                self._open = error.errno not in _GONE  # a full disk may have room again later
                self._forget(describe(error))
                break
            sent += count
            self._pending -= count
            self._mid_line = data[count - 1] != _LINE_FEED
            self._queue.popleft()
            if count < len(data):
                self._queue.appendleft((data[count:], about))
        return sent

    def flush(self, *, patience_s: float) -> None:
        """Write what waits; give up when the reader takes nothing for ``patience_s`` seconds."""
        deadline = time.monotonic() + patience_s
        if self._open:
            self._note_dropped()
        while self._queue:
            if self.pump():
                deadline = time.monotonic() + patience_s
            left = deadline - time.monotonic()
            if left <= 0:
                self._forget(_NOT_READ)
            elif self._queue:
                self._poll.poll(left * 1000)

    def _enqueue(self, data: bytes, about: int = 0) -> None:
        self._queue.append((memoryview(data), about))
        self._pending += len(data)

    def _forget(self, reason: str) -> None:
        self._drop(sum(about or count_lines(bytes(data)) for data, about in self._queue), reason)
        self._queue.clear()
        self._pending = 0

    def _drop(self, lines: int, reason: str) -> None:
        self._dropped += lines
        self._reason = reason

    def _note_dropped(self) -> None:
        if self._dropped:
            begin = "\n" if self._mid_line and not self._queue else ""
            note = f"{begin}dtrain: launch: {self._dropped} lines of output were dropped here: {self._reason}\n"
            self._enqueue(note.encode(), about=self._dropped)
            self._dropped = 0


def open_outlets() -> tuple[Outlet, Outlet]:
    """Outlets for standard output and error; one and the same where both lead to one file, to keep lines whole."""
    out = Outlet(1, "standard output")
    try:
        same = os.path.sameopenfile(1, 2)
    except OSError:
        same = False
    return out, out if same else Outlet(2, "standard error")


def occupy_standard_streams() -> None:
    """Open what of the descriptors 0, 1 and 2 is closed, so that no pipe or socket of ours takes its place."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
