"""Keep the newest live line of rank 0 below the other output of a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from dtrain.launch.output.non_blocking_writer import NonBlockingWriter
from dtrain.launch.output.terminal_lines import escape_controls
from dtrain.launch_protocol import LIVE_LINE_BEGIN, LIVE_LINE_END

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
        kept = start if start >= 0 else len(chunk) - _begun(chunk)
        if len(chunk) - kept <= _MAX_BYTES:
            chunk, self._partial = chunk[:kept], chunk[kept:]
        return b"".join(rest) + chunk

    def close(self) -> bytes:
        """Return the incomplete live line, which is other output. Mutates: this parser."""
        partial, self._partial = self._partial, b""
        return partial


def _begun(chunk: bytes) -> int:
    """Return the number of bytes at the end of ``chunk`` that may begin a live line."""
    return next((size for size in range(len(_BEGIN) - 1, 0, -1) if chunk.endswith(_BEGIN[:size])), 0)


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
