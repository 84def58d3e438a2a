"""``find_shards``: find the shards of a dataset from its index, or by listing its files and counting their samples once.

The table of a large index is a file in the cache: one process of the node makes it, and all processes map it into memory.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from dtrain import storage
from dtrain.arguments import format_count
from dtrain.data.stream.formats.shard_format import ShardEntry, ShardFile, get_format, one_line, wrap_shard_errors
from dtrain.data.stream.shard_index import (
    HASHES,
    INDEX_NAME,
    UNFINISHED_NAME,
    guess_format,
    read_index,
    read_index_chunks,
)
from dtrain.data.stream.shard_store import RangeSource, ShardStore, wrap_os_errors
from dtrain.data.stream.shard_table import ShardTable, ShardTableBuilder
from dtrain.errors import ConfigError, DataError, DtrainError
from dtrain.storage import AnyPath, FileReader, LockableFile, RemotePath, TransferProgress
from dtrain.storage.parallel_parts import for_each_part

# Limit of an index file.
_MAX_INDEX_BYTES = 2**31
# From this size on, an index is read in pieces, without an object per value.
_SCANNED_INDEX_BYTES = 2**16
# From this size on, the processes of a node share the table of an index.
_SHARED_INDEX_BYTES = 4 * 2**20
# Bytes in memory at a time, which are one request to a disk and four requests to a server.
_LOCAL_CHUNK_BYTES, _REMOTE_CHUNK_BYTES = 2**20, 32 * 2**20
# Limit of a shard.
_MAX_SAMPLES = 2**56
_THREADS = 8
# Prefixes of files that hold no samples, such as _SUCCESS and .crc.
_HIDDEN_PREFIXES = ("_", ".")


def find_shards(store: ShardStore, *, format: str | None, only: str | None = None) -> ShardTable:
    """Return the shards of the dataset at ``store.root`` in order, with the number of samples of each shard.

    Args:
        store: store of the dataset's files.
        format: format of the shards; None uses the index or the names of the files.
        only: name of the file, if the dataset is a single file.

    Raises:
        ConfigError: there are no data or no samples, the files have several formats, or the format or the algorithm of a digest
            is unknown.
        DataError: the index or a file cannot be read.
    """
    root = store.root
    if format is not None:
        get_format(format)
    table = None if only is not None else _read_index_file(store)
    if table is None:
        table = _list_shards(store, format, only)
    else:
        others = sorted({group.format for group in table.groups} - {format or group.format for group in table.groups})
        if others:
            raise ConfigError(f"{root}: the index has shards of format {others[0]}, not {format}. Leave out format.")
    if not table.bounds[-1]:
        raise ConfigError(f"{root}: has no samples in {format_count(len(table), 'shard')}. Check the path.")
    for group in table.groups:
        for field in group.fields:
            if field.algorithm not in HASHES:
                raise ConfigError(
                    f"{root / table.name(group.first)}: hash {field.algorithm!r} is unknown. Use one of {', '.join(HASHES)}."
                )
    return table


def _read_index_file(store: ShardStore) -> ShardTable | None:
    """Read the index; None if the dataset has no index."""
    path = store.resolve(INDEX_NAME)
    with contextlib.ExitStack() as opened:
        try:
            file = opened.enter_context(FileReader(path))
            version = file.version()
            if file.size > _MAX_INDEX_BYTES:
                raise OSError(f"{path} must have at most {_MAX_INDEX_BYTES} bytes, got {file.size}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _unreadable_index(store.root, error) from error
        if file.size < _SHARED_INDEX_BYTES or version is None:
            return _parse_index(store.root, path, file)
        key = f"{store.root}|{version}"
        return _share_table(store, key, lambda: _parse_index(store.root, path, file), lambda: _has_version(path, version))


def _unreadable_index(root: AnyPath, error: OSError) -> DataError:
    return DataError(f"{root / INDEX_NAME}: cannot be read: {error.strerror or error}. Check the permissions and the disk.")


def _has_version(path: AnyPath, version: str) -> bool:
    """Return True if the file was not written again while it was read."""
    with FileReader(path) as file:
        return file.version() == version


def _parse_index(root: AnyPath, path: AnyPath, file: FileReader) -> ShardTable:
    try:
        if file.size >= _SCANNED_INDEX_BYTES and (table := read_index_chunks(_read_chunks(file))) is not None:
            return table
        text = storage.read_file(path, limit=_MAX_INDEX_BYTES)
    except OSError as error:
        raise _unreadable_index(root, error) from error
    try:
        with wrap_shard_errors(INDEX_NAME):
            return read_index(text)
    except DtrainError as error:
        raise type(error)(one_line(f"{root}/{error}")) from error.__cause__


def _read_chunks(file: FileReader) -> Iterator[bytes]:
    size = _REMOTE_CHUNK_BYTES if file.is_remote else _LOCAL_CHUNK_BYTES
    chunk = memoryview(bytearray(min(file.size, size) if file.ranges else file.size))
    for begin in range(0, file.size, max(1, len(chunk))):
        count = file.read_into(begin, chunk)
        for first in range(0, count, _LOCAL_CHUNK_BYTES):
            yield bytes(chunk[first : min(count, first + _LOCAL_CHUNK_BYTES)])


def _share_table(
    store: ShardStore, key: str, build: Callable[[], ShardTable], is_current: Callable[[], bool] = lambda: True
) -> ShardTable:
    """Map the table of ``key`` into memory. If the cache has no such file, one process of the node builds and writes the table.

    If the cache cannot be written, or belongs to another user, every process builds its own table.
    """
    path = store.cache.folder / f"{xxhash.xxh3_128_hexdigest(key.encode())}.shards"
    with contextlib.ExitStack() as lock_context:
        try:
            store.cache.check_owner()
            if (table := _map_table(path)) is not None:
                return table
            lock_context.enter_context(store.cache.locked(path.name + ".lock"))
            if (table := _map_table(path)) is not None:
                return table
        except (OSError, ConfigError):
            return build()
        table = build()
        with contextlib.suppress(OSError):
            if is_current():
                _write_table(path, table)
                return _map_table(path) or table
        return table


def _map_table(path: Path) -> ShardTable | None:
    try:
        with LockableFile(path) as file:
            return ShardTable.from_memory(file.map_memory())
    except OSError:
        return None


def _write_table(path: Path, table: ShardTable) -> None:
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with LockableFile(temporary, "new") as file:
            table.write(file.write)
        storage.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            storage.remove_file(temporary)
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundFile:
    name: str
    size: int
    format: str
    compression: str | None

    @property
    def entry(self) -> ShardEntry:
        """Index entry, as far as the file name determines it."""
        raw_size = self.size if self.compression is None else None
        file = ShardFile(name=self.name, size=self.size, raw_size=raw_size, compression=self.compression)
        return ShardEntry(file=file, samples=0, format=self.format)


def _list_shards(store: ShardStore, format: str | None, only: str | None) -> ShardTable:
    """List the shards of a folder without an index. The cache keeps the counts, until the names or sizes of files change.

    For local files, the modification times count, too."""
    files = _find_files(store.root, format, only)
    for file in files:
        # resolve() refuses links that lead out of the folder.
        store.resolve(file.name)
    names = repr([(file.name, file.size, file.format, _modified_ns(store.root / file.name)) for file in files])
    return _share_table(store, f"{store.root}|{names}", lambda: _count_files(store, files))


def _modified_ns(path: AnyPath) -> int | None:
    return None if isinstance(path, RemotePath) else storage.modified_ns(path)


def _find_files(root: AnyPath, format: str | None, only: str | None) -> list[_FoundFile]:
    files = []
    for name, size in _list_files(root, only):
        if name == UNFINISHED_NAME:
            raise ConfigError(f"{root}: is incomplete. If its writer was killed, remove the folder and write it again.")
        if any(part.startswith(_HIDDEN_PREFIXES) for part in name.split("/")):
            continue
        guess = guess_format(name)
        if format is None:
            if guess is not None:
                files.append(_FoundFile(name=name, size=size, format=guess[0], compression=guess[1]))
        elif only is not None or (guess is not None and guess[0] == format):
            files.append(_FoundFile(name=name, size=size, format=format, compression=guess[1] if guess else None))
    if not files:
        missing = f"file of format {format}" if format else "file of a known format"
        raise ConfigError(f"{root}: has no {INDEX_NAME} and no {missing}. Check the URL.")
    if len(formats := sorted({file.format for file in files})) > 1:
        raise ConfigError(f"{root}: has files of several formats ({', '.join(formats)}). Choose one with format=.")
    return files


def _list_files(root: AnyPath, only: str | None) -> Iterable[tuple[str, int]]:
    if only is not None:
        size = storage.file_size(root / only)
        return [] if size is None else [(only, size)]
    if not isinstance(root, RemotePath) and not storage.is_folder(root):
        raise ConfigError(
            f"{root}: the folder does not exist. Correct the path, or write the dataset there with `dtrain data write`."
        )
    try:
        with wrap_os_errors(root):
            return list(storage.walk_files(root))
    except DataError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        hint = ". A server that cannot list folders needs an index" if _is_http(root) else ""
        raise ConfigError(f"{root}: has no {INDEX_NAME}, and no files are listed{hint}. Check the URL.") from error


def _is_http(root: AnyPath) -> bool:
    return isinstance(root, RemotePath) and root.protocol.startswith("http")


def _count_files(store: ShardStore, files: list[_FoundFile]) -> ShardTable:
    entries: list[ShardEntry | None] = [None] * len(files)
    lock = threading.Lock()
    with TransferProgress(f"counting samples of {store.root}", sum(file.size for file in files)) as progress:

        def count(number: int) -> None:
            entry = _count_file(store, files[number].entry)
            with lock:
                entries[number] = entry
            progress.advance(files[number].size)

        for_each_part(len(files), count, threads=_THREADS, name="dtrain-count")
    builder = ShardTableBuilder()
    for entry in entries:
        assert entry is not None, "every file is counted"
        builder.add(entry)
    try:
        return builder.finish()
    except DataError as error:
        raise DataError(f"{store.root}: {error}") from None


def _count_file(store: ShardStore, entry: ShardEntry) -> ShardEntry:
    shard_format, path = get_format(entry.format), store.resolve(entry.file.name)
    by_ranges = isinstance(store.root, RemotePath) and entry.file.compression is None and shard_format.supports_ranges
    source = RangeSource(path, entry.file) if by_ranges else store.open(entry).source
    try:
        with wrap_shard_errors("file"):
            samples, details = shard_format.count(source)
            if not 0 <= samples <= _MAX_SAMPLES:
                raise DataError(f"has an impossible number of samples, {samples}")
    except DtrainError as error:
        raise type(error)(one_line(f"{path}: {str(error).removeprefix('file: ')}")) from error
    return replace(entry, samples=samples, details=details, file=replace(entry.file, raw_size=source.size))
