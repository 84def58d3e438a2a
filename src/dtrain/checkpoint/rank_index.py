"""Encode and parse the index of a rank: shards in its data files, chunk digests, and plain values. Pure functions."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from dtrain.checkpoint import layout, strict_json
from dtrain.errors import CheckpointError, CorruptCheckpointError

INDEX_FORMAT = "dtrain-checkpoint-rank"
_DIGEST_PATTERN = re.compile(r"[0-9a-f]{32}")
_INDEX_FIELDS = (
    "format",
    "version",
    "rank",
    "chunk_bytes",
    "digest",
    "chunks",
    "kinds",
    "shards",
    "per_rank",
    "values",
    "shared",
)
_KIND_FIELDS = ("dtype", "shape", "offset", "size", "file")


class TensorShardEntry(NamedTuple):
    """Stored shard: the region ``[offset, offset + size)`` of the tensor ``key`` of ``shape``.

    The data are the bytes ``[begin, end)`` of data file number ``file`` of the rank. A tuple, because every rank creates one
    for each tensor of every rank.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    begin: int
    end: int
    file: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIndex:
    """Index of the files of one rank.

    Args:
        rank: the rank that wrote the files.
        shards: shards of the tensors of the run.
        per_rank: tensors that only this rank has.
        chunks: digests of each ``CHUNK_BYTES`` per data file; the last chunk is shorter.
        values: encoded plain values of the rank.
        shared: encoded plain values of the run, by section; None on all ranks but rank 0.
    """

    rank: int
    shards: tuple[TensorShardEntry, ...]
    per_rank: tuple[TensorShardEntry, ...]
    chunks: tuple[tuple[str, ...], ...]
    values: Any
    shared: dict[str, Any] | None


def encode_index(index: RankIndex) -> bytes:
    """Encode ``rank-<rank>.json``.

    Raises:
        CheckpointError: more JSON than the reader accepts.
    """
    body = {
        "format": INDEX_FORMAT,
        "version": layout.VERSION,
        "chunk_bytes": layout.CHUNK_BYTES,
        "digest": layout.DIGEST,
        **_index_to_json(index),
    }
    data = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > strict_json.MAX_JSON_BYTES:
        raise CheckpointError(
            f"{layout.index_name(index.rank)}: plain values and index must be at most {strict_json.MAX_JSON_BYTES} bytes, "
            f"got {len(data)}. Store large plain data as tensors."
        )
    return data


def _index_to_json(index: RankIndex) -> dict[str, Any]:
    """Return the fields of the index. Shards are rows ``[key, kind, begin]``; ``kinds`` lists their common fields once.

    A model may have many shards, which every rank parses when loading, and has few kinds of them.
    """
    kinds: dict[tuple[Any, ...], int] = {}

    def row(entry: TensorShardEntry) -> list[Any]:
        kind = (entry.dtype, entry.shape, entry.offset, entry.size, entry.file)
        return [entry.key, kinds.setdefault(kind, len(kinds)), entry.begin]

    shards, per_rank = [row(entry) for entry in index.shards], [row(entry) for entry in index.per_rank]
    return {
        "rank": index.rank,
        "kinds": [dict(zip(_KIND_FIELDS, kind, strict=True)) for kind in kinds],
        "shards": shards,
        "per_rank": per_rank,
        "chunks": index.chunks,
        "values": index.values,
        "shared": index.shared,
    }


def parse_index(data: bytes, rank: int, sizes: Sequence[int]) -> RankIndex:
    """Parse the index of ``rank``, whose data files have ``sizes`` bytes.

    Raises:
        CorruptCheckpointError: bytes that ``encode_index`` does not write, or a shard outside of its tensor or file.
        CheckpointError: a valid index of another format version.
    """
    location = layout.index_name(rank)
    body = strict_json.parse_json(data, location)
    layout.check_format(body, location, INDEX_FORMAT)
    raw = strict_json.read_object(body, location, _INDEX_FIELDS)
    found = raw["rank"], raw["chunk_bytes"], raw["digest"]
    if found != (rank, layout.CHUNK_BYTES, layout.DIGEST):
        raise CorruptCheckpointError(
            f"{location}: must be the index of rank {rank} with {layout.DIGEST} of chunks of {layout.CHUNK_BYTES} bytes, "
            f"got rank {found[0]!r}, {found[2]!r} and {found[1]!r} bytes"
        )
    chunks = strict_json.read_list(raw["chunks"], f"{location}: chunks", _read_digests)
    counts = [len(of_file) for of_file in chunks]
    if counts != [-(-size // layout.CHUNK_BYTES) for size in sizes]:
        raise CorruptCheckpointError(f"{location}: files of {list(sizes)} bytes do not have {counts} chunk digests")
    if (raw["shared"] is None) != (rank != 0) or (rank == 0 and type(raw["shared"]) is not dict):
        raise CorruptCheckpointError(f"{location}: shared: must be an object on rank 0 and null on all other ranks")
    kinds = strict_json.read_list(raw["kinds"], f"{location}: kinds", lambda value, at: _parse_kind(value, at, sizes))
    return RankIndex(
        rank=rank,
        shards=_parse_entries(raw["shards"], f"{location}: shards", kinds),
        per_rank=_parse_entries(raw["per_rank"], f"{location}: per_rank", kinds),
        chunks=chunks,
        values=raw["values"],
        shared=raw["shared"],
    )


def _read_digests(value: Any, location: str) -> tuple[str, ...]:
    return strict_json.read_list(value, location, _read_digest)


def _read_digest(value: Any, location: str) -> str:
    return strict_json.read_str(value, location, _DIGEST_PATTERN)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardKind:
    """Common fields of several shards, the size of each shard in bytes, and the size of their file in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: int
    nbytes: int
    file_bytes: int


def _parse_kind(value: Any, location: str, sizes: Sequence[int]) -> _ShardKind:
    raw = strict_json.read_object(value, location, _KIND_FIELDS)
    dtype, file = strict_json.read_str(raw["dtype"], location), strict_json.read_int(raw["file"], location)
    shape, offset, size = (strict_json.read_ints(raw[name], location) for name in ("shape", "offset", "size"))
    if dtype not in layout.DTYPES:
        raise CorruptCheckpointError(f"{location}: unknown dtype {dtype!r}")
    if not len(shape) == len(offset) == len(size) or any(a + n > full for a, n, full in zip(offset, size, shape, strict=True)):
        raise CorruptCheckpointError(f"{location}: region {offset}+{size} is outside of shape {shape}")
    if file >= len(sizes):
        raise CorruptCheckpointError(f"{location}: data file number must be below {len(sizes)}, got {file}")
    nbytes = prod(size) * layout.DTYPES[dtype].itemsize
    return _ShardKind(dtype=dtype, shape=shape, offset=offset, size=size, file=file, nbytes=nbytes, file_bytes=sizes[file])


def _parse_entries(value: Any, location: str, kinds: Sequence[_ShardKind]) -> tuple[TensorShardEntry, ...]:
    if type(value) is not list:
        raise CorruptCheckpointError(f"{location}: must be a list, got {strict_json.describe_value(value)}")
    for row in value:
        if (
            type(row) is not list
            or len(row) != 3
            or type(row[0]) is not str
            or type(row[1]) is not int
            or type(row[2]) is not int
        ):
            raise CorruptCheckpointError(
                f"{location}: rows must be a key, a kind and a first byte, got {strict_json.describe_value(row)}"
            )
        key, number, begin = row
        if not 0 <= number < len(kinds):
            raise CorruptCheckpointError(f"{location}: {key}: kind must be below {len(kinds)}, got {number}")
        if begin < 0 or begin + kinds[number].nbytes > kinds[number].file_bytes:
            kind = kinds[number]
            raise CorruptCheckpointError(
                f"{location}: {key}: bytes {begin} to {begin + kind.nbytes} are outside of a file of {kind.file_bytes} bytes"
            )
    common = [(kind.dtype, kind.shape, kind.offset, kind.size, kind.nbytes, kind.file) for kind in kinds]
    return tuple(
        TensorShardEntry(key, dtype, shape, offset, size, begin, begin + nbytes, file)
        for key, number, begin in value
        for dtype, shape, offset, size, nbytes, file in (common[number],)
    )
