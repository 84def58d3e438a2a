"""Which shards a dataset has: by its index, or by a look at every file, once."""

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

_MAX_INDEX_BYTES = 2**31  # of an index
_MAX_SAMPLES = 2**56  # of a file
_THREADS = 8
_HIDDEN_PREFIXES = ("_", ".")  # how names begin that are about the data: _SUCCESS, .crc


def find_shards(access: ShardStore, *, format: str | None, only: str | None = None) -> tuple[ShardEntry, ...]:
    """The shards of the dataset at ``access.root``, in their order, with the samples of each.

    Args:
        access: to the files.
        format: that they have; None to go by the index or by their names.
        only: a file that is all of the dataset.

    Raises:
        ConfigError: no data, no sample, several formats, an unknown one, or digests by an unknown algorithm.
        DataError: an index or a file that cannot be read.
    """
    root = access.root
    if format is not None:
        get_format(format)
    text = None if only is not None else _read_index_file(access)
    entries = tuple(_list_shards(access, format, only)) if text is None else _parse_index(root, text, format)
    if not sum(entry.samples for entry in entries):
        raise ConfigError(f"{root}: has no samples in {len(entries)} shards")
    for entry in entries:
        for algorithm in (*entry.file.digests, *entry.file.raw_digests):
            if algorithm not in HASHES:
                raise ConfigError(f"{root / entry.file.name}: hash {algorithm!r} is not known; known: {', '.join(HASHES)}")
    return entries


def _read_index_file(access: ShardStore) -> bytes | None:
    root = access.root
    try:
        return storage.read_file(access.resolve(INDEX_NAME), limit=_MAX_INDEX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{root / INDEX_NAME}: cannot be read: {error.strerror or error}") from error


def _parse_index(root: AnyPath, text: bytes, format: str | None) -> tuple[ShardEntry, ...]:
    try:
        with wrap_shard_errors(INDEX_NAME):
            entries = tuple(read_index(text))
    except DtrainError as error:
        raise type(error)(one_line(f"{root}/{error}")) from error.__cause__
    others = sorted({entry.format for entry in entries} - {format or entry.format for entry in entries})
    if others:
        raise ConfigError(f"{root}: its index has shards of format {others[0]}, not {format}; leave out format")
    return entries


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundFile:
    name: str
    size: int
    format: str
    compression: str | None

    @property
    def entry(self) -> ShardEntry:
        """As far as the name tells."""
        raw_size = self.size if self.compression is None else None
        file = ShardFile(name=self.name, size=self.size, raw_size=raw_size, compression=self.compression)
        return ShardEntry(file=file, samples=0, format=self.format)


def _list_shards(access: ShardStore, format: str | None, only: str | None) -> list[ShardEntry]:
    """The shards of a folder without an index. The counts are kept for as long as the files have the same names and sizes,
    and those of this machine the same times."""
    found = _find_files(access.root, format, only)
    for file in found:
        access.resolve(file.name)  # refuses links out of the folder
    names = repr([(file.name, file.size, file.format, _modified_ns(access.root / file.name)) for file in found])
    access.cache.check_owner()
    kept = access.cache.folder / f"{xxhash.xxh3_128_hexdigest(f'{access.root}|{names}'.encode())}.index"
    if (text := _load_listing(kept)) is not None:
        return text
    with contextlib.ExitStack() as turn:
        with contextlib.suppress(OSError):  # of a cache that cannot be written: then everybody counts
            turn.enter_context(access.cache.locked(kept.name + ".lock"))  # of the ranks of a node one counts
            if (text := _load_listing(kept)) is not None:
                return text
        entries = _count_files(access, found)
        with contextlib.suppress(OSError):
            storage.replace_file(kept, write_index(entries))
        return entries


def _modified_ns(place: AnyPath) -> int | None:
    return None if isinstance(place, RemotePath) else storage.modified_ns(place)


def _load_listing(path: Path) -> list[ShardEntry] | None:
    try:
        return read_index(storage.read_file(path, limit=_MAX_INDEX_BYTES))
    except (OSError, DtrainError):
        return None


def _find_files(root: AnyPath, format: str | None, only: str | None) -> list[_FoundFile]:
    found = []
    for name, size in _list_files(root, only):
        if name == UNFINISHED_NAME:
            raise ConfigError(f"{root}: is being written, or its writer was killed; if so, remove it and write it again")
        if any(part.startswith(_HIDDEN_PREFIXES) for part in name.split("/")):
            continue
        known = guess_format(name)
        if format is None:
            if known is not None:
                found.append(_FoundFile(name=name, size=size, format=known[0], compression=known[1]))
        elif only is not None or (known is not None and known[0] == format):
            found.append(_FoundFile(name=name, size=size, format=format, compression=known[1] if known else None))
    if not found:
        what = f"file of format {format}" if format else "file of a known format"
        raise ConfigError(f"{root}: has no {INDEX_NAME} and no {what}; is the URL right?")
    if len(formats := sorted({file.format for file in found})) > 1:
        raise ConfigError(f"{root}: has files of several formats ({', '.join(formats)}); say which with format=")
    return found


def _list_files(root: AnyPath, only: str | None) -> Iterable[tuple[str, int]]:
    if only is not None:
        size = storage.file_size(root / only)
        return [] if size is None else [(only, size)]
    if not isinstance(root, RemotePath) and not storage.is_folder(root):
        raise ConfigError(f"{root}: there is no such folder")
    try:
        with wrap_os_errors(root):
            return list(storage.walk_files(root))
    except DataError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        hint = "; a server that lists no folders needs one with an index" if _is_http(root) else ""
        raise ConfigError(f"{root}: has no {INDEX_NAME}, and nothing is listed there{hint}; is the URL right?") from error


def _is_http(root: AnyPath) -> bool:
    return isinstance(root, RemotePath) and root.protocol.startswith("http")


def _count_files(access: ShardStore, found: list[_FoundFile]) -> list[ShardEntry]:
    entries: list[ShardEntry | None] = [None] * len(found)
    lock = threading.Lock()
    with TransferProgress(f"counting samples of {access.root}", sum(file.size for file in found)) as progress:

        def count(number: int) -> None:
            entry = _count_file(access, found[number].entry)
            with lock:
                entries[number] = entry
            progress.advance(found[number].size)

        for_each_part(len(found), count, threads=_THREADS, name="dtrain-count")
    return [entry for entry in entries if entry is not None]


def _count_file(access: ShardStore, entry: ShardEntry) -> ShardEntry:
    form, place = get_format(entry.format), access.resolve(entry.file.name)
    by_ranges = isinstance(access.root, RemotePath) and entry.file.compression is None and form.supports_ranges
    source = RangeSource(place, entry.file) if by_ranges else access.open(entry).source
    try:
        with wrap_shard_errors("file"):
            samples, details = form.count(source)
            if not 0 <= samples <= _MAX_SAMPLES:
                raise DataError(f"says that it has {samples} samples, which cannot be")
    except DtrainError as error:
        raise type(error)(one_line(f"{place}: {str(error).removeprefix('file: ')}")) from error
    return replace(entry, samples=samples, details=details, file=replace(entry.file, raw_size=source.size))
