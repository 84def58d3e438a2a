"""How the bytes of a shard are had: in place, from the cache, or by ranges of a file on a server."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from os import getuid
from pathlib import Path

import xxhash

from dtrain import storage
from dtrain.data.stream.cache import Cache, Part
from dtrain.data.stream.download import Checked, download, unreadable
from dtrain.data.stream.forks import FORKS
from dtrain.data.stream.formats.base import ShardEntry, ShardFile, Source
from dtrain.data.stream.sources import MemorySource, RangedSource
from dtrain.errors import DataError
from dtrain.storage import Place, RemotePath, SharedFile

_MOST_BYTES = 64 * 2**30
_PIECE_BYTES = 2**24


def default_folder(root: Place) -> Path:
    """Where the cache of a dataset is: in a folder of this user's in the one for temporary files, named by the URL's hash."""
    return Path(tempfile.gettempdir()) / f"dtrain-cache-{getuid()}" / xxhash.xxh3_128_hexdigest(str(root).encode())


def default_limit(folder: Path) -> int:
    """64 GiB, or three quarters of what the disk has for it, if that is less."""
    free = storage.free_bytes(folder)
    mine = sum(entry.size for entry in storage.scan_folder(folder)) if storage.is_folder(folder) else 0
    return _MOST_BYTES if free is None else min(_MOST_BYTES, (free + mine) * 3 // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A source, and how many bytes of the cache it keeps in use."""

    source: Source
    held: int = 0


class Access:
    """The shards of one dataset.

    Args:
        root: the dataset's folder.
        cache: for what is not read in place.
        ranged: whether only the bytes of samples are read, where that is possible.
        verify: whether digests are checked of files that are read in place; those of others always are.
    """

    def __init__(self, root: Place, cache: Cache, *, ranged: bool, verify: bool) -> None:
        self.root, self.cache, self.ranged, self.verify = root, cache, ranged, verify
        self._verified: set[str] = set()
        self._warned = False

    def uses_cache(self, file: ShardFile) -> bool:
        """Whether the shard is fetched or unpacked before it is read."""
        if isinstance(self.root, RemotePath):
            return not self.ranged
        return file.compression is not None and self._unpacked(file) is None

    def is_there(self, file: ShardFile) -> bool:
        """Whether the shard can be read at once."""
        return not self.uses_cache(file) or self.cache.has(self._name(file))

    def reach(self, entry: ShardEntry) -> Reached:
        """The raw bytes of a shard.

        Raises:
            DataError: they cannot be had, or are not what the index says.
        """
        file = entry.file
        if not self.uses_cache(file):
            if isinstance(self.root, RemotePath):
                return Reached(source=RangedSource(self._place(file), file))
            return Reached(source=MemorySource(self._in_place(file)))
        try:
            view = self._cached(file)
        except OSError as error:  # of the cache's disk
            raise DataError(f"{self.cache.folder}: no place for {file.name}: {error.strerror or error}") from error
        if view is None:
            self._warn(file)
            return Reached(source=MemorySource(self._held(file)))
        return Reached(source=MemorySource(view), held=len(view))

    def _cached(self, file: ShardFile) -> memoryview | None:
        """The shard in the cache; None without room."""
        name = self._name(file)
        for _ in range(2):
            view = self.cache.get(name, bytes_of(file), lambda part: self._download(file, part))
            if view is None or file.raw_size in (None, len(view)):
                return view
            found = len(view)
            del view  # and its lock
            if not self.cache.discard(name):  # a machine that lost power has left it so: fetch it again
                break
        raise DataError(f"{self.cache.folder / name}: has {found} bytes, not {file.raw_size}; remove it")

    def fill(self, file: ShardFile, stopped: Callable[[], bool]) -> None:
        """Fetch the shard into the cache, if nobody does, and there is room."""
        self.cache.fill(self._name(file), bytes_of(file), lambda part: self._download(file, part, stopped))

    def _place(self, file: ShardFile) -> Place:
        return self.root / file.name

    def _name(self, file: ShardFile) -> str:
        """The name in the cache: the same for all who mean the same bytes. Without digests, the time tells a changed file."""
        digests: object = sorted(file.digests.items()), sorted(file.raw_digests.items())
        place = self._place(file)
        if not (file.digests or file.raw_digests or isinstance(place, RemotePath)):
            digests = storage.written_ns(place)
        named = f"{self.root}\0{file.name}\0{file.size}\0{file.compression}\0{digests}"
        return xxhash.xxh3_128_hexdigest(named.encode())

    def _download(self, file: ShardFile, part: Part, stopped: Callable[[], bool] = lambda: False) -> None:
        download(self._place(file), file, part.write, clear=part.clear, stopped=stopped)

    def _held(self, file: ShardFile) -> memoryview:
        """The shard in memory, where there is no room in the cache."""
        content = bytearray()
        download(self._place(file), file, lambda data: content.extend(memoryview(data)), clear=content.clear)
        return memoryview(content).toreadonly()

    def _warn(self, file: ShardFile) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{self.root}: everything in the cache of {self.cache.limit} bytes is in use by other processes, so {file.name} is "
            "read into memory; give more cache_bytes, or fewer open_shards",
            stacklevel=2,
        )

    def _unpacked(self, file: ShardFile) -> Path | None:
        """The file beside a compressed one that other readers have left, with its raw bytes."""
        assert not isinstance(self.root, RemotePath), "only here"
        if file.raw_name is None or file.raw_name == file.name or file.raw_size is None:
            return None
        path = self.root / file.raw_name
        return path if storage.file_size(path) == file.raw_size else None

    def _in_place(self, file: ShardFile) -> memoryview:
        """A file of this machine, mapped."""
        assert not isinstance(self.root, RemotePath), "only here"
        path = (self._unpacked(file) if file.compression else None) or self.root / file.name
        with unreadable(path), FORKS.lock, SharedFile(path) as opened:
            view = opened.mapped()
        if len(view) != file.raw_size:
            raise DataError(f"{path}: has {len(view)} bytes, the index says {file.raw_size}")
        if self.verify and file.raw_digests and file.name not in self._verified:
            pieces = (view[begin : begin + _PIECE_BYTES] for begin in range(0, len(view), _PIECE_BYTES))
            for _ in Checked(path, "", file.raw_size, file.raw_digests).of(pieces):
                pass
            self._verified.add(file.name)
        return view


def bytes_of(file: ShardFile) -> int:
    """Bytes to reserve; more are when they come, where the index does not say."""
    return file.size if file.raw_size is None else file.raw_size
