"""``index.json``: read and write the index of a sharded dataset, in mosaicml-streaming's format extended by more shard formats.

``compute_digests`` computes the digests of files, by the names of algorithms in the index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import xxhash

from dtrain.data.stream.formats.compression import COMPRESSION_SUFFIXES, parse_compression
from dtrain.data.stream.formats.shard_format import FORMAT_NAMES, ShardEntry, ShardFile, get_format
from dtrain.data.stream.shard_table import MAX_COUNT, ShardTable, ShardTableBuilder
from dtrain.errors import ConfigError, DataError

_XXHASH_NAMES = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
_HASHLIB_NAMES = ("md5", "sha1", "sha224", "sha256", "sha384", "sha512", "sha3_224", "sha3_256", "sha3_384", "sha3_512")

HASHES = (*_XXHASH_NAMES, *_HASHLIB_NAMES, "blake2b", "blake2s")
"""Names of all supported algorithms."""


def new_hash(algorithm: str) -> Any:
    """Create a hash object with ``update(data)`` and ``hexdigest()``.

    Raises:
        ConfigError: the algorithm is unknown.
    """
    if algorithm not in HASHES:
        raise ConfigError(f"hash {algorithm!r} is unknown. Use one of {', '.join(HASHES)}.")
    return getattr(xxhash, algorithm)() if algorithm in _XXHASH_NAMES else hashlib.new(algorithm, usedforsecurity=False)


def compute_digests(data: bytes | memoryview, algorithms: Iterable[str]) -> dict[str, str]:
    """Compute the hex digests of ``data``, by algorithm.

    Raises:
        ConfigError: an algorithm is unknown.
    """
    digests = {}
    for algorithm in algorithms:
        state = new_hash(algorithm)
        state.update(data)
        digests[algorithm] = state.hexdigest()
    return digests


INDEX_NAME = "index.json"
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
    try:
        return builder.finish()
    except DataError as error:
        raise DataError(f"{INDEX_NAME}: {error}") from None


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
    if "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts):
        return False
    try:
        return all(len(part.encode()) <= _MAX_NAME_BYTES for part in parts)
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
