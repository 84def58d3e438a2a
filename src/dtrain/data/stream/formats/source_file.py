"""A source as a file object, for libraries that want one."""

from __future__ import annotations

import io
import os
from typing import Any

from dtrain.data.stream.formats.base import Source


class SourceFile(io.RawIOBase):
    """Reads the bytes of a ``Source``; it has a position, and no buffer."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """The position."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go there."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._source.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """At most so many bytes; all that are left if none or a negative number is given."""
        left = max(0, self._source.size - self._at)
        count = left if size is None or size < 0 else min(size, left)
        data = bytes(self._source.read(self._at, self._at + count)) if count else b""
        self._at += len(data)
        return data

    def readinto(self, out: Any, /) -> int:
        """Fill ``out``, as far as there are bytes."""
        view = memoryview(out).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)
