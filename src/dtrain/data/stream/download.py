"""Download and decompress the file of a shard, and verify its size and digests against the index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dtrain.data.stream.formats.compression import decompress
from dtrain.data.stream.formats.shard_format import ShardFile
from dtrain.data.stream.shard_index import new_hash
from dtrain.errors import DataError
from dtrain.storage import AnyPath, Buffer, FileReader

# Number of bytes in memory at a time, which are four requests to a server.
_CHUNK_BYTES = 32 * 2**20


class DownloadStoppedError(Exception):
    """The download was stopped by ``stopped``."""


def download(
    path: AnyPath,
    file: ShardFile,
    write: Callable[[Buffer], None],
    *,
    clear: Callable[[], None],
    stopped: Callable[[], bool] = lambda: False,
    limit: int | None = None,
) -> None:
    """Pass the raw bytes of a file to ``write``, in order.

    Args:
        path: path of the file.
        file: entry of the index.
        write: function that consumes a chunk before the next chunk is fetched.
        clear: function that discards the bytes written so far. A damaged file is fetched once more, in case the network failed.
        stopped: function that is called between chunks; True stops the download.
        limit: maximum of bytes after decompression, if the index does not have that number.

    Raises:
        DataError: the file is missing or unreadable, or has twice a size or digest that differs from the index.
        DownloadStoppedError: ``stopped`` returned True.
    """
    try:
        _write_raw(write, path, file, stopped, limit)
    except ShardIntegrityError:
        clear()
        _write_raw(write, path, file, stopped, limit)


class ShardIntegrityError(DataError):
    """Downloaded bytes that differ from the index."""


def _write_raw(
    write: Callable[[Buffer], None], path: AnyPath, file: ShardFile, stopped: Callable[[], bool], limit: int | None
) -> None:
    stored = ByteVerifier(path, "", file.size, file.digests).verify(_read_chunks(path, file, stopped))
    if file.compression is None:
        for chunk in stored:
            write(chunk)
        return
    raw = ByteVerifier(path, "unpacked ", file.raw_size, file.raw_digests)
    try:
        for unpacked in raw.verify(
            decompress(file.compression, stored, limit=limit if file.raw_size is None else file.raw_size)
        ):
            write(unpacked)
    except ShardIntegrityError:
        raise
    except DataError as error:
        # An OSError means that the file could not be read, which the error says already.
        if isinstance(error.__cause__, OSError):
            raise
        # Read the rest, because a wrong digest is a better error than the decompression error that it causes.
        for _ in stored:
            pass
        raise ShardIntegrityError(f"{path}: {error}") from error


def _read_chunks(path: AnyPath, file: ShardFile, stopped: Callable[[], bool]) -> Iterator[memoryview]:
    """Yield the stored bytes. A chunk is valid until the next chunk is requested."""
    with wrap_os_errors(path), FileReader(path, quiet=True) as reader:
        if reader.size != file.size:
            raise ShardIntegrityError(f"{path}: has {reader.size} bytes, the index has {file.size}")
        step = min(_CHUNK_BYTES, reader.size) if reader.ranges else reader.size
        out = memoryview(bytearray(step))
        for begin in range(0, reader.size, max(1, step)):
            if stopped():
                raise DownloadStoppedError
            chunk = out[: min(step, reader.size - begin)]
            if (count := reader.read_into(begin, chunk)) != len(chunk):
                raise ShardIntegrityError(f"{path}: ends after {begin + count} of {reader.size} bytes")
            yield chunk


@contextmanager
def wrap_os_errors(path: AnyPath) -> Iterator[None]:
    """Convert an ``OSError`` to a ``DataError`` with the path."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: is missing, but the index has it. Restore the file, or write the dataset again.") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}. Check the permissions and the disk.") from error


class ByteVerifier:
    """Check of a stream of bytes against a size and digests, at the end of the stream.

    Raises:
        ConfigError: the algorithm of a digest is unknown.
    """

    def __init__(self, path: AnyPath, kind: str, size: int | None, digests: Mapping[str, str]) -> None:
        self._path, self._kind, self._size, self._digests = path, kind, size, digests
        self._states: dict[str, Any] = {algorithm: new_hash(algorithm) for algorithm in digests}
        self._byte_count = 0

    def verify(self, chunks: Iterable[Any]) -> Iterator[Any]:
        """Yield the chunks unchanged.

        Raises:
            ShardIntegrityError: at the end, the size or a digest differs.
        """
        for chunk in chunks:
            for state in self._states.values():
                state.update(chunk)
            self._byte_count += len(chunk)
            yield chunk
        if self._size is not None and self._byte_count != self._size:
            raise ShardIntegrityError(f"{self._path}: has {self._byte_count} {self._kind}bytes, the index has {self._size}")
        for algorithm, state in self._states.items():
            if (actual := state.hexdigest()) != self._digests[algorithm].lower():
                expected = self._digests[algorithm]
                raise ShardIntegrityError(f"{self._path}: {self._kind}{algorithm} is {actual}, the index has {expected}")
