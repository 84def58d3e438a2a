"""Digests of files, by the names that indexes of shards give them.

``index.json``: the shards of a dataset. The file is that of mosaicml-streaming, with names of more formats in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import xxhash

from dtrain.data.stream.formats.compression import COMPRESSION_SUFFIXES, parse_compression
from dtrain.data.stream.formats.shard_format import FORMATS, ShardEntry, ShardFile
from dtrain.errors import ConfigError, DataError
from dtrain.typing import Plain

_XXHASH_NAMES = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
_HASHLIB_NAMES = ("md5", "sha1", "sha224", "sha256", "sha384", "sha512", "sha3_224", "sha3_256", "sha3_384", "sha3_512")

HASHES = (*_XXHASH_NAMES, *_HASHLIB_NAMES, "blake2b", "blake2s")
"""Every algorithm that is known."""


def new_hash(algorithm: str) -> Any:
    """An object with ``update(data)`` and ``hexdigest()``.

    Raises:
        ConfigError: an algorithm that is not known.
    """
    if algorithm not in HASHES:
        raise ConfigError(f"hash {algorithm!r} is not known; known: {', '.join(HASHES)}")
    return getattr(xxhash, algorithm)() if algorithm in _XXHASH_NAMES else hashlib.new(algorithm, usedforsecurity=False)


def compute_digests(data: bytes | memoryview, algorithms: Iterable[str]) -> dict[str, str]:
    """algorithm -> hex digest of ``data``.

    Raises:
        ConfigError: an algorithm that is not known.
    """
    found = {}
    for algorithm in algorithms:
        state = new_hash(algorithm)
        state.update(data)
        found[algorithm] = state.hexdigest()
    return found


INDEX_NAME = "index.json"
UNFINISHED_NAME = "_unfinished"  # a file that is there from the first shard to the index
_INDEX_VERSION = 2
_MAX_COUNT = 2**62  # samples, or bytes: there is no more than int64 counts
_FORMAT_ALIASES = {"json": "jsonl"}  # theirs: lines of JSON, with a file beside them that says where the lines begin
_MAX_NAME_BYTES = 255  # bytes of a file's name, as file systems have it
_MAX_SHOWN_CHARS = 200  # characters of a value in an error
_ENTRY_KEYS = {"version", "format", "samples", "raw_data", "zip_data"}  # of an entry; what else there is, are details


def read_index(text: bytes) -> list[ShardEntry]:
    """The entries of an index, in its order.

    Raises:
        DataError: no index, or one of another version, with shards of an unknown format or compression, with
            numbers that cannot be, a file twice, or a file outside of the dataset's folder.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{INDEX_NAME}: is not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("shards"), list):
        raise DataError(f"{INDEX_NAME}: has no list of shards; this is the index of something else")
    _check_version(content, INDEX_NAME)
    entries: list[ShardEntry] = []
    for number, shard in enumerate(content["shards"]):
        entry = _parse_entry(shard, f"{INDEX_NAME}: shard {number}")
        if entries and entry.details == entries[-1].details:
            entry = replace(entry, details=entries[-1].details)  # held once, which counts where there are very many shards
        entries.append(entry)
    _check_names(entries)
    if (total := sum(entry.samples for entry in entries)) > _MAX_COUNT:
        raise DataError(f"{INDEX_NAME}: its shards have {total:.3g} samples together, which cannot be")
    return entries


def write_index(entries: Iterable[ShardEntry]) -> bytes:
    """The index of these shards, of which ``read_index`` makes the same entries. mosaicml-streaming reads that of MDS."""
    shards = [_encode_entry(entry) for entry in entries]
    return json.dumps({"version": _INDEX_VERSION, "shards": shards}, sort_keys=True).encode()


def guess_format(name: str) -> tuple[str, str | None] | None:
    """(format, compression) of a file with this name, in a folder without an index; None for what is no shard."""
    name = name.lower()
    compression = next((kind for suffix, kind in COMPRESSION_SUFFIXES.items() if name.endswith(suffix)), None)
    if compression is not None:
        name = name[: name.rindex(".")]
    elif name.endswith(".tgz"):
        return "tar", "gz"
    for kind, form in FORMATS.items():
        if form.suffixes and name.endswith(form.suffixes):
            return kind, compression
    return None


def _check_version(content: Mapping[str, Any], where: str) -> None:
    if content.get("version") != _INDEX_VERSION:
        raise DataError(
            f"{where}: has version {_format_value(content.get('version'))}, {_INDEX_VERSION} can be read; write the dataset again"
        )


def _check_names(entries: Sequence[ShardEntry]) -> None:
    seen: set[str] = set()
    for number, entry in enumerate(entries):
        if entry.file.name in seen:
            raise DataError(f"{INDEX_NAME}: shard {number}: file {entry.file.name!r} is in it twice")
        seen.add(entry.file.name)


def _parse_entry(shard: Any, where: str) -> ShardEntry:
    if not isinstance(shard, dict):
        raise DataError(f"{where}: is {type(shard).__name__}, not an object")
    _check_version(shard, where)
    name = shard.get("format")
    kind: Any = _FORMAT_ALIASES.get(name, name) if isinstance(name, str) else None
    if not isinstance(kind, str) or kind not in FORMATS:
        raise DataError(f"{where}: format {_format_value(name)} is not known; known: {', '.join(FORMATS)}")
    details = {key: value for key, value in shard.items() if key not in _ENTRY_KEYS}
    return ShardEntry(
        file=_parse_file(shard, where), samples=_parse_count(shard, "samples", where), format=kind, details=details
    )


def _parse_file(shard: Mapping[str, Any], where: str) -> ShardFile:
    raw = _parse_file_info(shard, "raw_data", where)
    if shard.get("zip_data") is None:
        return ShardFile(name=raw[0], size=raw[1], raw_size=raw[1], raw_name=raw[0], digests=raw[2], raw_digests=raw[2])
    stored = _parse_file_info(shard, "zip_data", where)
    if not isinstance(shard.get("compression"), str):
        raise DataError(f"{where}: is compressed, but compression is {_format_value(shard.get('compression'))}")
    try:
        compression, _ = parse_compression(shard["compression"])
    except ConfigError as error:
        raise DataError(f"{where}: {error}") from None
    return ShardFile(
        name=stored[0],
        size=stored[1],
        raw_size=raw[1],
        raw_name=raw[0],
        compression=compression,
        digests=stored[2],
        raw_digests=raw[2],
    )


def _parse_file_info(shard: Mapping[str, Any], key: str, where: str) -> tuple[str, int, dict[str, str]]:
    """(name, bytes, digests) of one of the two files that an entry can name."""
    info = shard.get(key)
    if not isinstance(info, dict):
        raise DataError(f"{where}: {key} is {_format_value(info)}, not a file's name, bytes and hashes")
    name, digests = info.get("basename"), info.get("hashes") or {}
    if not isinstance(name, str) or not _is_inside_folder(name):
        raise DataError(f"{where}: file {_format_value(name)} is not in the dataset's folder")
    if not isinstance(digests, dict) or not all(map(_is_digest, digests.values())):
        raise DataError(f"{where}: hashes of {_format_value(name)} are {_format_value(digests)}, not digests by algorithm")
    return name, _parse_count(info, "bytes", where), digests


def _is_digest(digest: object) -> bool:
    return isinstance(digest, str) and digest.isascii() and digest.isalnum()


def _is_inside_folder(name: str) -> bool:
    """Relative, and in its plain spelling, so that one file has one name."""
    parts = name.split("/")
    if "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts):
        return False
    return _is_utf8(name) and all(len(part.encode()) <= _MAX_NAME_BYTES for part in parts)


def _is_utf8(text: str) -> bool:
    """Return False for text with halves of characters, which JSON can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _format_value(value: object) -> str:
    """A value of an index in one short line."""
    text = f"a number of {value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 64 else ascii(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def _parse_count(content: Mapping[str, Any], key: str, where: str) -> int:
    value = content.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
        raise DataError(f"{where}: {key} is {_format_value(value)}, not a count")
    return value


def _encode_entry(entry: ShardEntry) -> dict[str, Plain]:
    file = entry.file
    raw_name = file.name if file.raw_name is None else file.raw_name
    raw: dict[str, Plain] = {"basename": raw_name, "bytes": file.raw_size, "hashes": dict(file.raw_digests)}
    stored: dict[str, Plain] = {"basename": file.name, "bytes": file.size, "hashes": dict(file.digests)}
    return {
        "compression": file.compression,  # without the level, which the details may know
        "hashes": [*sorted(file.digests)],
        "size_limit": None,
        **cast(dict[str, Plain], dict(entry.details)),
        "version": _INDEX_VERSION,
        "format": entry.format,
        "samples": entry.samples,
        "raw_data": raw if file.compression else stored,
        "zip_data": stored if file.compression else None,
    }
