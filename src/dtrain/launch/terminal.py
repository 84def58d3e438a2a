"""Write to a terminal: split streams into lines, escape control characters, never wait for a reader, and keep one live line.

The formatters take chunks of a rank's output and return lines. ``TailBuffer`` keeps the last lines of each rank for messages.
``NonBlockingWriter`` writes the launcher's own streams. ``LiveTerminal`` keeps the newest progress of rank 0 as the last line.
"""

from __future__ import annotations

import codecs
import errno
import os
import re
import select
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from operator import itemgetter

from dtrain.arguments import format_count
from dtrain.launch_protocol import LIVE_LINE_BEGIN, LIVE_LINE_END


def count_lines(data: bytes) -> int:
    """Count the lines in ``data``; a partial line counts if there is no complete line."""
    return data.count(b"\n") or (1 if data else 0)


def describe_os_error(error: OSError) -> str:
    """Return the system's reason for a failed write."""
    return error.strerror or "it cannot be written"


# A longer line is split, so that output without line ends cannot fill the memory.
LONGEST_LINE = 8 << 20  # bytes

_LINE_END = re.compile(rb"\r\n?|\n")
# In valid UTF-8 the byte C2 begins a character, so its successors 80 to 9F are the C1 controls and nothing else.
_CONTROL = re.compile(rb"(\x1b\[[0-9;:]*m)|[\x00-\x08\x0a-\x1f\x7f]|\xc2[\x80-\x9f]")
# Line feeds and tabs need no escape.
_NOT_PLAIN = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")
_RESET = b"\x1b[0m"
_RESETS = {_RESET, b"\x1b[m"}


class LinePrefixer:
    """Formatter of one stream: whole lines, each with a prefix, escaped for a terminal.

    A carriage return ends a line as well, so that progress bars of several ranks do not overwrite each other. Invalid UTF-8 and
    control characters are shown as backslash escapes.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode(errors="backslashreplace")
        self._partial = bytearray()
        # After a carriage return at the end of a chunk, the next chunk may begin with a line feed.
        self._pending_cr = b""

    def feed(self, chunk: bytes) -> bytes:
        """Return the lines that ``chunk`` completes, formatted; often empty."""
        chunk = self._pending_cr + chunk
        self._pending_cr = b"\r" if chunk.endswith(b"\r") else b""
        chunk = chunk[: len(chunk) - len(self._pending_cr)]
        end = chunk.rfind(b"\n") + 1
        whole = bytes(self._partial) + chunk[:end] if end else b""
        if b"\r" in chunk or _NOT_PLAIN.search(whole):
            lines, end = self._feed_lines(chunk)
        # Nearly all output takes this path, which is ten times as fast.
        else:
            lines = self._prefix + _to_utf8(whole[:-1]).replace(b"\n", b"\n" + self._prefix) + b"\n" if end else b""
        if end:
            self._partial.clear()
        self._partial += chunk[end:]
        if len(self._partial) > LONGEST_LINE:
            lines += self._prefix_line(bytes(self._partial))
            self._partial.clear()
        return lines

    def _feed_lines(self, chunk: bytes) -> tuple[bytes, int]:
        """Return the lines that ``chunk`` completes, and the number of bytes used."""
        lines: list[bytes] = []
        end = 0
        for match in _LINE_END.finditer(chunk):
            line = chunk[end : match.start()] if end else bytes(self._partial) + chunk[: match.start()]
            end = match.end()
            # Progress bars begin with a carriage return, which is not an empty line.
            if line or match[0] != b"\r":
                lines.append(self._prefix_line(line))
        return b"".join(lines), end

    def close(self) -> bytes:
        """Return the last line if it has no line end."""
        line = bytes(self._partial)
        self._partial.clear()
        self._pending_cr = b""
        return self._prefix_line(line) if line else b""

    def _prefix_line(self, line: bytes) -> bytes:
        return self._prefix + escape_controls(line) + b"\n"


class PlainStream:
    """Formatter of a single rank's stream, which is passed on unchanged, including progress bars."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._mid_line = False

    def feed(self, chunk: bytes) -> bytes:
        """Return ``chunk`` as valid UTF-8, without an incomplete character at its end."""
        text = self._decoder.decode(chunk)
        if text:
            self._mid_line = not text.endswith("\n")
        return text.encode()

    def close(self) -> bytes:
        """Return the incomplete character, and a line end if the last line has none."""
        text = self._decoder.decode(b"", final=True)
        return text.encode() + (b"\n" if text or self._mid_line else b"")


def escape_controls(line: bytes) -> bytes:
    """Return ``line`` as valid UTF-8 with control characters escaped, so that the line cannot move the cursor.

    Tabs and colours are kept; colours are reset at the end of the line.
    """
    line = _to_utf8(line)
    colours = False

    def escape(match: re.Match[bytes]) -> bytes:
        nonlocal colours
        if match[1] is not None:
            colours = match[1] not in _RESETS
            return match[1]
        return b"\\x%02x" % match[0][-1]

    line = _CONTROL.sub(escape, line)
    return line + _RESET if colours else line


def _to_utf8(text: bytes) -> bytes:
    return text.decode(errors="backslashreplace").encode()


TAIL_LINES = 50  # lines per stream
_MAX_TAIL_LINE_BYTES = 2000  # bytes per line


class TailBuffer:
    """Last lines of one stream, each with a logical time, so that the lines of two streams can be merged in order."""

    def __init__(self, clock: count[int]) -> None:
        self._clock = clock
        self._lines: deque[tuple[int, bytes]] = deque(maxlen=TAIL_LINES)
        self._partial = b""

    def feed(self, chunk: bytes) -> None:
        """Add a chunk of output."""
        *ended, rest = (self._partial + chunk).rsplit(b"\n", TAIL_LINES + 1)
        now = next(self._clock)
        # If the chunk has too many lines, the first part contains all earlier lines.
        self._lines.extend((now, line[-_MAX_TAIL_LINE_BYTES:]) for line in ended[-TAIL_LINES:])
        self._partial = rest[-_MAX_TAIL_LINE_BYTES:]

    def timed_lines(self) -> list[tuple[int, str]]:
        """Return the last lines with their times; a partial line is last."""
        lines = [*self._lines, *([(next(self._clock), self._partial)] if self._partial else [])]
        # A progress bar redraws its line, whose final text counts.
        texts = ((place, escape_controls(line.rstrip(b"\r").rpartition(b"\r")[2]).decode()) for place, line in lines)
        return [(place, text) for place, text in texts if text.strip()]


def merge_tails(tails: tuple[TailBuffer, TailBuffer], n: int) -> list[str]:
    """Merge the last ``n`` non-empty lines of both streams in order of time.

    Half of the lines are reserved for the second stream, because a rank's error messages must not be lost among its output.
    """
    out, err = (tail.timed_lines() for tail in tails)
    reserved = len(err) - min(len(err), n // 2)
    by_time = itemgetter(0)
    earlier = sorted([*out, *err[:reserved]], key=by_time)
    rest = n - (len(err) - reserved)
    return [text for _, text in sorted([*(earlier[-rest:] if rest > 0 else []), *err[reserved:]], key=by_time)]


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
            poll = select.poll()
            for writer in waiting:
                poll.register(writer.fd, select.POLLOUT)
            poll.poll(min(deadline - now, _POLL_INTERVAL_S) * 1000)


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


_BEGIN, _END = LIVE_LINE_BEGIN.encode(), LIVE_LINE_END.encode()
# Carriage return, then erase to the end of the line.
_ERASE = b"\r\x1b[K"
# A longer line without an end is not a live line.
_MAX_BYTES = 4096


def has_live_line(environment: Mapping[str, str]) -> bool:
    """Return True if the standard error of this process is a terminal that can erase a line."""
    return sys.stderr is not None and os.isatty(2) and environment.get("TERM", "dumb") != "dumb"


class LiveLineParser:
    """Parser of one stream that separates live lines from other output. ``text`` is the newest live line."""

    def __init__(self) -> None:
        self.text = b""
        self._partial = b""

    def feed(self, chunk: bytes) -> bytes:
        """Return ``chunk`` without live lines. An incomplete live line waits for the next chunk. Mutates: this parser."""
        chunk, self._partial = self._partial + chunk, b""
        rest = []
        while (start := chunk.find(_BEGIN)) >= 0:
            end = chunk.find(_END, start)
            if end < 0:
                break
            rest.append(chunk[:start])
            self.text = chunk[start + len(_BEGIN) : end]
            chunk = chunk[end + len(_END) :]
        # The end of the chunk may begin a live line.
        begun = next((size for size in range(len(_BEGIN) - 1, 0, -1) if chunk.endswith(_BEGIN[:size])), 0)
        kept = start if start >= 0 else len(chunk) - begun
        if len(chunk) - kept <= _MAX_BYTES:
            chunk, self._partial = chunk[:kept], chunk[kept:]
        return b"".join(rest) + chunk

    def close(self) -> bytes:
        """Return the incomplete live line, which is other output. Mutates: this parser."""
        partial, self._partial = self._partial, b""
        return partial


class LiveTerminal:
    """Terminal with a live line below the other output. ``show`` replaces the live line."""

    def __init__(self, writer: NonBlockingWriter) -> None:
        self._writer = writer
        self._text = b""
        self._is_drawn, self._mid_line = False, False

    def write(self, data: bytes) -> None:
        """Write other output above the live line. The line waits while the output has a partial line."""
        if not data:
            return
        self._mid_line = not data.endswith(b"\n")
        self._send(data)

    def show(self, text: bytes) -> None:
        """Replace the live line."""
        self._text = text
        # A slow terminal gets the newest line later, with other output.
        if not self._mid_line and not self._writer.has_pending:
            self._send(b"")

    def finish(self) -> None:
        """Keep the newest live line as a line of its own, and draw no more. Mutates: this terminal."""
        text, self._text = self._text, b""
        if text or self._is_drawn:
            self._send(escape_controls(text) + b"\n" if text else b"")

    def _send(self, data: bytes) -> None:
        erase = _ERASE if self._is_drawn else b""
        self._is_drawn = bool(self._text) and not self._mid_line
        self._writer.write(erase + data + (self._cut() if self._is_drawn else b""))

    def _cut(self) -> bytes:
        """Return the live line, cut to the width of the terminal, because an erase affects one row only."""
        try:
            columns = os.get_terminal_size(self._writer.fd).columns
        except OSError:
            columns = 0
        text = escape_controls(self._text).decode()
        return text[: (columns or 80) - 1].encode()
