"""``ShardStore``: open a shard from local disk, from the cache, or with remote range reads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import getuid
from pathlib import Path
from typing import Any

import xxhash

from dtrain import storage
from dtrain.arguments import warn
from dtrain.data.stream.formats.compression import decompress, new_hash
from dtrain.data.stream.formats.shard_format import ByteSource, ShardEntry, ShardFile
from dtrain.data.stream.shard_cache import FORK_REGISTRY, PartialFile, ShardCache
from dtrain.errors import DataError
from dtrain.storage import AnyPath, Buffer, FileReader, LockableFile, RemotePath


class MemorySource:
    """Source of a memory-mapped file, or of bytes in memory."""

    __slots__ = ("_view", "size")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.size = len(view)

    def read(self, begin: int, end: int) -> memoryview:
        """Return the bytes from ``begin`` to ``end``, without a copy."""
        return self._view[begin:end]


class RangeSource:
    """Source of a file on a server that requests ranges of the file."""

    __slots__ = ("_path", "_reader", "size")

    def __init__(self, path: AnyPath, file: ShardFile) -> None:
        self._path = path
        with wrap_os_errors(path):
            self._reader = FileReader(path, quiet=True)
        self.size = self._reader.size
        if self.size != file.size:
            raise DataError(f"{path}: has {self.size} bytes, the index has {file.size}")
        if not self._reader.ranges:
            raise DataError(f"{path}: the server has no range requests. Use download='whole'.")

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from ``begin`` to ``end``; fewer at the end of the file."""
        out = bytearray(max(0, min(end, self.size) - begin))
        with wrap_os_errors(self._path):
            count = self._reader.read_into(begin, memoryview(out))
        return bytes(memoryview(out)[:count])


MAX_SHARD_BYTES = 16 * 2**30
"""Default limit of a shard's bytes after decompression."""

_MAX_CACHE_BYTES = 64 * 2**30
_VERIFY_CHUNK_BYTES = 2**24


def default_cache_folder(root: AnyPath) -> Path:
    """Return the default cache of a dataset: a private folder in the folder for temporary files, named by a hash of the URL."""
    return Path(tempfile.gettempdir()) / f"dtrain-cache-{getuid()}" / xxhash.xxh3_128_hexdigest(str(root).encode())


def default_cache_bytes(folder: Path) -> int:
    """Return 64 GiB, or three quarters of the disk space for the cache, if that is less."""
    free = storage.free_bytes(folder)
    cached = sum(entry.size for entry in storage.scan_folder(folder)) if storage.is_folder(folder) else 0
    return _MAX_CACHE_BYTES if free is None else min(_MAX_CACHE_BYTES, (free + cached) * 3 // 4)


class ShardStore:
    """Shards of one dataset.

    Args:
        root: folder of the dataset.
        cache: cache of shards that are not read in place.
        ranged: if True, only the bytes of samples are read from a server.
        verify: if True, digests of local and cached files are checked; downloads are always checked.
        follow_links: if True, links may lead out of a local folder.
        max_shard_bytes: maximum of a compressed shard's bytes after decompression.
    """

    def __init__(
        self,
        root: AnyPath,
        cache: ShardCache,
        *,
        ranged: bool,
        verify: bool,
        follow_links: bool = False,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        self.root, self.cache, self.ranged, self.verify, self.follow_links = root, cache, ranged, verify, follow_links
        self.max_shard_bytes = max_shard_bytes
        self._real_root = None if isinstance(root, RemotePath) else storage.real_path(root)
        self._verified: set[str] = set()
        self._has_warned = False

    def resolve(self, name: str) -> AnyPath:
        """Return the path of a file of the dataset, with local links resolved.

        Raises:
            DataError: a link leads out of the folder, and ``follow_links`` is False.
        """
        if self._real_root is None:
            return self.root / name
        real = storage.real_path(self._real_root / name)
        if not self.follow_links and not real.is_relative_to(self._real_root):
            raise DataError(
                f"{self.root / name}: is a link to {real}, out of the dataset's folder. Pass follow_links=True to trust it."
            )
        return real

    def uses_cache(self, file: ShardFile) -> bool:
        """Return True if the shard is downloaded or decompressed to the cache."""
        if isinstance(self.root, RemotePath):
            return not self.ranged
        return file.compression is not None and self._unpacked_copy(file) is None

    def is_available(self, file: ShardFile) -> bool:
        """Return True if the shard can be read at once."""
        return not self.uses_cache(file) or self.cache.contains(self._cache_key(file))

    def open(self, entry: ShardEntry) -> tuple[ByteSource, int]:
        """Open the raw bytes of a shard, and return the bytes of the cache that they keep in use as well.

        Raises:
            DataError: the bytes cannot be read, or differ from the index.
        """
        file = entry.file
        if not self.uses_cache(file):
            if isinstance(self.root, RemotePath):
                return RangeSource(self.root / file.name, file), 0
            return MemorySource(self._open_in_place(file)), 0
        try:
            view = self.cache.get(
                self._cache_key(file),
                bytes_to_reserve(file),
                lambda partial_file: self._download(file, partial_file),
                is_sound=lambda view: self._is_sound(file, view),
            )
        except OSError as error:
            # The disk of the cache failed.
            raise DataError(
                f"{self.cache.folder}: cannot store {file.name}: {error.strerror or error}. "
                "Free space in the cache's folder, or pass another cache=."
            ) from error
        if view is None:
            return MemorySource(self._read_into_memory(file)), 0
        return MemorySource(view), len(view)

    def _is_sound(self, file: ShardFile, view: memoryview) -> bool:
        """Return False if the bytes of a cached shard differ from the index."""
        try:
            self._verify(self.cache.folder / self._cache_key(file), file, view)
        except ShardIntegrityError:
            self._verified.discard(file.name)
            return False
        return True

    def _verify(self, path: Path, file: ShardFile, view: memoryview) -> None:
        """Compare a file with the index: the number of raw bytes always, the digests once."""
        digests = file.raw_digests if self.verify and file.name not in self._verified else {}
        chunks = (view[begin : begin + _VERIFY_CHUNK_BYTES] for begin in range(0, len(view), _VERIFY_CHUNK_BYTES))
        for _ in verify_bytes(chunks, path, file.raw_size, digests):
            pass
        self._verified.add(file.name)

    def prefetch(self, file: ShardFile, stopped: Callable[[], bool]) -> None:
        """Fetch the shard into the cache, unless another process does so, or there is no room."""
        self.cache.fill(
            self._cache_key(file), bytes_to_reserve(file), lambda partial_file: self._download(file, partial_file, stopped)
        )

    def _cache_key(self, file: ShardFile) -> str:
        """Return the shard's name in the cache, equal for equal bytes. Without digests, the modification time is part of it."""
        digests: object = sorted(file.digests.items()), sorted(file.raw_digests.items())
        path = self.root / file.name
        if not (file.digests or file.raw_digests or isinstance(path, RemotePath)):
            digests = storage.modified_ns(path)
        key = f"{self.root}\0{file.name}\0{file.size}\0{file.compression}\0{digests}"
        return xxhash.xxh3_128_hexdigest(key.encode())

    def _download(self, file: ShardFile, partial_file: PartialFile, stopped: Callable[[], bool] = lambda: False) -> None:
        download(
            self.resolve(file.name),
            file,
            partial_file.write,
            clear=partial_file.clear,
            stopped=stopped,
            limit=self.max_shard_bytes,
        )
        self._verified.add(file.name)

    def _read_into_memory(self, file: ShardFile) -> memoryview:
        """Read the shard into memory, because the cache has no room, and warn once."""
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"{self.root}: other processes use all {self.cache.limit} bytes of the cache, or have a damaged copy open, so "
                f"{file.name} is read into memory. Raise cache_bytes, or lower max_open_shards"
            )
        content = bytearray()
        download(
            self.resolve(file.name),
            file,
            lambda data: content.extend(memoryview(data)),
            clear=content.clear,
            limit=self.max_shard_bytes,
        )
        return memoryview(content).toreadonly()

    def _unpacked_copy(self, file: ShardFile) -> Path | None:
        """Return the decompressed copy that another reader has left beside a compressed file; None if there is no such copy."""
        assert not isinstance(self.root, RemotePath), "the copy is a local file"
        if file.raw_name is None or file.raw_name == file.name or file.raw_size is None:
            return None
        path = self.root / file.raw_name
        return path if storage.file_size(path) == file.raw_size else None

    def _open_in_place(self, file: ShardFile) -> memoryview:
        """Memory-map a local file."""
        assert not isinstance(self.root, RemotePath), "the file is a local file"
        name = file.name if file.compression is None else file.raw_name or file.name
        path, real = self.root / name, self.resolve(name)
        assert isinstance(real, Path), "the file is a local file"
        with wrap_os_errors(path), FORK_REGISTRY.lock, LockableFile(real) as opened:
            view = opened.map_memory()
        self._verify(path, file, view)
        return view


def bytes_to_reserve(file: ShardFile) -> int:
    """Return the bytes to reserve in the cache. The reservation grows later if the index has no raw size."""
    return file.size if file.raw_size is None else file.raw_size


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
    stored = verify_bytes(_read_chunks(path, file, stopped), path, file.size, file.digests)
    if file.compression is None:
        for chunk in stored:
            write(chunk)
        return
    raw = decompress(file.compression, stored, limit=limit if file.raw_size is None else file.raw_size)
    try:
        for chunk in verify_bytes(raw, path, file.raw_size, file.raw_digests, kind="unpacked "):
            write(chunk)
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


def verify_bytes(
    chunks: Iterable[Any], path: AnyPath, size: int | None, digests: Mapping[str, str], *, kind: str = ""
) -> Iterator[Any]:
    """Yield the chunks of a file unchanged, and compare their size and digests with the index at the end.

    Raises:
        ConfigError: the algorithm of a digest is unknown.
        ShardIntegrityError: at the end, the size or a digest differs.
    """
    states: dict[str, Any] = {algorithm: new_hash(algorithm) for algorithm in digests}
    byte_count = 0
    for chunk in chunks:
        for state in states.values():
            state.update(chunk)
        byte_count += len(chunk)
        yield chunk
    if size is not None and byte_count != size:
        raise ShardIntegrityError(f"{path}: has {byte_count} {kind}bytes, the index has {size}")
    for algorithm, state in states.items():
        if (actual := state.hexdigest()) != digests[algorithm].lower():
            raise ShardIntegrityError(f"{path}: {kind}{algorithm} is {actual}, the index has {digests[algorithm]}")
