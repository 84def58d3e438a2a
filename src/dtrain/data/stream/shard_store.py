"""Where the raw bytes of an opened shard come from: memory, mapped or not, or ranges of a file on a server.

How the bytes of a shard are had: in place, from the cache, or by ranges of a file on a server."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from os import getuid
from pathlib import Path

import xxhash

from dtrain import storage
from dtrain.data.stream.download import ByteVerifier, ShardIntegrityError, download, wrap_os_errors
from dtrain.data.stream.fork_safety import FORK_REGISTRY
from dtrain.data.stream.formats.shard_format import ByteSource, ShardEntry, ShardFile
from dtrain.data.stream.shard_cache import PartialFile, ShardCache
from dtrain.errors import DataError
from dtrain.storage import AnyPath, FileReader, LockableFile, RemotePath


class MemorySource:
    """Bytes that are there: a file's, mapped."""

    __slots__ = ("_view", "size")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.size = len(view)

    def read(self, begin: int, end: int) -> memoryview:
        """The bytes from ``begin`` up to ``end``, not copied."""
        return self._view[begin:end]


class RangeSource:
    """A file of which only what is asked for is read, one request each time."""

    __slots__ = ("_place", "_reader", "size")

    def __init__(self, place: AnyPath, file: ShardFile) -> None:
        self._place = place
        with wrap_os_errors(place):
            self._reader = FileReader(place, quiet=True)
        self.size = self._reader.size
        if self.size != file.size:
            raise DataError(f"{place}: has {self.size} bytes, the index says {file.size}")
        if not self._reader.ranges:
            raise DataError(f"{place}: the server gives whole files only; use download='whole'")

    def read(self, begin: int, end: int) -> bytes:
        """The bytes from ``begin`` up to ``end``; fewer only where the file ends."""
        out = bytearray(max(0, min(end, self.size) - begin))
        with wrap_os_errors(self._place):
            got = self._reader.read_into(begin, memoryview(out))
        return bytes(memoryview(out)[:got])


MAX_SHARD_BYTES = 16 * 2**30
"""Bytes of a compressed shard after decompression, unless the user allows more."""

_MAX_CACHE_BYTES = 64 * 2**30
_CHUNK_BYTES = 2**24


def default_cache_folder(root: AnyPath) -> Path:
    """Where the cache of a dataset is: in a folder of this user's in the one for temporary files, named by the URL's hash."""
    return Path(tempfile.gettempdir()) / f"dtrain-cache-{getuid()}" / xxhash.xxh3_128_hexdigest(str(root).encode())


def default_cache_bytes(folder: Path) -> int:
    """64 GiB, or three quarters of what the disk has for it, if that is less."""
    free = storage.free_bytes(folder)
    mine = sum(entry.size for entry in storage.scan_folder(folder)) if storage.is_folder(folder) else 0
    return _MAX_CACHE_BYTES if free is None else min(_MAX_CACHE_BYTES, (free + mine) * 3 // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedBytes:
    """A source, and how many bytes of the cache it keeps in use."""

    source: ByteSource
    cached_bytes: int = 0


class ShardStore:
    """The shards of one dataset.

    Args:
        root: the dataset's folder.
        cache: for what is not read in place.
        ranged: whether only the bytes of samples are read, where that is possible.
        verify: whether digests are checked of files that are there, in place or in the cache; downloads are always checked.
        follow_links: whether links may lead out of a folder of this machine.
        max_shard_bytes: of a compressed shard after decompression.
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
        self._warned = False

    def resolve(self, name: str) -> AnyPath:
        """Where a file of the dataset is, with links of this machine resolved.

        Raises:
            DataError: a link leads out of the folder, and links are not followed.
        """
        if self._real_root is None:
            return self.root / name
        real = storage.real_path(self._real_root / name)
        if not self.follow_links and not real.is_relative_to(self._real_root):
            raise DataError(
                f"{self.root / name}: is a link to {real}, out of the dataset's folder; pass follow_links=True if you trust it"
            )
        return real

    def uses_cache(self, file: ShardFile) -> bool:
        """Whether the shard is fetched or unpacked before it is read."""
        if isinstance(self.root, RemotePath):
            return not self.ranged
        return file.compression is not None and self._unpacked_copy(file) is None

    def is_available(self, file: ShardFile) -> bool:
        """Whether the shard can be read at once."""
        return not self.uses_cache(file) or self.cache.contains(self._cache_key(file))

    def open(self, entry: ShardEntry) -> OpenedBytes:
        """The raw bytes of a shard.

        Raises:
            DataError: they cannot be had, or are not what the index says.
        """
        file = entry.file
        if not self.uses_cache(file):
            if isinstance(self.root, RemotePath):
                return OpenedBytes(source=RangeSource(self._place(file), file))
            return OpenedBytes(source=MemorySource(self._open_in_place(file)))
        try:
            view = self._open_cached(file)
        except OSError as error:  # of the cache's disk
            raise DataError(f"{self.cache.folder}: no place for {file.name}: {error.strerror or error}") from error
        if view is None:
            self._warn_cache_full(file)
            return OpenedBytes(source=MemorySource(self._read_into_memory(file)))
        return OpenedBytes(source=MemorySource(view), cached_bytes=len(view))

    def _open_cached(self, file: ShardFile) -> memoryview | None:
        """The shard in the cache; None without room, or while another process has a damaged copy open."""
        return self.cache.get(
            self._cache_key(file),
            bytes_to_reserve(file),
            lambda part: self._download(file, part),
            is_sound=lambda view: self._is_sound(file, view),
        )

    def _is_sound(self, file: ShardFile, view: memoryview) -> bool:
        """Return False if the bytes of a shard in the cache are not those of the index."""
        try:
            self._verify(self.cache.folder / self._cache_key(file), file, view)
        except ShardIntegrityError:
            self._verified.discard(file.name)
            return False
        return True

    def _verify(self, path: Path, file: ShardFile, view: memoryview) -> None:
        """Hold the raw bytes of a file against the index: their number always, the digests once."""
        again = not self.verify or file.name in self._verified
        pieces = (view[begin : begin + _CHUNK_BYTES] for begin in range(0, len(view), _CHUNK_BYTES))
        for _ in ByteVerifier(path, "", file.raw_size, {} if again else file.raw_digests).verify((view,) if again else pieces):
            pass
        self._verified.add(file.name)

    def prefetch(self, file: ShardFile, stopped: Callable[[], bool]) -> None:
        """Fetch the shard into the cache, if nobody does, and there is room."""
        self.cache.fill(self._cache_key(file), bytes_to_reserve(file), lambda part: self._download(file, part, stopped))

    def _place(self, file: ShardFile) -> AnyPath:
        return self.root / file.name

    def _cache_key(self, file: ShardFile) -> str:
        """The name in the cache: the same for all who mean the same bytes. Without digests, the time tells a changed file."""
        digests: object = sorted(file.digests.items()), sorted(file.raw_digests.items())
        place = self._place(file)
        if not (file.digests or file.raw_digests or isinstance(place, RemotePath)):
            digests = storage.modified_ns(place)
        named = f"{self.root}\0{file.name}\0{file.size}\0{file.compression}\0{digests}"
        return xxhash.xxh3_128_hexdigest(named.encode())

    def _download(self, file: ShardFile, part: PartialFile, stopped: Callable[[], bool] = lambda: False) -> None:
        download(self.resolve(file.name), file, part.write, clear=part.clear, stopped=stopped, limit=self.max_shard_bytes)
        self._verified.add(file.name)

    def _read_into_memory(self, file: ShardFile) -> memoryview:
        """The shard in memory, where there is no room in the cache."""
        content = bytearray()
        download(
            self.resolve(file.name),
            file,
            lambda data: content.extend(memoryview(data)),
            clear=content.clear,
            limit=self.max_shard_bytes,
        )
        return memoryview(content).toreadonly()

    def _warn_cache_full(self, file: ShardFile) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{self.root}: everything in the cache of {self.cache.limit} bytes is in use by other processes (or a damaged copy "
            f"is), so {file.name} is read into memory; give more cache_bytes, or fewer open_shards",
            stacklevel=2,
        )

    def _unpacked_copy(self, file: ShardFile) -> Path | None:
        """The file beside a compressed one that other readers have left, with its raw bytes."""
        assert not isinstance(self.root, RemotePath), "only here"
        if file.raw_name is None or file.raw_name == file.name or file.raw_size is None:
            return None
        path = self.root / file.raw_name
        return path if storage.file_size(path) == file.raw_size else None

    def _open_in_place(self, file: ShardFile) -> memoryview:
        """A file of this machine, mapped."""
        assert not isinstance(self.root, RemotePath), "only here"
        is_unpacked = file.compression is not None and self._unpacked_copy(file) is not None
        name = file.raw_name if is_unpacked and file.raw_name is not None else file.name
        path, real = self.root / name, self.resolve(name)
        assert isinstance(real, Path), "only here"
        with wrap_os_errors(path), FORK_REGISTRY.lock, LockableFile(real) as opened:
            view = opened.map_memory()
        self._verify(path, file, view)
        return view


def bytes_to_reserve(file: ShardFile) -> int:
    """Bytes to reserve; more are when they come, where the index does not say."""
    return file.size if file.raw_size is None else file.raw_size
