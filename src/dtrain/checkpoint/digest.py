"""Digests of a data file in chunks: computed by a second thread while it is written, checked whenever it is read."""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterable
from types import TracebackType

from dtrain.checkpoint.layout import CHUNK_BYTES
from dtrain.errors import DamagedCheckpointError
from dtrain.storage import Buffer, FileReader


class ChunkDigests:
    """The sha256 of each ``CHUNK_BYTES`` of a stream, the last chunk being as short as it comes."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._open = hashlib.sha256()
        self._filled = 0

    def update(self, data: Buffer) -> None:
        """Take the next bytes of the stream."""
        rest = memoryview(data).cast("B")
        while rest:
            part = rest[: CHUNK_BYTES - self._filled]
            self._open.update(part)
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == CHUNK_BYTES:
                self._close()

    def finish(self) -> tuple[str, ...]:
        """The digests of all that was taken."""
        if self._filled:
            self._close()
        return tuple(self._done)

    def _close(self) -> None:
        self._done.append(self._open.hexdigest())
        self._open, self._filled = hashlib.sha256(), 0


class DigestThread:
    """``ChunkDigests`` computed by a thread of its own (hashing releases the interpreter lock). A context manager.

    ``put`` hands over bytes that nobody changes until ``finish``. At most ``depth`` pieces wait, so a slow digest slows the
    writer down instead of holding memory. An error in the thread is raised by the next call.
    """

    def __init__(self, *, depth: int = 4) -> None:
        self._waiting: queue.Queue[Buffer | None] = queue.Queue(depth)
        self._digests = ChunkDigests()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="dtrain-digest", daemon=True)
        self._thread.start()

    def put(self, data: Buffer) -> None:
        """Hash these bytes after those before."""
        self._check()
        self._waiting.put(data)

    def finish(self) -> tuple[str, ...]:
        """The digests of all that was put."""
        self._stop()
        self._check()
        return self._digests.finish()

    def __enter__(self) -> DigestThread:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def _run(self) -> None:
        # After an error it goes on taking pieces: a writer that waits for room in the queue must not wait for ever.
        while (data := self._waiting.get()) is not None:
            if self._error is None:
                try:
                    self._digests.update(data)
                except BaseException as error:  # noqa: BLE001  # raised again in the writing thread
                    self._error = error

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


def chunks_of(begin: int, end: int) -> range:
    """The chunks that bytes ``[begin, end)`` lie in."""
    return range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)) if end > begin else range(0)


class VerifiedReader:
    """Byte ranges of a data file, each chunk checked against its digest every time it is fetched.

    Keeps the chunk it fetched last, so reads in the order of the file fetch each chunk once.
    """

    def __init__(self, file: FileReader, name: str, chunks: tuple[str, ...]) -> None:
        self._file, self._name, self._chunks = file, name, chunks
        self._buffer = bytearray(min(CHUNK_BYTES, file.size))
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
        view = memoryview(self._buffer)[: min(CHUNK_BYTES, self._file.size - start)]
        if self._held == chunk:
            return view
        self._held = None
        got = self._file.read_into(start, view)
        if got != len(view) or hashlib.sha256(view).hexdigest() != self._chunks[chunk]:
            raise DamagedCheckpointError(f"{self._name}: bytes from {start} on do not match their sha256")
        self._held = chunk
        return view
