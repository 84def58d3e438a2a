"""``find_shards``: find the shards of a dataset from its ``index.json``, or list its files and count their samples once.

The table of a large index is a file in the cache: one process of the node makes it, and all processes map it into memory. The
index has mosaicml-streaming's format, extended by more shard formats; ``read_index`` and ``write_index`` read and write it.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from dtrain import storage
from dtrain.arguments import format_count
from dtrain.data.stream.formats.compression import COMPRESSION_SUFFIXES, HASHES, parse_compression
from dtrain.data.stream.formats.shard_format import FORMAT_NAMES, ShardEntry, ShardFile, get_format, one_line, wrap_shard_errors
from dtrain.data.stream.shard_store import RangeSource, ShardStore, wrap_os_errors
from dtrain.data.stream.shard_table import MAX_COUNT, ShardTable, ShardTableBuilder
from dtrain.errors import ConfigError, DataError, DtrainError
from dtrain.storage import AnyPath, FileReader, LockableFile, RemotePath, TransferProgress
from dtrain.storage.parallel_parts import for_each_part

INDEX_NAME = "index.json"
# A file with the length of each sample as int32, if the writer knew the lengths.
LENGTHS_NAME = "_lengths.npy"
# A file that exists from the first shard until the index is written.
UNFINISHED_NAME = "_unfinished"
_INDEX_VERSION = 2
# mosaicml-streaming's name of JSON lines with a file of line offsets.
_FORMAT_ALIASES = {"json": "jsonl"}
# Limit of a file's name in common file systems.
_MAX_NAME_BYTES = 255
# Limit of a value in an error.
_MAX_SHOWN_CHARS = 200
# Keys of an entry; all other keys are details of the format. The files of mosaicml-streaming's "meta" keys are not read.
_ENTRY_KEYS = {"version", "format", "samples", "raw_data", "zip_data", "raw_meta", "zip_meta"}
# Limit of an index file.
_MAX_INDEX_BYTES = 2**31
# From this size on, the processes of a node share the table of an index.
_SHARED_INDEX_BYTES = 4 * 2**20
# Limit of the header of the file of lengths.
_MAX_HEADER_BYTES = 2**12
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
                path = root / table[group.first].file.name
                raise ConfigError(f"{path}: hash {field.algorithm!r} is unknown. Use one of {', '.join(HASHES)}.")
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

    def read_version() -> str | None:
        with FileReader(path) as file:
            return file.version()

    try:
        with FileReader(path) as file:
            version, is_large = file.version(), file.size >= _SHARED_INDEX_BYTES
        if version is None or not is_large:
            return parse()
        return _share_table(store, f"{store.root}|{version}", parse, lambda: read_version() == version)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(
            f"{store.root / INDEX_NAME}: cannot be read: {error.strerror or error}. Check the permissions and the disk."
        ) from error


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
                storage.replace_file(path, table.to_bytes())
                return _map_table(path) or table
        return table


def _map_table(path: Path) -> ShardTable | None:
    try:
        with LockableFile(path) as file:
            return ShardTable.from_memory(file.map_memory())
    except OSError:
        return None


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
        return builder.finish(str(store.root))

    return _share_table(store, f"{store.root}|{facts!r}", count_all)


def _list_shards(root: AnyPath, format: str | None, only: str | None) -> list[ShardEntry]:
    """Return an entry of each file, as far as its name determines the entry."""
    entries = []
    for name, size in _list_files(root, only):
        if name == UNFINISHED_NAME:
            raise ConfigError(f"{root}: is incomplete. If its writer was killed, remove the folder and write it again.")
        if any(name_part.startswith(_HIDDEN_PREFIXES) for name_part in name.split("/")):
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


class _Index(msgspec.Struct):
    """Index whose entries are still texts, so that only one entry at a time exists as Python objects."""

    shards: list[msgspec.Raw]
    version: Any = None


def read_index(text: bytes | bytearray) -> ShardTable:
    """Read the entries of an index, in order.

    Raises:
        DataError: the text is not an index or has another version, a shard has an unknown format or compression or an
            impossible number, a file occurs twice, or a file is outside of the dataset's folder.
    """
    try:
        index = msgspec.json.decode(text, type=_Index)
        version, shards = index.version, index.shards
    except (ValueError, RecursionError):
        # Python's parser also accepts lone surrogates, which an error below shows.
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{INDEX_NAME}: is not JSON: {error}") from None
        if not isinstance(content, dict) or not isinstance(content.get("shards"), list):
            raise DataError(f"{INDEX_NAME}: has no list of shards, so it is not an index of a dataset.") from None
        version, shards = content.get("version"), content["shards"]
    _check_version(version, INDEX_NAME)
    builder = ShardTableBuilder()
    for number, shard in enumerate(shards):
        builder.add(_read_entry(shard, f"{INDEX_NAME}: shard {number}"))
    if (duplicate := builder.find_duplicate()) is not None:
        name = _read_entry(shards[duplicate], INDEX_NAME).file.name
        raise DataError(f"{INDEX_NAME}: shard {duplicate}: file {name!r} occurs twice.")
    return builder.finish(INDEX_NAME)


def write_index(entries: Iterable[ShardEntry]) -> bytes:
    """Encode an index, so that ``read_index`` returns equal entries. mosaicml-streaming can read an index of MDS shards."""
    shards = []
    for entry in entries:
        file = entry.file
        raw_name = file.name if file.raw_name is None else file.raw_name
        raw = {"basename": raw_name, "bytes": file.raw_size, "hashes": dict(file.raw_digests)}
        stored = {"basename": file.name, "bytes": file.size, "hashes": dict(file.digests)}
        shard = {
            # The name has no level. The details may have the level.
            "compression": file.compression,
            "hashes": sorted(file.digests),
            "size_limit": None,
            **entry.details,
            "version": _INDEX_VERSION,
            "format": entry.format,
            "samples": entry.samples,
            "raw_data": raw if file.compression else stored,
            "zip_data": stored if file.compression else None,
        }
        shards.append(shard)
    return json.dumps({"version": _INDEX_VERSION, "shards": shards}, sort_keys=True).encode()


def guess_format(name: str) -> tuple[str, str | None] | None:
    """Guess (format, compression) of a file from its name; None if the file is not a shard."""
    name = name.lower()
    compression = next((kind for suffix, kind in COMPRESSION_SUFFIXES.items() if name.endswith(suffix)), None)
    if compression is not None:
        name = name[: name.rindex(".")]
    elif name.endswith(".tgz"):
        return "tar", "gz"
    for kind in FORMAT_NAMES:
        if (suffixes := get_format(kind).suffixes) and name.endswith(suffixes):
            return kind, compression
    return None


def _check_version(version: object, context: str) -> None:
    if version != _INDEX_VERSION:
        raise DataError(f"{context}: version must be {_INDEX_VERSION}, got {_format_value(version)}. Write the dataset again.")


def _read_entry(shard: Any, context: str) -> ShardEntry:
    if isinstance(shard, msgspec.Raw):
        try:
            shard = msgspec.json.decode(shard)
        except ValueError as error:
            raise DataError(f"{context}: is not JSON: {error}") from None
    if not isinstance(shard, dict):
        raise DataError(f"{context}: must be an object, got {type(shard).__name__}")
    _check_version(shard.get("version"), context)
    name = shard.get("format")
    kind: Any = _FORMAT_ALIASES.get(name, name) if isinstance(name, str) else None
    if kind not in FORMAT_NAMES:
        raise DataError(f"{context}: format {_format_value(name)} is unknown. Use one of {', '.join(FORMAT_NAMES)}.")
    raw_name, raw_size, raw_digests = name, size, digests = _parse_file_info(shard, "raw_data", context)
    compression = None
    if shard.get("zip_data") is not None:
        name, size, digests = _parse_file_info(shard, "zip_data", context)
        if not isinstance(shard.get("compression"), str):
            raise DataError(f"{context}: compression must be a name, got {_format_value(shard.get('compression'))}")
        try:
            compression, _ = parse_compression(shard["compression"])
        except ConfigError as error:
            raise DataError(f"{context}: {error}") from None
    file = ShardFile(
        name=name,
        size=size,
        raw_size=raw_size,
        raw_name=raw_name,
        compression=compression,
        digests=digests,
        raw_digests=raw_digests,
    )
    details = {key: value for key, value in shard.items() if key not in _ENTRY_KEYS}
    return ShardEntry(file=file, samples=_parse_count(shard, "samples", context), format=kind, details=details)


def _parse_file_info(shard: Mapping[str, Any], key: str, context: str) -> tuple[str, int, dict[str, str]]:
    """Read (name, bytes, digests) of the raw or compressed file of an entry."""
    info = shard.get(key)
    if not isinstance(info, dict):
        raise DataError(f"{context}: {key} must have a file's name, bytes and hashes, got {_format_value(info)}")
    name, digests = info.get("basename"), info.get("hashes") or {}
    if not isinstance(name, str) or not _is_inside_folder(name):
        raise DataError(f"{context}: file {_format_value(name)} is not in the dataset's folder.")
    if not isinstance(digests, dict) or not all(
        isinstance(digest, str) and digest.isascii() and digest.isalnum() for digest in digests.values()
    ):
        raise DataError(
            f"{context}: hashes of {_format_value(name)} must be digests by algorithm, got {_format_value(digests)}"
        )
    return name, _parse_count(info, "bytes", context), digests


def _is_inside_folder(name: str) -> bool:
    """Return True for a relative path in normal form, so that each file has only one name."""
    parts = name.split("/")
    if "\0" in name or "\\" in name or any(name_part in ("", ".", "..") for name_part in parts):
        return False
    try:
        return all(len(name_part.encode()) <= _MAX_NAME_BYTES for name_part in parts)
    except UnicodeEncodeError:
        # JSON can contain lone surrogates.
        return False


def _format_value(value: object) -> str:
    """Format a value of an index in one short line."""
    text = f"a number of {value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 64 else ascii(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def _parse_count(content: Mapping[str, Any], key: str, context: str) -> int:
    value = content.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
        raise DataError(f"{context}: {key} must be a count, got {_format_value(value)}")
    return value


def write_lengths(lengths: Sequence[int]) -> bytes:
    """Return the file of the samples' lengths.

    Raises:
        ConfigError: a length does not fit in 32 bits.
    """
    if max(lengths) >= 2**31:
        raise ConfigError(f"write_shards: lengths must be below 2**31, got {max(lengths)}. Name a column of tokens.")
    file = io.BytesIO()
    np.save(file, np.asarray(lengths, dtype=np.int32), allow_pickle=False)
    return file.getvalue()


def read_lengths(store: ShardStore, samples: int) -> NDArray[np.int32]:
    """Read the length of each of ``samples`` samples.

    Raises:
        ConfigError: the dataset has no lengths.
        DataError: the file is damaged, or has lengths of other samples.
    """
    path = store.resolve(LENGTHS_NAME)
    with wrap_os_errors(path):
        if storage.file_size(path) is None:
            raise ConfigError(
                f"{store.root}: has no lengths of its samples. Pass lengths= to build_loader, or write the shards with "
                "write_shards(lengths=column) or `dtrain data write --lengths COLUMN`."
            )
        data = storage.read_file(path, limit=4 * samples + _MAX_HEADER_BYTES)
    try:
        lengths: NDArray[np.int32] = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}. Write the shards again.") from error
    if lengths.shape != (samples,) or lengths.dtype != np.int32 or lengths.min() < 0:
        raise DataError(
            f"{path}: must have a length of at least 0 for each of {samples} samples, got {lengths.dtype} of shape "
            f"{lengths.shape}. Write the shards again."
        )
    return lengths
