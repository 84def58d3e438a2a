"""Index of one rank: the place of each tensor shard in the rank's data files, the digests of the files, and plain values.

A model may have many shards, which every rank parses when loading, and has few kinds of them. Shards are therefore stored as
columns, and refer to their common fields by number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta, Struct

from dtrain.checkpoint import layout, strict_json
from dtrain.checkpoint.layout import DIGEST, DTYPES, VERSION, check_format, data_name, index_name
from dtrain.checkpoint.strict_json import Count
from dtrain.errors import CheckpointError, CorruptCheckpointError

INDEX_FORMAT = "dtrain-checkpoint-rank"


class ShardKind(NamedTuple):
    """Common fields of shards: the region ``[offset, offset + size)`` of a tensor of ``shape``, and its size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    nbytes: int


@lru_cache(maxsize=4096)
def shard_kind(dtype: str, shape: tuple[int, ...], offset: tuple[int, ...], size: tuple[int, ...]) -> ShardKind:
    """Return the kind of a region. There are many shards and few kinds of them, so equal kinds are one object."""
    return ShardKind(dtype, shape, offset, size, prod(size) * DTYPES[dtype].itemsize)


class StoredShard(NamedTuple):
    """Stored shard of a tensor: the bytes from ``begin`` on of the data file of this number."""

    file: int
    begin: int
    kind: ShardKind

    @property
    def end(self) -> int:
        """Byte after the last byte of the shard."""
        return self.begin + self.kind.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIndex:
    """Index of the files of one rank.

    Args:
        rank: the rank that wrote the files.
        shards: shards of the tensors of the run, by key.
        per_rank: tensors that only this rank has, by key.
        chunks: digests of each ``CHUNK_BYTES`` per data file; the last chunk is shorter.
        values: encoded plain values of the rank.
        shared: encoded plain values of the run, by section; None on all ranks but rank 0.
    """

    rank: int
    shards: Mapping[str, StoredShard]
    per_rank: Mapping[str, StoredShard]
    chunks: tuple[tuple[str, ...], ...]
    values: Any
    shared: dict[str, Any] | None


def encode_index(index: RankIndex) -> bytes:
    """Encode ``rank-<rank>.json``. Shards refer to a file by its number among the files of the rank.

    Raises:
        CheckpointError: more JSON than the reader accepts.
    """
    kinds: dict[tuple[ShardKind, int], int] = {}

    def columns(shards: Mapping[str, StoredShard]) -> dict[str, list[Any]]:
        numbers = [kinds.setdefault((shard.kind, shard.file), len(kinds)) for shard in shards.values()]
        return {"keys": list(shards), "kinds": numbers, "begins": [shard.begin for shard in shards.values()]}

    body = {
        "format": INDEX_FORMAT,
        "version": VERSION,
        "chunk_bytes": layout.CHUNK_BYTES,
        "digest": DIGEST,
        "rank": index.rank,
        "shards": columns(index.shards),
        "per_rank": columns(index.per_rank),
        "kinds": [
            {"dtype": kind.dtype, "shape": kind.shape, "offset": kind.offset, "size": kind.size, "file": file}
            for kind, file in kinds
        ],
        "chunks": index.chunks,
        "values": index.values,
        "shared": index.shared,
    }
    data = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > strict_json.MAX_JSON_BYTES:
        raise CheckpointError(
            f"{index_name(index.rank)}: plain values and index must be at most {strict_json.MAX_JSON_BYTES} bytes, "
            f"got {len(data)}. Store large plain data as tensors."
        )
    return data


def parse_index(data: bytes, rank: int, sizes: Sequence[int], *, first_file: int = 0) -> RankIndex:
    """Parse the index of ``rank``, whose data files have ``sizes`` bytes.

    Args:
        data: content of the file.
        rank: the rank that wrote the file.
        sizes: sizes of the data files of the rank.
        first_file: number of the rank's first data file, from which the shards' files are counted.

    Raises:
        CorruptCheckpointError: bytes that ``encode_index`` does not write, a shard outside of its tensor or file, or shards
            that share bytes.
        CheckpointError: a valid index of another format version.
    """
    location = index_name(rank)
    body = strict_json.parse_json(data, location)
    check_format(body, location, INDEX_FORMAT)
    raw = strict_json.convert(body, _IndexFile, location)
    found, expected = (raw.rank, raw.chunk_bytes, raw.digest), (rank, layout.CHUNK_BYTES, DIGEST)
    if found != expected:
        raise CorruptCheckpointError(f"{location}: rank, chunk_bytes and digest must be {expected}, got {found}")
    counts = [len(of_file) for of_file in raw.chunks]
    if counts != [-(-size // layout.CHUNK_BYTES) for size in sizes]:
        raise CorruptCheckpointError(f"{location}: files of {list(sizes)} bytes do not have {counts} chunk digests")
    if (raw.shared is None) != (rank != 0):
        raise CorruptCheckpointError(f"{location}: shared: must be an object on rank 0 and null on all other ranks")
    for at, kind in enumerate(raw.kinds):
        kind.check(f"{location}: kinds[{at}]", sizes)
    kinds = [kind.kind for kind in raw.kinds]
    files = [kind.file for kind in raw.kinds]
    for name, columns in (("shards", raw.shards), ("per_rank", raw.per_rank)):
        columns.check(f"{location}: {name}", kinds, files, sizes)
    _check_disjoint(raw, kinds, files)
    return RankIndex(
        rank=rank,
        shards=raw.shards.build(kinds, files, first_file),
        per_rank=raw.per_rank.build(kinds, files, first_file),
        chunks=raw.chunks,
        values=raw.values,
        shared=raw.shared,
    )


class _KindEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of a ``ShardKind`` in the file, and the number of the data file of its shards."""

    dtype: str
    shape: tuple[Count, ...]
    offset: tuple[Count, ...]
    size: tuple[Count, ...]
    file: Count

    def check(self, location: str, sizes: Sequence[int]) -> None:
        if self.dtype not in DTYPES:
            raise CorruptCheckpointError(f"{location}: unknown dtype {self.dtype!r}")
        dims = zip(self.offset, self.size, self.shape, strict=False)
        if not len(self.shape) == len(self.offset) == len(self.size) or any(a + n > full for a, n, full in dims):
            raise CorruptCheckpointError(f"{location}: region {self.offset}+{self.size} is outside of shape {self.shape}")
        if self.file >= len(sizes):
            raise CorruptCheckpointError(f"{location}: data file number must be below {len(sizes)}, got {self.file}")
        nbytes, size = self.kind.nbytes, sizes[self.file]
        if nbytes > size:
            raise CorruptCheckpointError(f"{location}: shards of {nbytes} bytes do not fit into a file of {size} bytes")

    @property
    def kind(self) -> ShardKind:
        """Kind with its size in bytes."""
        return shard_kind(self.dtype, self.shape, self.offset, self.size)


class _Columns(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Columns of shards: key, number of the kind, and first byte in the file."""

    keys: list[str]
    kinds: list[Count]
    begins: list[Count]

    def check(self, location: str, kinds: Sequence[ShardKind], files: Sequence[int], sizes: Sequence[int]) -> None:
        """Check that the columns are of one length, and that each shard is in its file."""
        if not len(self.keys) == len(self.kinds) == len(self.begins):
            lengths = len(self.keys), len(self.kinds), len(self.begins)
            raise CorruptCheckpointError(f"{location}: keys, kinds and begins must have one length, got {lengths}")
        if max(self.kinds, default=-1) >= len(kinds):
            raise CorruptCheckpointError(f"{location}: kinds must be below {len(kinds)}, got {max(self.kinds)}")
        if len(set(self.keys)) != len(self.keys):
            raise CorruptCheckpointError(f"{location}: keys must be unique")
        last_begins = [sizes[file] - kind.nbytes for kind, file in zip(kinds, files, strict=True)]
        for key, number, begin in zip(self.keys, self.kinds, self.begins, strict=True):
            if begin > last_begins[number]:
                end, size = begin + kinds[number].nbytes, sizes[files[number]]
                raise CorruptCheckpointError(f"{location}: {key}: bytes {begin} to {end} are outside of a file of {size} bytes")

    def build(self, kinds: Sequence[ShardKind], files: Sequence[int], first_file: int) -> dict[str, StoredShard]:
        common = [(first_file + file, kind) for file, kind in zip(files, kinds, strict=True)]
        shards = [StoredShard(common[n][0], begin, common[n][1]) for n, begin in zip(self.kinds, self.begins, strict=True)]
        return dict(zip(self.keys, shards, strict=True))


@strict_json.compile_schema
class _IndexFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of ``rank-<rank>.json``."""

    format: str
    version: int
    rank: Count
    chunk_bytes: Count
    digest: str
    chunks: tuple[tuple[Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")], ...], ...]
    kinds: tuple[_KindEntry, ...]
    shards: _Columns
    per_rank: _Columns
    values: Any
    shared: dict[str, Any] | None


def _check_disjoint(raw: _IndexFile, kinds: Sequence[ShardKind], files: Sequence[int]) -> None:
    """Raise if two shards share a byte of a file, which a reader would have to fetch for each of them."""
    numbers = np.array(raw.shards.kinds + raw.per_rank.kinds, dtype=np.int64)
    if not len(numbers):
        return
    begins = np.array(raw.shards.begins + raw.per_rank.begins, dtype=np.int64)
    of_file, nbytes = (np.array(column, dtype=np.int64)[numbers] for column in (files, [kind.nbytes for kind in kinds]))
    order = np.lexsort((begins, of_file))
    order = order[nbytes[order] > 0]
    of_file, begins, ends = of_file[order], begins[order], (begins + nbytes)[order]
    # The first pair of neighbours that overlap exists if any pair of shards overlaps.
    overlaps = np.flatnonzero((begins[1:] < ends[:-1]) & (of_file[1:] == of_file[:-1]))
    if len(overlaps):
        at = int(overlaps[0]) + 1
        key = (raw.shards.keys + raw.per_rank.keys)[int(order[at])]
        name = data_name(raw.rank, frozen=bool(of_file[at]))
        raise CorruptCheckpointError(
            f"{index_name(raw.rank)}: {name}: {key}: begins at byte {int(begins[at])}, inside of another shard"
        )
