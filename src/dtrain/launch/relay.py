"""Passing on what the ranks print: whole lines, marked with the rank, and never at the price of training."""

from __future__ import annotations

import codecs
import errno
import os
import re
import select
import stat
import time
from collections import deque

_LINE_END = re.compile(rb"\r\n?|\n")
_LONGEST_LINE = 8 << 20  # bytes; a longer one is cut, so that output without line ends cannot fill the memory
_MOST_PENDING = 64 << 20  # bytes that wait for a slow reader; what comes on top is dropped
_AT_ONCE = min(select.PIPE_BUF, 4096)  # bytes that a pipe which polls as writable takes without blocking
_GONE = {errno.EPIPE, errno.EBADF, errno.EIO, errno.ENXIO, errno.ECONNRESET}


class LineMarker:
    """Turns the chunks of one stream into whole lines, each with a prefix.

    A carriage return ends a line as well, so that progress bars of several ranks become lines instead of overwriting
    each other. Bytes that are not UTF-8 come out as backslash escapes.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._partial = bytearray()
        self._held = b""  # a carriage return at the end of a chunk: the line feed may be in the next one

    def feed(self, chunk: bytes) -> bytes:
        """The lines that ``chunk`` completes, ready to be written; often empty."""
        chunk = self._held + chunk
        self._held = b"\r" if chunk.endswith(b"\r") else b""
        chunk = chunk[: len(chunk) - len(self._held)]
        lines: list[bytes] = []
        end = 0
        for match in _LINE_END.finditer(chunk):
            line = bytes(self._partial) + chunk[end : match.start()]
            end = match.end()
            self._partial.clear()
            if line or match[0] != b"\r":  # progress bars begin with a carriage return: that is no empty line
                lines.append(self._marked(line))
        self._partial += chunk[end:]
        if len(self._partial) > _LONGEST_LINE:
            lines.append(self._marked(bytes(self._partial)))
            self._partial.clear()
        return b"".join(lines)

    def close(self) -> bytes:
        """The last line, if it never got its end."""
        line = bytes(self._partial)
        self._partial.clear()
        return self._marked(line) if line else b""

    def _marked(self, line: bytes) -> bytes:
        return self._prefix + _as_utf8(line) + b"\n"


class PlainText:
    """The stream of a rank that is alone: passed on as it comes, progress bars included."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._mid_line = False

    def feed(self, chunk: bytes) -> bytes:
        """``chunk`` as valid UTF-8, less a character that is not complete yet."""
        text = self._decoder.decode(chunk)
        if text:
            self._mid_line = not text.endswith("\n")
        return text.encode()

    def close(self) -> bytes:
        """What was held back, and a line end if the last line has none."""
        text = self._decoder.decode(b"", final=True)
        return text.encode() + (b"\n" if text or self._mid_line else b"")


def _as_utf8(line: bytes) -> bytes:
    try:
        line.decode()
    except UnicodeDecodeError:
        return line.decode(errors="backslashreplace").encode()
    return line


class Outlet:
    """One of the launcher's own output streams, written without ever waiting for its reader.

    The descriptor is left in blocking mode, because that mode is shared with the shell and everybody else who has it
    open; instead no more is written than it has room for. A reader that is gone, or a full disk, costs the output only.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._queue: deque[memoryview] = deque()
        self._pending = 0  # bytes in the queue
        self._dropped = 0
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        try:
            self._open, self._is_file = True, stat.S_ISREG(os.fstat(fd).st_mode)
        except OSError:  # closed by whoever started the launcher
            self._open, self._is_file = False, False

    @property
    def waiting(self) -> bool:
        """Whether something is left that the reader has no room for yet."""
        return bool(self._queue)

    def put(self, lines: bytes) -> None:
        """Write whole lines, now or when there is room."""
        if not self._open or not lines:
            return
        if self._pending + len(lines) > _MOST_PENDING:
            self._dropped += len(lines)
            return
        self._enqueue(self._note_of_dropped() + lines)
        self.pump()

    def pump(self) -> int:
        """Write as much of what waits as there is room for; returns the number of bytes that went out."""
        sent = 0
        while self._queue and self._poll.poll(0):
            data = self._queue[0]
            try:
                count = os.write(self.fd, data if self._is_file else data[:_AT_ONCE])
            except BlockingIOError:  # somebody else made it non-blocking
                break
            except OSError as error:
                self._open = error.errno not in _GONE  # a full disk may have room again later
                self._forget()
                break
            sent += count
            self._pending -= count
            self._queue.popleft()
            if count < len(data):
                self._queue.appendleft(data[count:])
        return sent

    def flush(self, *, patience_s: float) -> None:
        """Write what waits; give up when the reader takes nothing for ``patience_s`` seconds."""
        deadline = time.monotonic() + patience_s
        self._enqueue(self._note_of_dropped())
        while self._queue:
            if self.pump():
                deadline = time.monotonic() + patience_s
            left = deadline - time.monotonic()
            if left <= 0:
                self._forget()
            elif self._queue:
                self._poll.poll(left * 1000)

    def _enqueue(self, data: bytes) -> None:
        if data:
            self._queue.append(memoryview(data))
            self._pending += len(data)

    def _forget(self) -> None:
        self._queue.clear()
        self._pending = 0

    def _note_of_dropped(self) -> bytes:
        if not self._dropped:
            return b""
        note = f"dtrain: launch: {self._dropped} bytes of output were dropped here: they came faster than they were read\n"
        self._dropped = 0
        return note.encode()


def open_outlets() -> tuple[Outlet, Outlet]:
    """Outlets for standard output and error; one and the same where both lead to one file, to keep lines whole."""
    out = Outlet(1)
    try:
        same = os.path.sameopenfile(1, 2)
    except OSError:
        same = False
    return out, out if same else Outlet(2)
