"""A file of any place as Python's file objects have it, so that readers of other packages take it; bytes read are reported."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dtrain import storage
from dtrain.storage import Place

_HERE = 2**18  # bytes of one read of a local file
_THERE = 2**23  # on a server a request costs more than the bytes
_PIECE = 2**18  # of what is unpacked


class _Raw(io.RawIOBase):
    def __init__(self, place: Place, advance: Callable[[int], None]) -> None:
        super().__init__()
        self._file = storage.FileReader(place, quiet=True)
        self._advance = advance
        self._at = 0
        self.piece = _THERE if self._file.is_remote else _HERE

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence] + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, out: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(out), max(0, self._file.size - self._at))
        got = self._file.read_into(self._at, memoryview(out).cast("B")[:wanted])
        self._at += got
        self._advance(got)
        return got

    def close(self) -> None:
        if not self.closed:
            self._file.__exit__(None, None, None)
        super().close()


def open_binary(place: Place, advance: Callable[[int], None]) -> io.BufferedReader:
    """The file, buffered. ``advance`` is told about bytes as they are read."""
    raw = _Raw(place, advance)
    return io.BufferedReader(raw, raw.piece)


class _Unpacked(io.RawIOBase):
    """Pieces of bytes as one file, read from its beginning."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        super().__init__()
        self._pieces, self._rest = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, out: memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            if (piece := next(self._pieces, None)) is None:
                return 0
            self._rest = memoryview(piece)
        taken = min(len(out), len(self._rest))
        out[:taken] = self._rest[:taken]
        self._rest = self._rest[taken:]
        return taken


@contextmanager
def open_plain(place: Place, advance: Callable[[int], None]) -> Iterator[io.BufferedReader]:
    """The file's content after decompression, if the end of its name tells one."""
    with open_binary(place, advance) as file:
        if (compression := compression_of(place.name)) is None:
            yield file
            return
        from dtrain.data.stream.formats.compression import decompressed

        yield io.BufferedReader(_Unpacked(decompressed(compression, iter(lambda: file.read(_PIECE), b""))), _PIECE)


def compression_of(name: str) -> str | None:
    """The compression that the end of a file's name tells."""
    from dtrain.data.stream.formats.compression import SUFFIXES

    return next((compression for suffix, compression in SUFFIXES.items() if name.lower().endswith(suffix)), None)
