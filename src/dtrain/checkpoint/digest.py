"""Digests of a data file in chunks: computed by the threads that write it, checked whenever it is read."""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from dtrain.checkpoint.layout import CHUNK_BYTES
from dtrain.errors import DamagedCheckpointError
from dtrain.storage import Buffer, FileReader


def digest_of(buffers: Iterable[Buffer]) -> str:
    """The digest of a chunk, whose bytes are those of ``buffers`` one after the other."""
    state = xxhash.xxh3_128()
    for buffer in buffers:
        state.update(buffer)
    return state.hexdigest()


def chunks_of(begin: int, end: int) -> range:
    """The chunks that bytes ``[begin, end)`` lie in."""
    return range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)) if end > begin else range(0)


class VerifiedReader:
    """Byte ranges of a data file, each chunk checked against its digest every time it is fetched.

    Keeps the chunk it fetched last, so reads in the order of the file fetch each chunk once.
    """

    def __init__(self, file: FileReader, name: str, chunks: tuple[str, ...]) -> None:
        self.file, self.name, self.chunks = file, name, chunks
        self._buffer = bytearray()
        self._held: int | None = None

    def verify(self, chunks: Iterable[int]) -> None:
        """Check these chunks, whatever is in them."""
        for chunk in chunks:
            self._fetch(chunk)

    def read(self, begin: int, end: int) -> bytearray:
        """The bytes ``[begin, end)``.

        Raises:
            DamagedCheckpointError: a chunk does not have its digest, or is not there.
        """
        out = bytearray(end - begin)
        for chunk in chunks_of(begin, end):
            start = chunk * CHUNK_BYTES
            low, high = max(begin, start), min(end, start + CHUNK_BYTES)
            out[low - begin : high - begin] = self._fetch(chunk)[low - start : high - start]
        return out

    def _fetch(self, chunk: int) -> memoryview:
        start = chunk * CHUNK_BYTES
        if not self._buffer:
            self._buffer = bytearray(min(CHUNK_BYTES, self.file.size))
        view = memoryview(self._buffer)[: min(CHUNK_BYTES, self.file.size - start)]
        if self._held == chunk:
            return view
        self._held = None
        got = self.file.read_into(start, view)
        if got != len(view) or digest_of([view]) != self.chunks[chunk]:
            raise DamagedCheckpointError(f"{self.name}: bytes from {start} on do not match their digest")
        self._held = chunk
        return view
