"""The launcher's own standard output and error, written without ever waiting for whoever reads them."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from collections import deque
from collections.abc import Callable, Sequence

from dtrain.launch.output.terminal_lines import count_lines, describe_os_error

_MOST_PENDING = 64 << 20  # bytes that wait for a slow reader; what comes on top is dropped
_MAX_WRITE_BYTES = min(select.PIPE_BUF, 4096)  # bytes that a pipe which polls as writable takes without blocking
_READER_GONE_ERRNOS = {errno.EPIPE, errno.EBADF, errno.EIO, errno.ENXIO, errno.ECONNRESET}
_TOO_SLOW = "they came faster than they were read"
_NOT_READ = "nobody read them"
_LINE_FEED = ord("\n")
_POLL_INTERVAL_S = 0.05  # whether somebody has had enough of the wait for a reader
_REOPEN_FLAGS = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class NonBlockingWriter:
    """One of the launcher's own output streams. A reader that is gone, or a full disk, costs the output only.

    The mode of the descriptor is shared with the shell and everybody else who has it open, and stays as it is. A pipe or
    a terminal is opened once more, for us alone and non-blocking: a terminal polls as writable when it has room for one
    character, and a blocking write of more would wait for its reader. ``close`` when nothing more is to be written.
    """

    def __init__(self, fd: int, name: str = "output") -> None:
        self._reopened_fd = _reopen_non_blocking(fd)
        self.fd = fd = fd if self._reopened_fd is None else self._reopened_fd
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
            self._open, self._reason = False, describe_os_error(error)

    @property
    def has_pending(self) -> bool:
        """Whether something is left that the reader has no room for yet."""
        return bool(self._queue)

    @property
    def dropped_lines(self) -> int:
        """Lines that were dropped and of which no note has been written to the stream itself."""
        return self._dropped

    @property
    def reason(self) -> str:
        """Why the last lines were dropped."""
        return self._reason

    def write(self, lines: bytes) -> None:
        """Write whole lines, now or when there is room."""
        if not lines:
            return
        if not self._open:
            self._count_dropped(count_lines(lines), self._reason)
            return
        if self._pending + len(lines) > _MOST_PENDING:
            self._count_dropped(count_lines(lines), _TOO_SLOW)
            return
        self._note_dropped()
        self._enqueue(lines)
        self.flush_some()

    def flush_some(self) -> int:
        """Write as much of what waits as there is room for; returns the number of bytes that went out."""
        sent = 0
        while self._queue and self._poll.poll(0):
            data, about = self._queue[0]
            try:
                count = os.write(self.fd, data if self._is_file else data[:_MAX_WRITE_BYTES])
            except BlockingIOError:  # room for less than that, or another writer was faster
                break
            except OSError as error:
                self._open = error.errno not in _READER_GONE_ERRNOS  # a full disk may have room again later
                self._discard(describe_os_error(error))
                break
            sent += count
            self._pending -= count
            self._mid_line = data[count - 1] != _LINE_FEED
            self._queue.popleft()
            if count < len(data):
                self._queue.appendleft((data[count:], about))
        return sent

    def flush(self, *, timeout_s: float) -> None:
        """Write what waits; give up when the reader takes nothing for ``timeout_s`` seconds."""
        flush_writers([self], timeout_s=timeout_s)

    def note_dropped(self) -> None:
        """Have the stream say what it lacks, behind what waits already."""
        if self._open:
            self._note_dropped()

    def discard_pending(self) -> None:
        """Drop what nobody has read."""
        self._discard(_NOT_READ)

    def close(self) -> None:
        """Write nothing from now on. What is put is counted as dropped."""
        self._discard(_NOT_READ)
        self._open = False
        if self._reopened_fd is not None:
            os.close(self._reopened_fd)
            self._reopened_fd = None

    def _enqueue(self, data: bytes, about: int = 0) -> None:
        self._queue.append((memoryview(data), about))
        self._pending += len(data)

    def _discard(self, reason: str) -> None:
        self._count_dropped(sum(about or count_lines(bytes(data)) for data, about in self._queue), reason)
        self._queue.clear()
        self._pending = 0

    def _count_dropped(self, lines: int, reason: str) -> None:
        self._dropped += lines
        self._reason = reason

    def _note_dropped(self) -> None:
        if self._dropped:
            begin = "\n" if self._mid_line and not self._queue else ""
            note = f"{begin}dtrain: launch: {self._dropped} lines of output were dropped here: {self._reason}\n"
            self._enqueue(note.encode(), about=self._dropped)
            self._dropped = 0


def flush_writers(
    writers: Sequence[NonBlockingWriter], *, timeout_s: float, give_up: Callable[[], bool] = lambda: False
) -> None:
    """Write what waits in all of ``writers``.

    Args:
        writers: written at the same time: one without a reader does not use up the time of the others.
        timeout_s: how long to wait while no reader takes anything.
        give_up: whether somebody has had enough of the wait; looked at every now and then while it lasts.
    """
    deadline = time.monotonic() + timeout_s
    for outlet in writers:
        outlet.note_dropped()
    while waiting := [outlet for outlet in writers if outlet.has_pending]:
        now = time.monotonic()
        if sum(outlet.flush_some() for outlet in waiting):
            deadline = now + timeout_s
        elif now >= deadline or give_up():
            for outlet in waiting:
                outlet.discard_pending()
        else:
            _wait_writable(waiting, min(deadline - now, _POLL_INTERVAL_S))


def _wait_writable(outlets: Sequence[NonBlockingWriter], within_s: float) -> None:
    room = select.poll()
    for outlet in outlets:
        room.register(outlet.fd, select.POLLOUT)
    room.poll(within_s * 1000)


def _reopen_non_blocking(fd: int) -> int | None:
    """Another descriptor of the same pipe or terminal, whose mode is ours to choose; None where there is none to be had."""
    try:
        mode = os.fstat(fd).st_mode
        return os.open(f"/proc/self/fd/{fd}", _REOPEN_FLAGS) if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) else None
    except OSError:  # closed, a pipe without a reader, no /proc, or a terminal that belongs to another user
        return None


def open_standard_writers() -> tuple[NonBlockingWriter, NonBlockingWriter]:
    """Outlets for standard output and error; one and the same where both lead to one file, to keep lines whole."""
    out = NonBlockingWriter(1, "standard output")
    try:
        same = os.path.sameopenfile(1, 2)
    except OSError:
        same = False
    return out, out if same else NonBlockingWriter(2, "standard error")


def occupy_standard_streams() -> None:
    """Open what of the descriptors 0, 1 and 2 is closed, so that no pipe or socket of ours takes its place."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
