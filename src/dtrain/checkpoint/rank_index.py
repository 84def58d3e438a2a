"""A rank's index: what is where in its data files, the digests of their chunks, and its plain values. Pure."""

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
_INDEX_FIELDS = ("format", "version", "rank", "chunk_sizes", "digest", "chunks", "kinds", "boxes", "own", "values", "shared")
_KIND_FIELDS = ("dtype", "shape", "offset", "size", "file")


class TensorShardEntry(NamedTuple):
    """One stored box: part ``[offset, offset + size)`` of the tensor ``key`` of ``shape``.

    It is the bytes ``[begin, end)`` of data file number ``file`` of its rank. (A tuple, because there is one for every tensor
    of every rank, which others make by the ten thousand.)
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
    """What one rank wrote.

    Args:
        rank: which.
        shards: parts of tensors that belong to the run as a whole.
        per_rank: tensors that belong to this rank alone.
        chunks: of each data file, the digests of each ``CHUNK_BYTES``, the last one shorter.
        values: the rank's own plain values, encoded.
        shared: the plain values of the run as a whole, encoded, by section; only rank 0 has them.
    """

    rank: int
    shards: tuple[TensorShardEntry, ...]
    per_rank: tuple[TensorShardEntry, ...]
    chunks: tuple[tuple[str, ...], ...]
    values: Any
    shared: dict[str, Any] | None


def encode_index(index: RankIndex) -> bytes:
    """The bytes of ``rank-<rank>.json``.

    Raises:
        CheckpointError: more JSON than would be read back.
    """
    body = {
        "format": INDEX_FORMAT,
        "version": layout.VERSION,
        "chunk_sizes": layout.CHUNK_BYTES,
        "digest": layout.DIGEST,
        **_index_to_json(index),
    }
    data = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > strict_json.MAX_JSON_BYTES:
        raise CheckpointError(
            f"{layout.index_name(index.rank)}: {len(data)} bytes of plain values and index, at most {strict_json.MAX_JSON_BYTES} "
            "are taken; put large plain data into tensors"
        )
    return data


def _index_to_json(index: RankIndex) -> dict[str, Any]:
    """The fields of the index. Boxes are rows ``[key, kind, begin]``; what they have in common is said once, in ``kinds``.

    A model may have many boxes, all of which every rank parses when it loads, and has few kinds of them.
    """
    kinds: dict[tuple[Any, ...], int] = {}

    def row(entry: TensorShardEntry) -> list[Any]:
        kind = (entry.dtype, entry.shape, entry.offset, entry.size, entry.file)
        return [entry.key, kinds.setdefault(kind, len(kinds)), entry.begin]

    boxes, own = [row(entry) for entry in index.shards], [row(entry) for entry in index.per_rank]
    return {
        "rank": index.rank,
        "kinds": [dict(zip(_KIND_FIELDS, kind, strict=True)) for kind in kinds],
        "boxes": boxes,
        "own": own,
        "chunks": index.chunks,
        "values": index.values,
        "shared": index.shared,
    }


def parse_index(data: bytes, rank: int, sizes: Sequence[int]) -> RankIndex:
    """The index of ``rank``, whose data files have ``sizes`` bytes.

    Raises:
        CorruptCheckpointError: not what ``encode_index`` writes, or boxes that leave their tensor or the file.
        CheckpointError: sound, but of another format version.
    """
    where = layout.index_name(rank)
    body = strict_json.parse_json(data, where)
    layout.check_format(body, where, INDEX_FORMAT)
    raw = strict_json.read_object(body, where, _INDEX_FIELDS)
    found = raw["rank"], raw["chunk_sizes"], raw["digest"]
    if found != (rank, layout.CHUNK_BYTES, layout.DIGEST):
        raise CorruptCheckpointError(f"{where}: is of rank {found[0]!r} with {found[2]!r} of chunks of {found[1]!r} bytes")
    chunks = strict_json.read_list(raw["chunks"], f"{where}: chunks", _read_digests)
    counts = [len(of_file) for of_file in chunks]
    if counts != [-(-size // layout.CHUNK_BYTES) for size in sizes]:
        raise CorruptCheckpointError(f"{where}: {counts} chunk digests for files of {list(sizes)} bytes")
    if (raw["shared"] is None) != (rank != 0) or (rank == 0 and type(raw["shared"]) is not dict):
        raise CorruptCheckpointError(f"{where}: shared: rank 0 and no other holds an object of shared values")
    kinds = strict_json.read_list(raw["kinds"], f"{where}: kinds", lambda value, place: _parse_kind(value, place, sizes))
    return RankIndex(
        rank=rank,
        shards=_parse_entries(raw["boxes"], f"{where}: boxes", kinds),
        per_rank=_parse_entries(raw["own"], f"{where}: own", kinds),
        chunks=chunks,
        values=raw["values"],
        shared=raw["shared"],
    )


def _read_digests(value: Any, where: str) -> tuple[str, ...]:
    return strict_json.read_list(value, where, _read_digest)


def _read_digest(value: Any, where: str) -> str:
    return strict_json.read_str(value, where, _DIGEST_PATTERN)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardKind:
    """What boxes have in common, how many bytes each of them has, and how many the file that they are in."""

    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: int
    nbytes: int
    file_bytes: int


def _parse_kind(value: Any, where: str, sizes: Sequence[int]) -> _ShardKind:
    raw = strict_json.read_object(value, where, _KIND_FIELDS)
    dtype, file = strict_json.read_str(raw["dtype"], where), strict_json.read_int(raw["file"], where)
    shape, offset, size = (strict_json.read_ints(raw[name], where) for name in ("shape", "offset", "size"))
    if dtype not in layout.DTYPES:
        raise CorruptCheckpointError(f"{where}: unknown dtype {dtype!r}")
    if not len(shape) == len(offset) == len(size) or any(a + n > full for a, n, full in zip(offset, size, shape, strict=True)):
        raise CorruptCheckpointError(f"{where}: box {offset}+{size} leaves its shape {shape}")
    if file >= len(sizes):
        raise CorruptCheckpointError(f"{where}: lies in data file {file} of {len(sizes)}")
    nbytes = prod(size) * layout.DTYPES[dtype].itemsize
    return _ShardKind(dtype=dtype, shape=shape, offset=offset, size=size, file=file, nbytes=nbytes, file_bytes=sizes[file])


def _parse_entries(value: Any, where: str, kinds: Sequence[_ShardKind]) -> tuple[TensorShardEntry, ...]:
    if type(value) is not list:
        raise CorruptCheckpointError(f"{where}: needs a list, got {strict_json.describe_value(value)}")
    for row in value:
        if (
            type(row) is not list
            or len(row) != 3
            or type(row[0]) is not str
            or type(row[1]) is not int
            or type(row[2]) is not int
        ):
            raise CorruptCheckpointError(
                f"{where}: needs rows of a key, a kind, and a first byte, got {strict_json.describe_value(row)}"
            )
        key, number, begin = row
        if not 0 <= number < len(kinds):
            raise CorruptCheckpointError(f"{where}: {key}: is of kind {number}, of which there are {len(kinds)}")
        if begin < 0 or begin + kinds[number].nbytes > kinds[number].file_bytes:
            raise CorruptCheckpointError(
                f"{where}: {key}: {kinds[number].nbytes} bytes from {begin} on, in a file of {kinds[number].file_bytes}"
            )
    common = [(kind.dtype, kind.shape, kind.offset, kind.size, kind.nbytes, kind.file) for kind in kinds]
    return tuple(
        TensorShardEntry(key, dtype, shape, offset, size, begin, begin + nbytes, file)
        for key, number, begin in value
        for dtype, shape, offset, size, nbytes, file in (common[number],)
    )
