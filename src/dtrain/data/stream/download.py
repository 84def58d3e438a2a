"""The raw bytes of a shard's file: fetched, unpacked on the way, and held against every digest that the index gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dtrain.data.stream.formats.compression import decompress
from dtrain.data.stream.formats.shard_format import ShardFile
from dtrain.data.stream.shard_index import new_hash
from dtrain.errors import DataError
from dtrain.storage import AnyPath, Buffer, FileReader

_CHUNK_BYTES = 32 * 2**20  # held at a time; to a server four requests


class DownloadStoppedError(Exception):
    """The download was told to stop."""


def download(
    place: AnyPath,
    file: ShardFile,
    write: Callable[[Buffer], None],
    *,
    clear: Callable[[], None],
    stopped: Callable[[], bool] = lambda: False,
    limit: int | None = None,
) -> None:
    """Hand the raw bytes of a file to ``write``, from the first to the last.

    Args:
        place: where the file is.
        file: what the index says of it.
        write: takes each piece before the next one is fetched.
        clear: forgets what was written. What came wrong is fetched once more, since it may be the network's fault.
        stopped: asked between pieces.
        limit: bytes after decompression, where the index does not say them.

    Raises:
        DataError: the file is missing, or cannot be read; it has another size or digest than the index says, twice.
        DownloadStoppedError: ``stopped()``.
    """
    try:
        _write_raw(write, place, file, stopped, limit)
    except ShardIntegrityError:
        clear()
        _write_raw(write, place, file, stopped, limit)


class ShardIntegrityError(DataError):
    """What came is not what the index says."""


def _write_raw(
    write: Callable[[Buffer], None], place: AnyPath, file: ShardFile, stopped: Callable[[], bool], limit: int | None
) -> None:
    stored = ByteVerifier(place, "", file.size, file.digests).verify(_read_chunks(place, file, stopped))
    if file.compression is None:
        for piece in stored:
            write(piece)
        return
    raw = ByteVerifier(place, "unpacked ", file.raw_size, file.raw_digests)
    try:
        for unpacked in raw.verify(
            decompress(file.compression, stored, limit=limit if file.raw_size is None else file.raw_size)
        ):
            write(unpacked)
    except ShardIntegrityError:
        raise
    except DataError as error:
        if isinstance(error.__cause__, OSError):  # the file itself could not be read: it is said already
            raise
        for _ in stored:  # a wrong digest says more than what a wrong byte did to the unpacking
            pass
        raise ShardIntegrityError(f"{place}: {error}") from error


def _read_chunks(place: AnyPath, file: ShardFile, stopped: Callable[[], bool]) -> Iterator[memoryview]:
    """The stored bytes. Each piece is good until the next one is asked for."""
    with wrap_os_errors(place), FileReader(place, quiet=True) as reader:
        if reader.size != file.size:
            raise ShardIntegrityError(f"{place}: has {reader.size} bytes, the index says {file.size}")
        step = min(_CHUNK_BYTES, reader.size) if reader.ranges else reader.size
        out = memoryview(bytearray(step))
        for begin in range(0, reader.size, max(1, step)):
            if stopped():
                raise DownloadStoppedError
            piece = out[: min(step, reader.size - begin)]
            if (got := reader.read_into(begin, piece)) != len(piece):
                raise ShardIntegrityError(f"{place}: ends after {begin + got} of {reader.size} bytes")
            yield piece


class wrap_os_errors:  # reads as a statement: with unreadable(place)
    """A context in which an ``OSError`` becomes a ``DataError`` that says what could not be read."""

    def __init__(self, place: AnyPath) -> None:
        self._place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FileNotFoundError):
            raise DataError(f"{self._place}: is missing; the index names it") from error
        if isinstance(error, OSError):
            raise DataError(f"{self._place}: cannot be read: {error.strerror or error}") from error


class ByteVerifier:
    """Holds bytes that go by against a size and digests, at their end.

    Raises:
        ConfigError: a digest of an algorithm that is not known.
    """

    def __init__(self, place: AnyPath, what: str, size: int | None, digests: Mapping[str, str]) -> None:
        self._place, self._what, self._size, self._digests = place, what, size, digests
        self._states: dict[str, Any] = {algorithm: new_hash(algorithm) for algorithm in digests}
        self._done = 0

    def verify(self, pieces: Iterable[Any]) -> Iterator[Any]:
        """The same pieces.

        Raises:
            ShardIntegrityError: at the end, when they are not what they should be.
        """
        for piece in pieces:
            for state in self._states.values():
                state.update(piece)
            self._done += len(piece)
            yield piece
        if self._size is not None and self._done != self._size:
            raise ShardIntegrityError(f"{self._place}: has {self._done} {self._what}bytes, the index says {self._size}")
        for algorithm, state in self._states.items():
            if (came := state.hexdigest()) != self._digests[algorithm].lower():
                expected = self._digests[algorithm]
                raise ShardIntegrityError(f"{self._place}: {self._what}{algorithm} is {came}, the index says {expected}")
