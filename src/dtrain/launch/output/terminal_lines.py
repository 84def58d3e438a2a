"""How lost output is counted and explained.

A stream cut into chunks, as whole lines that a terminal can show: marked, valid UTF-8, and without foreign controls.

The last lines of a rank, kept for the report of its failure."""

from __future__ import annotations

import codecs
import re
from collections import deque
from itertools import count


def count_lines(data: bytes) -> int:
    """Lines in ``data``; a part of one counts as one when there is nothing else."""
    return data.count(b"\n") or (1 if data else 0)


def describe_os_error(error: OSError) -> str:
    """Why a write failed, in the system's words."""
    return error.strerror or "it cannot be written"


LONGEST_LINE = 8 << 20  # bytes; a longer one is cut, so that output without line ends cannot fill the memory

_LINE_END = re.compile(rb"\r\n?|\n")
# In valid UTF-8 the byte C2 begins a character, so its successors 80 to 9F are the C1 controls and nothing else.
_CONTROL = re.compile(rb"(\x1b\[[0-9;:]*m)|[\x00-\x08\x0a-\x1f\x7f]|\xc2[\x80-\x9f]")
_NOT_PLAIN = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")  # line feeds and tabs are plain
_RESET = b"\x1b[0m"
_RESETS = {_RESET, b"\x1b[m"}


class LinePrefixer:
    """Turns the chunks of one stream into whole lines, each with a prefix, fit for a terminal.

    A carriage return ends a line as well, so that progress bars of several ranks become lines instead of overwriting
    each other. Bytes that are not UTF-8 come out as backslash escapes, and so do control characters.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode(errors="backslashreplace")
        self._partial = bytearray()
        self._pending_cr = b""  # a carriage return at the end of a chunk: the line feed may be in the next one

    def feed(self, chunk: bytes) -> bytes:
        """The lines that ``chunk`` completes, ready to be written; often empty."""
        chunk = self._pending_cr + chunk
        self._pending_cr = b"\r" if chunk.endswith(b"\r") else b""
        chunk = chunk[: len(chunk) - len(self._pending_cr)]
        end = chunk.rfind(b"\n") + 1
        whole = bytes(self._partial) + chunk[:end] if end else b""
        if b"\r" in chunk or _NOT_PLAIN.search(whole):
            lines, end = self._feed_lines(chunk)
        else:  # nearly all output: ten times as fast
            lines = self._prefix + _ensure_utf8(whole[:-1]).replace(b"\n", b"\n" + self._prefix) + b"\n" if end else b""
        if end:
            self._partial.clear()
        self._partial += chunk[end:]
        if len(self._partial) > LONGEST_LINE:
            lines += self._prefix_line(bytes(self._partial))
            self._partial.clear()
        return lines

    def _feed_lines(self, chunk: bytes) -> tuple[bytes, int]:
        """The lines that ``chunk`` completes, and how much of it they are."""
        lines: list[bytes] = []
        end = 0
        for match in _LINE_END.finditer(chunk):
            line = chunk[end : match.start()] if end else bytes(self._partial) + chunk[: match.start()]
            end = match.end()
            if line or match[0] != b"\r":  # progress bars begin with a carriage return: that is no empty line
                lines.append(self._prefix_line(line))
        return b"".join(lines), end

    def close(self) -> bytes:
        """The last line, if it never got its end."""
        line = bytes(self._partial)
        self._partial.clear()
        self._pending_cr = b""
        return self._prefix_line(line) if line else b""

    def _prefix_line(self, line: bytes) -> bytes:
        return self._prefix + escape_controls(line) + b"\n"


class PlainStream:
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


def escape_controls(line: bytes) -> bytes:
    """``line`` as UTF-8 that moves no cursor and clears no screen: what is no text is shown as its escape.

    Tabs are kept, and so are colours; those end where the line does.
    """
    line = _ensure_utf8(line)
    colours = False

    def shown(match: re.Match[bytes]) -> bytes:
        nonlocal colours
        if match[1] is not None:
            colours = match[1] not in _RESETS
            return match[1]
        return b"\\x%02x" % match[0][-1]

    line = _CONTROL.sub(shown, line)
    return line + _RESET if colours else line


def _ensure_utf8(text: bytes) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError:
        return text.decode(errors="backslashreplace").encode()
    return text


TAIL_LINES = 50  # of each stream
_MAX_TAIL_LINE_BYTES = 2000  # bytes of a line


class TailBuffer:
    """The last lines of one stream, each with the moment in which it ended, so that two streams can be told in order."""

    def __init__(self, clock: count[int]) -> None:
        self._clock = clock
        self._lines: deque[tuple[int, bytes]] = deque(maxlen=TAIL_LINES)
        self._partial = b""

    def feed(self, chunk: bytes) -> None:
        """Take in what was written."""
        *ended, rest = (self._partial + chunk).rsplit(b"\n", TAIL_LINES + 1)
        now = next(self._clock)
        # Where the chunk had more lines than are kept, the first piece is all of those before.
        self._lines.extend((now, line[-_MAX_TAIL_LINE_BYTES:]) for line in ended[-TAIL_LINES:])
        self._partial = rest[-_MAX_TAIL_LINE_BYTES:]

    def timed_lines(self) -> list[tuple[int, str]]:
        """What is kept, the line without an end last."""
        kept = [*self._lines, *([(next(self._clock), self._partial)] if self._partial else [])]
        return [(at, text) for at, line in kept if (text := _visible_text(line)).strip()]


def merge_tails(tails: tuple[TailBuffer, TailBuffer], n: int) -> list[str]:
    """The last ``n`` lines of both streams that are not empty, in the order in which they ended.

    Half of them are kept for the second stream: what a rank says about its end must not be lost in what it prints.
    """
    out, err = (tail.timed_lines() for tail in tails)
    kept = len(err) - min(len(err), n // 2)
    others = sorted([*out, *err[:kept]], key=_line_time)
    rest = n - (len(err) - kept)
    return [text for _, text in sorted([*(others[-rest:] if rest > 0 else []), *err[kept:]], key=_line_time)]


def _line_time(line: tuple[int, str]) -> int:
    return line[0]


def _visible_text(line: bytes) -> str:
    """What a progress bar that was drawn over and over shows in the end."""
    return escape_controls(line.rstrip(b"\r").rpartition(b"\r")[2]).decode()
