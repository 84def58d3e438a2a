"""Write the launcher's own standard output and error without waiting for their readers."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from collections import deque
from collections.abc import Callable, Sequence

from dtrain.arguments import format_count
from dtrain.launch.output.terminal_lines import count_lines, describe_os_error

# Output beyond this limit is dropped.
_MOST_PENDING = 64 << 20  # bytes
# A pipe that polls as writable accepts so many bytes without blocking.
_MAX_WRITE_BYTES = min(select.PIPE_BUF, 4096)
_READER_GONE_ERRNOS = {errno.EPIPE, errno.EBADF, errno.EIO, errno.ENXIO, errno.ECONNRESET}
_TOO_SLOW = "they came faster than they were read"
_NOT_READ = "nobody read them"
_LINE_FEED = ord("\n")
# seconds between calls of give_up
_POLL_INTERVAL_S = 0.05
_REOPEN_FLAGS = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class NonBlockingWriter:
    """Non-blocking writer for one output stream of the launcher. A missing reader or a full disk only costs output.

    The mode of the descriptor is shared with the shell and other programs, and is not changed. A pipe or a terminal is reopened
    as non-blocking for this process alone: a terminal polls as writable when it has space for one character, and a longer
    blocking write would wait for its reader. Call ``close`` after the last write.
    """

    def __init__(self, fd: int) -> None:
        self._reopened_fd = _reopen_non_blocking(fd)
        self.fd = fd = fd if self._reopened_fd is None else self._reopened_fd
        # Data to write, and the number of dropped lines if the data is a note about them.
        self._queue: deque[tuple[memoryview, int]] = deque()
        self._pending = 0  # bytes
        # Dropped lines without a note in the stream, and the reason of the last drop.
        self.dropped_lines, self.reason = 0, _TOO_SLOW
        self._mid_line = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._open, self._is_file = True, False
        try:
            self._is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        # The descriptor may be closed.
        except OSError as error:
            self._open, self.reason = False, describe_os_error(error)

    @property
    def has_pending(self) -> bool:
        """True if queued output waits for space."""
        return bool(self._queue)

    def write(self, lines: bytes) -> None:
        """Write whole lines, now or when there is space."""
        if not lines:
            return
        if not self._open or self._pending + len(lines) > _MOST_PENDING:
            self._count_dropped(count_lines(lines), _TOO_SLOW if self._open else self.reason)
            return
        self.note_dropped()
        self._enqueue(lines)
        self.flush_some()

    def flush_some(self) -> int:
        """Write as much of the queue as there is space for, and return the number of written bytes."""
        sent = 0
        while self._queue and self._poll.poll(0):
            data, dropped_lines = self._queue[0]
            try:
                count = os.write(self.fd, data if self._is_file else data[:_MAX_WRITE_BYTES])
            # The space is too small, or another writer was faster.
            except BlockingIOError:
                break
            except OSError as error:
                # A full disk may have space again later.
                self._open = error.errno not in _READER_GONE_ERRNOS
                self.discard_pending(describe_os_error(error))
                break
            sent += count
            self._pending -= count
            self._mid_line = data[count - 1] != _LINE_FEED
            self._queue.popleft()
            if count < len(data):
                self._queue.appendleft((data[count:], dropped_lines))
        return sent

    def note_dropped(self) -> None:
        """Append a note about dropped lines to the queue."""
        if self._open and self.dropped_lines:
            begin = "\n" if self._mid_line and not self._queue else ""
            lines = format_count(self.dropped_lines, "line of output was", "lines of output were")
            note = f"{begin}dtrain: launch: {lines} dropped here: {self.reason}\n"
            self._enqueue(note.encode(), dropped_lines=self.dropped_lines)
            self.dropped_lines = 0

    def discard_pending(self, reason: str = _NOT_READ) -> None:
        """Drop the queued output, by default because nobody has read it."""
        self._count_dropped(sum(dropped_lines or count_lines(bytes(data)) for data, dropped_lines in self._queue), reason)
        self._queue.clear()
        self._pending = 0

    def close(self) -> None:
        """Close the stream. Later lines count as dropped."""
        self.discard_pending()
        self._open = False
        if self._reopened_fd is not None:
            os.close(self._reopened_fd)
            self._reopened_fd = None

    def _enqueue(self, data: bytes, dropped_lines: int = 0) -> None:
        self._queue.append((memoryview(data), dropped_lines))
        self._pending += len(data)

    def _count_dropped(self, lines: int, reason: str) -> None:
        self.dropped_lines += lines
        self.reason = reason


def flush_writers(
    writers: Sequence[NonBlockingWriter], *, timeout_s: float, give_up: Callable[[], bool] = lambda: False
) -> None:
    """Write the queues of all ``writers``.

    Args:
        writers: writers, which are written at the same time, so that a slow reader does not use up the time of other readers.
        timeout_s: seconds to wait while no reader accepts anything.
        give_up: function that returns True to end the wait; called regularly.
    """
    deadline = time.monotonic() + timeout_s
    for writer in writers:
        writer.note_dropped()
    while waiting := [writer for writer in writers if writer.has_pending]:
        now = time.monotonic()
        if sum(writer.flush_some() for writer in waiting):
            deadline = now + timeout_s
        elif now >= deadline or give_up():
            for writer in waiting:
                writer.discard_pending()
        else:
            _wait_writable(waiting, min(deadline - now, _POLL_INTERVAL_S))


def _wait_writable(writers: Sequence[NonBlockingWriter], timeout_s: float) -> None:
    poll = select.poll()
    for writer in writers:
        poll.register(writer.fd, select.POLLOUT)
    poll.poll(timeout_s * 1000)


def _reopen_non_blocking(fd: int) -> int | None:
    """Open another, non-blocking descriptor of the same pipe or terminal; None if that is not possible."""
    try:
        mode = os.fstat(fd).st_mode
        return os.open(f"/proc/self/fd/{fd}", _REOPEN_FLAGS) if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) else None
    # The descriptor is closed, a pipe has no reader, /proc is missing, or the terminal belongs to another user.
    except OSError:
        return None


def open_standard_writers() -> tuple[NonBlockingWriter, NonBlockingWriter]:
    """Return writers for standard output and error; the same writer if both go to one file, to keep lines whole."""
    out = NonBlockingWriter(1)
    try:
        same = os.path.sameopenfile(1, 2)
    except OSError:
        same = False
    return out, out if same else NonBlockingWriter(2)


def occupy_standard_streams() -> None:
    """Open the closed ones of the descriptors 0, 1 and 2, so that no pipe or socket gets such a number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
