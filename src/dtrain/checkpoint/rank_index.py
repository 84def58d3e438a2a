"""Encode and parse the index of a rank: shards in its data files, chunk digests, and plain values. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct

from dtrain.checkpoint import layout, strict_json
from dtrain.checkpoint.strict_json import Count
from dtrain.errors import CheckpointError, CorruptCheckpointError

INDEX_FORMAT = "dtrain-checkpoint-rank"
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
    raw = strict_json.convert(body, _IndexFile, location)
    found = raw.rank, raw.chunk_bytes, raw.digest
    if found != (rank, layout.CHUNK_BYTES, layout.DIGEST):
        raise CorruptCheckpointError(
            f"{location}: must be the index of rank {rank} with {layout.DIGEST} of chunks of {layout.CHUNK_BYTES} bytes, "
            f"got rank {found[0]}, {found[2]!r} and {found[1]} bytes"
        )
    counts = [len(of_file) for of_file in raw.chunks]
    if counts != [-(-size // layout.CHUNK_BYTES) for size in sizes]:
        raise CorruptCheckpointError(f"{location}: files of {list(sizes)} bytes do not have {counts} chunk digests")
    if (raw.shared is None) != (rank != 0):
        raise CorruptCheckpointError(f"{location}: shared: must be an object on rank 0 and null on all other ranks")
    for at, kind in enumerate(raw.kinds):
        kind.check(f"{location}: kinds[{at}]", len(sizes))
    return RankIndex(
        rank=rank,
        shards=_build_entries(raw.shards, f"{location}: shards", raw.kinds, sizes),
        per_rank=_build_entries(raw.per_rank, f"{location}: per_rank", raw.kinds, sizes),
        chunks=raw.chunks,
        values=raw.values,
        shared=raw.shared,
    )


class _ShardKind(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Common fields of several shards."""

    dtype: str
    shape: tuple[Count, ...]
    offset: tuple[Count, ...]
    size: tuple[Count, ...]
    file: Count

    def check(self, location: str, files: int) -> None:
        if self.dtype not in layout.DTYPES:
            raise CorruptCheckpointError(f"{location}: unknown dtype {self.dtype!r}")
        dims = zip(self.offset, self.size, self.shape, strict=False)
        if not len(self.shape) == len(self.offset) == len(self.size) or any(a + n > full for a, n, full in dims):
            raise CorruptCheckpointError(f"{location}: region {self.offset}+{self.size} is outside of shape {self.shape}")
        if self.file >= files:
            raise CorruptCheckpointError(f"{location}: data file number must be below {files}, got {self.file}")


class _IndexFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of ``rank-<rank>.json``; a shard is a row ``[key, kind, begin]``."""

    format: str
    version: int
    rank: Count
    chunk_bytes: Count
    digest: str
    chunks: tuple[tuple[Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")], ...], ...]
    kinds: tuple[_ShardKind, ...]
    shards: list[tuple[str, Count, Count]]
    per_rank: list[tuple[str, Count, Count]]
    values: Any
    shared: dict[str, Any] | None


def _build_entries(
    rows: Sequence[tuple[str, int, int]], location: str, kinds: Sequence[_ShardKind], sizes: Sequence[int]
) -> tuple[TensorShardEntry, ...]:
    common = [
        (kind.dtype, kind.shape, kind.offset, kind.size, prod(kind.size) * layout.DTYPES[kind.dtype].itemsize, kind.file)
        for kind in kinds
    ]
    for key, number, begin in rows:
        if number >= len(kinds):
            raise CorruptCheckpointError(f"{location}: {key}: kind must be below {len(kinds)}, got {number}")
        *_, nbytes, file = common[number]
        if begin + nbytes > sizes[file]:
            raise CorruptCheckpointError(
                f"{location}: {key}: bytes {begin} to {begin + nbytes} are outside of a file of {sizes[file]} bytes"
            )
    return tuple(
        TensorShardEntry(key, dtype, shape, offset, size, begin, begin + nbytes, file)
        for key, number, begin in rows
        for dtype, shape, offset, size, nbytes, file in (common[number],)
    )
