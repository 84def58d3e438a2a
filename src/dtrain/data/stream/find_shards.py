"""``find_shards``: find the shards of a dataset from its index, or by listing its files and counting their samples once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from dtrain import storage
from dtrain.data.stream.download import wrap_os_errors
from dtrain.data.stream.formats.shard_format import ShardEntry, ShardFile, get_format, one_line, wrap_shard_errors
from dtrain.data.stream.shard_index import HASHES, INDEX_NAME, UNFINISHED_NAME, guess_format, read_index, write_index
from dtrain.data.stream.shard_store import RangeSource, ShardStore
from dtrain.errors import ConfigError, DataError, DtrainError
from dtrain.storage import AnyPath, RemotePath, TransferProgress
from dtrain.storage.parallel_parts import for_each_part

# Limit of an index file.
_MAX_INDEX_BYTES = 2**31
# Limit of a shard.
_MAX_SAMPLES = 2**56
_THREADS = 8
# Prefixes of files that hold no samples, such as _SUCCESS and .crc.
_HIDDEN_PREFIXES = ("_", ".")


def find_shards(store: ShardStore, *, format: str | None, only: str | None = None) -> tuple[ShardEntry, ...]:
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
    text = None if only is not None else _read_index_file(store)
    entries = tuple(_list_shards(store, format, only)) if text is None else _parse_index(root, text, format)
    if not sum(entry.samples for entry in entries):
        raise ConfigError(f"{root}: has no samples in {len(entries)} shards. Check the path.")
    for entry in entries:
        for algorithm in (*entry.file.digests, *entry.file.raw_digests):
            if algorithm not in HASHES:
                raise ConfigError(f"{root / entry.file.name}: hash {algorithm!r} is unknown. Use one of {', '.join(HASHES)}.")
    return entries


def _read_index_file(store: ShardStore) -> bytes | None:
    root = store.root
    try:
        return storage.read_file(store.resolve(INDEX_NAME), limit=_MAX_INDEX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(
            f"{root / INDEX_NAME}: cannot be read: {error.strerror or error}. Check the permissions and the disk."
        ) from error


def _parse_index(root: AnyPath, text: bytes, format: str | None) -> tuple[ShardEntry, ...]:
    try:
        with wrap_shard_errors(INDEX_NAME):
            entries = tuple(read_index(text))
    except DtrainError as error:
        raise type(error)(one_line(f"{root}/{error}")) from error.__cause__
    others = sorted({entry.format for entry in entries} - {format or entry.format for entry in entries})
    if others:
        raise ConfigError(f"{root}: the index has shards of format {others[0]}, not {format}. Leave out format.")
    return entries


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


def _list_shards(store: ShardStore, format: str | None, only: str | None) -> list[ShardEntry]:
    """List the shards of a folder without an index. The cache keeps the counts, until the names or sizes of files change.

    For local files, the modification times count, too."""
    files = _find_files(store.root, format, only)
    for file in files:
        # resolve() refuses links that lead out of the folder.
        store.resolve(file.name)
    names = repr([(file.name, file.size, file.format, _modified_ns(store.root / file.name)) for file in files])
    store.cache.check_owner()
    listing = store.cache.folder / f"{xxhash.xxh3_128_hexdigest(f'{store.root}|{names}'.encode())}.index"
    if (text := _load_listing(listing)) is not None:
        return text
    with contextlib.ExitStack() as lock_context:
        # If the cache cannot be written, every rank counts. Otherwise one rank of the node counts.
        with contextlib.suppress(OSError):
            lock_context.enter_context(store.cache.locked(listing.name + ".lock"))
            if (text := _load_listing(listing)) is not None:
                return text
        entries = _count_files(store, files)
        with contextlib.suppress(OSError):
            storage.replace_file(listing, write_index(entries))
        return entries


def _modified_ns(path: AnyPath) -> int | None:
    return None if isinstance(path, RemotePath) else storage.modified_ns(path)


def _load_listing(path: Path) -> list[ShardEntry] | None:
    try:
        return read_index(storage.read_file(path, limit=_MAX_INDEX_BYTES))
    except (OSError, DtrainError):
        return None


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


def _count_files(store: ShardStore, files: list[_FoundFile]) -> list[ShardEntry]:
    entries: list[ShardEntry | None] = [None] * len(files)
    lock = threading.Lock()
    with TransferProgress(f"counting samples of {store.root}", sum(file.size for file in files)) as progress:

        def count(number: int) -> None:
            entry = _count_file(store, files[number].entry)
            with lock:
                entries[number] = entry
            progress.advance(files[number].size)

        for_each_part(len(files), count, threads=_THREADS, name="dtrain-count")
    return [entry for entry in entries if entry is not None]


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
