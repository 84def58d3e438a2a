"""Files of JSON lines, read fast and whatever is in them: objects in batches, and a count of the lines that are none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

Row = dict[str, Any]

_CHUNK_BYTES = (
    1 << 16
)  # a few hundred lines: parsed in one call, and small enough to stay in the processor's cache until they are used
_MAX_LINE_BYTES = 16 << 20  # of a line; a file without line ends must not fill the memory


class JsonlReader:
    """The objects in a file of JSON lines. Reads on where it stopped, when the file has grown.

    Attributes:
        path: the file.
        read_bytes: so far.
        unreadable: lines so far that are no JSON object.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read_bytes = 0
        self.unreadable = 0
        self._partial_line = b""
        self._skipping_line = False  # in a line that is too long

    def read_batches(self) -> Iterator[list[Row]]:
        """What has come since the last call, in batches. A line that is not ended yet stays for the next call.

        Raises:
            OSError: the file is not there, or cannot be read.
        """
        with self.path.open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size < self.read_bytes:  # another file by now
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
        """What a file's last line holds, if that has no end: of a file that nobody writes any more."""
        rest, self._partial_line = self._partial_line, b""
        if self._skipping_line:
            self._skipping_line = False
            self.unreadable += 1
            return []
        return self._parse_batch(rest) if rest else []

    def _parse_batch(self, whole: bytes) -> list[Row]:
        try:
            found: list[Row] = json.loads((b"[" + whole.replace(b"\n", b",") + b"]").decode())
            if len(found) == whole.count(b"\n") + 1 and set(map(type, found)) == {dict}:
                return found
        except (ValueError, RecursionError):
            pass
        return self._parse_lines(whole)

    def _parse_lines(self, whole: bytes) -> list[Row]:
        found = []
        for line in whole.split(b"\n"):
            if not line.strip():  # a later attempt ends the line that an earlier one has begun
                continue
            try:
                row = json.loads(line.decode())
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                found.append(row)
            else:
                self.unreadable += 1
        return found
