"""Read files of JSON lines incrementally in batches, and count unreadable lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from dtrain.report.model import Row

# A few hundred lines are parsed in one call and stay in the cache of the processor.
_CHUNK_BYTES = 1 << 16
# A file without line ends must not fill the memory.
_MAX_LINE_BYTES = 16 << 20


class JsonlReader:
    """Reader of a file of JSON lines. Continues at the last position after the file has grown.

    Attributes:
        path: file.
        read_bytes: number of bytes read so far.
        unreadable: number of lines so far that are not JSON objects.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read_bytes = 0
        self.unreadable = 0
        self._partial_line = b""
        # True inside a line that is too long
        self._skipping_line = False

    def read_batches(self) -> Iterator[list[Row]]:
        """Yield the new objects in batches. A line without end stays for the next call.

        Raises:
            OSError: the file is missing or unreadable.
        """
        with self.path.open("rb", buffering=0) as file:
            # A smaller file is a new file.
            if os.fstat(file.fileno()).st_size < self.read_bytes:
                self.read_bytes, self._partial_line, self._skipping_line = 0, b"", False
            file.seek(self.read_bytes)
            yield from self._read_from(file)

    def _read_from(self, file: BinaryIO) -> Iterator[list[Row]]:
        while chunk := file.read(_CHUNK_BYTES):
            self.read_bytes += len(chunk)
            ended = chunk.rfind(b"\n")
            if ended < 0:
                self._partial_line += chunk
                if len(self._partial_line) > _MAX_LINE_BYTES:
                    self._partial_line, self._skipping_line = b"", True
                continue
            whole, self._partial_line = self._partial_line + chunk[:ended], chunk[ended + 1 :]
            if self._skipping_line:
                self._skipping_line = False
                self.unreadable += 1
                whole = whole.partition(b"\n")[2]
            if whole:
                yield self._parse_batch(whole)

    def read_last_line(self) -> list[Row]:
        """Return the object in a last line without end, after the writer has finished."""
        rest, self._partial_line = self._partial_line, b""
        if self._skipping_line:
            self._skipping_line = False
            self.unreadable += 1
            return []
        return self._parse_batch(rest) if rest else []

    def _parse_batch(self, whole: bytes) -> list[Row]:
        try:
            rows: list[Row] = json.loads((b"[" + whole.replace(b"\n", b",") + b"]").decode())
            if len(rows) == whole.count(b"\n") + 1 and set(map(type, rows)) == {dict}:
                return rows
        except (ValueError, RecursionError):
            pass
        return self._parse_lines(whole)

    def _parse_lines(self, whole: bytes) -> list[Row]:
        rows = []
        for line in whole.split(b"\n"):
            # A later attempt ends the partial line of an earlier attempt.
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode())
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                self.unreadable += 1
        return rows
