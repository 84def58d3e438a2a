"""``find_shards``: find the shards of a dataset from its index, or by listing its files and counting their samples once.

The table of a large index is a file in the cache: one process of the node makes it, and all processes map it into memory.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import xxhash

from dtrain import storage
from dtrain.arguments import format_count
from dtrain.data.stream.formats.shard_format import ShardEntry, ShardFile, get_format, one_line, wrap_shard_errors
from dtrain.data.stream.shard_index import HASHES, INDEX_NAME, UNFINISHED_NAME, guess_format, read_index
from dtrain.data.stream.shard_store import RangeSource, ShardStore, wrap_os_errors
from dtrain.data.stream.shard_table import ShardTable, ShardTableBuilder
from dtrain.errors import ConfigError, DataError, DtrainError
from dtrain.storage import AnyPath, FileReader, LockableFile, RemotePath, TransferProgress
from dtrain.storage.parallel_parts import for_each_part

# Limit of an index file.
_MAX_INDEX_BYTES = 2**31
# From this size on, the processes of a node share the table of an index.
_SHARED_INDEX_BYTES = 4 * 2**20
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
        table = _count_listed_shards(store, format, only)
    elif format is not None and (others := sorted({group.format for group in table.groups} - {format})):
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

    def parse() -> ShardTable:
        with FileReader(path) as file:
            if file.size > _MAX_INDEX_BYTES:
                raise OSError(f"{path} must have at most {_MAX_INDEX_BYTES} bytes, got {file.size}")
            text = bytearray(file.size)
            del text[file.read_into(0, memoryview(text)) :]
        try:
            with wrap_shard_errors(INDEX_NAME):
                return read_index(text)
        except DtrainError as error:
            raise type(error)(one_line(f"{store.root}/{error}")) from error.__cause__

    try:
        with FileReader(path) as file:
            version, is_large = file.version(), file.size >= _SHARED_INDEX_BYTES
        if version is None or not is_large:
            return parse()
        return _share_table(store, f"{store.root}|{version}", parse, lambda: _version_of(path) == version)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(
            f"{store.root / INDEX_NAME}: cannot be read: {error.strerror or error}. Check the permissions and the disk."
        ) from error


def _version_of(path: AnyPath) -> str | None:
    with FileReader(path) as file:
        return file.version()


def _share_table(
    store: ShardStore, key: str, build: Callable[[], ShardTable], is_current: Callable[[], bool] = lambda: True
) -> ShardTable:
    """Map the table of ``key`` into memory. If the cache has no such file, one process of the node builds and writes the table.

    If the cache cannot be written, or belongs to another user, every process builds its own table. A table that is not current
    at the end, because its file was written again in the meantime, is not shared.
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


def _count_listed_shards(store: ShardStore, format: str | None, only: str | None) -> ShardTable:
    """List the shards of a folder without an index, and count their samples.

    The cache keeps the counts, until the names or sizes of files change. For local files, the modification times count, too.
    """
    entries, facts = _list_shards(store.root, format, only), []
    for entry in entries:
        # resolve() refuses links that lead out of the folder.
        store.resolve(entry.file.name)
        path = store.root / entry.file.name
        modified_ns = None if isinstance(path, RemotePath) else storage.modified_ns(path)
        facts.append((entry.file.name, entry.file.size, entry.format, modified_ns))

    def count_all() -> ShardTable:
        with TransferProgress(f"counting samples of {store.root}", sum(entry.file.size for entry in entries)) as progress:

            def count(number: int) -> None:
                entries[number] = _count_samples(store, entries[number])
                progress.advance(entries[number].file.size)

            for_each_part(len(entries), count, threads=_THREADS, name="dtrain-count")
        builder = ShardTableBuilder()
        for entry in entries:
            builder.add(entry)
        try:
            return builder.finish()
        except DataError as error:
            raise DataError(f"{store.root}: {error}") from None

    return _share_table(store, f"{store.root}|{facts!r}", count_all)


def _list_shards(root: AnyPath, format: str | None, only: str | None) -> list[ShardEntry]:
    """Return an entry of each file, as far as its name determines the entry."""
    entries = []
    for name, size in _list_files(root, only):
        if name == UNFINISHED_NAME:
            raise ConfigError(f"{root}: is incomplete. If its writer was killed, remove the folder and write it again.")
        if any(part.startswith(_HIDDEN_PREFIXES) for part in name.split("/")):
            continue
        guessed, compression = guess_format(name) or (None, None)
        # A single file may have any name.
        kind = guessed if format is None else format if only is not None or guessed == format else None
        if kind is not None:
            raw_size = size if compression is None else None
            file = ShardFile(name=name, size=size, raw_size=raw_size, compression=compression)
            entries.append(ShardEntry(file=file, samples=0, format=kind))
    if not entries:
        missing = f"file of format {format}" if format else "file of a known format"
        raise ConfigError(f"{root}: has no {INDEX_NAME} and no {missing}. Check the URL.")
    if len(formats := sorted({entry.format for entry in entries})) > 1:
        raise ConfigError(f"{root}: has files of several formats ({', '.join(formats)}). Choose one with format=.")
    return entries


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
        is_http = isinstance(root, RemotePath) and root.protocol.startswith("http")
        hint = ". A server that cannot list folders needs an index" if is_http else ""
        raise ConfigError(f"{root}: has no {INDEX_NAME}, and no files are listed{hint}. Check the URL.") from error


def _count_samples(store: ShardStore, entry: ShardEntry) -> ShardEntry:
    """Return the entry with the samples, the details and the raw size of its file."""
    shard_format, path = get_format(entry.format), store.resolve(entry.file.name)
    by_ranges = isinstance(store.root, RemotePath) and entry.file.compression is None and shard_format.supports_ranges
    source = RangeSource(path, entry.file) if by_ranges else store.open(entry)[0]
    try:
        with wrap_shard_errors("file"):
            samples, details = shard_format.count(source)
            if not 0 <= samples <= _MAX_SAMPLES:
                raise DataError(f"has an impossible number of samples, {samples}")
    except DtrainError as error:
        raise type(error)(one_line(f"{path}: {str(error).removeprefix('file: ')}")) from error
    return replace(entry, samples=samples, details=details, file=replace(entry.file, raw_size=source.size))
