"""Where the raw bytes of an opened shard come from: memory, mapped or not, or ranges of a file on a server."""

from __future__ import annotations

from dtrain.data.stream.download import unreadable
from dtrain.data.stream.formats.base import ShardFile
from dtrain.errors import DataError
from dtrain.storage import FileReader, Place


class MemorySource:
    """Bytes that are there: a file's, mapped."""

    __slots__ = ("_view", "size")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.size = len(view)

    def read(self, begin: int, end: int) -> memoryview:
        """The bytes from ``begin`` up to ``end``, not copied."""
        return self._view[begin:end]


class RangedSource:
    """A file of which only what is asked for is read, one request each time."""

    __slots__ = ("_place", "_reader", "size")

    def __init__(self, place: Place, file: ShardFile) -> None:
        self._place = place
        with unreadable(place):
            self._reader = FileReader(place, quiet=True)
        self.size = self._reader.size
        if self.size != file.size:
            raise DataError(f"{place}: has {self.size} bytes, the index says {file.size}")
        if not self._reader.ranges:
            raise DataError(f"{place}: the server gives whole files only; use download='whole'")

    def read(self, begin: int, end: int) -> bytes:
        """The bytes from ``begin`` up to ``end``; fewer only where the file ends."""
        out = bytearray(max(0, min(end, self.size) - begin))
        with unreadable(self._place):
            got = self._reader.read_into(begin, memoryview(out))
        return bytes(memoryview(out)[:got])
