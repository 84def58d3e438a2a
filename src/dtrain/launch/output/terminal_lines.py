"""Split output streams into lines for a terminal, escape control characters, and keep the last lines of each rank."""

from __future__ import annotations

import codecs
import re
from collections import deque
from itertools import count


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
            lines = self._prefix + _ensure_utf8(whole[:-1]).replace(b"\n", b"\n" + self._prefix) + b"\n" if end else b""
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
    line = _ensure_utf8(line)
    colours = False

    def escape(match: re.Match[bytes]) -> bytes:
        nonlocal colours
        if match[1] is not None:
            colours = match[1] not in _RESETS
            return match[1]
        return b"\\x%02x" % match[0][-1]

    line = _CONTROL.sub(escape, line)
    return line + _RESET if colours else line


def _ensure_utf8(text: bytes) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError:
        return text.decode(errors="backslashreplace").encode()
    return text


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
        return [(at, text) for at, line in lines if (text := _visible_text(line)).strip()]


def merge_tails(tails: tuple[TailBuffer, TailBuffer], n: int) -> list[str]:
    """Merge the last ``n`` non-empty lines of both streams in order of time.

    Half of the lines are reserved for the second stream, because a rank's error messages must not be lost among its output.
    """
    out, err = (tail.timed_lines() for tail in tails)
    reserved = len(err) - min(len(err), n // 2)
    earlier = sorted([*out, *err[:reserved]], key=_line_time)
    rest = n - (len(err) - reserved)
    return [text for _, text in sorted([*(earlier[-rest:] if rest > 0 else []), *err[reserved:]], key=_line_time)]


def _line_time(line: tuple[int, str]) -> int:
    return line[0]


def _visible_text(line: bytes) -> str:
    """Return the final text of a line that a progress bar has redrawn."""
    return escape_controls(line.rstrip(b"\r").rpartition(b"\r")[2]).decode()
