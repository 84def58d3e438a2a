"""A rank's index: what is where in its data files, the digests of their chunks, and its plain values. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from dtrain.checkpoint import closed, layout
from dtrain.errors import CheckpointError, DamagedCheckpointError

INDEX_FORMAT = "dtrain-checkpoint-rank"
_XXH3 = re.compile(r"[0-9a-f]{32}")
_INDEX_FIELDS = ("format", "version", "rank", "chunk_bytes", "digest", "chunks", "kinds", "boxes", "own", "values", "shared")
_KIND_FIELDS = ("dtype", "shape", "offset", "size", "file")


class Entry(NamedTuple):
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
        boxes: parts of tensors that belong to the run as a whole.
        own: tensors that belong to this rank alone.
        chunks: of each data file, the digests of each ``CHUNK_BYTES``, the last one shorter.
        values: the rank's own plain values, encoded.
        shared: the plain values of the run as a whole, encoded, by section; only rank 0 has them.
    """

    rank: int
    boxes: tuple[Entry, ...]
    own: tuple[Entry, ...]
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
        "chunk_bytes": layout.CHUNK_BYTES,
        "digest": layout.DIGEST,
        **_plain_index(index),
    }
    data = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > closed.MAX_JSON_BYTES:
        raise CheckpointError(
            f"{layout.index_name(index.rank)}: {len(data)} bytes of plain values and index, at most {closed.MAX_JSON_BYTES} "
            "are taken; put large plain data into tensors"
        )
    return data


def _plain_index(index: RankIndex) -> dict[str, Any]:
    """The fields of the index. Boxes are rows ``[key, kind, begin]``; what they have in common is said once, in ``kinds``.

    A model may have many boxes, all of which every rank parses when it loads, and has few kinds of them.
    """
    kinds: dict[tuple[Any, ...], int] = {}

    def row(entry: Entry) -> list[Any]:
        kind = (entry.dtype, entry.shape, entry.offset, entry.size, entry.file)
        return [entry.key, kinds.setdefault(kind, len(kinds)), entry.begin]

    boxes, own = [row(entry) for entry in index.boxes], [row(entry) for entry in index.own]
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
        DamagedCheckpointError: not what ``encode_index`` writes, or boxes that leave their tensor or the file.
        CheckpointError: sound, but of another format version.
    """
    where = layout.index_name(rank)
    body = closed.parse(data, where)
    layout.check_format(body, where, INDEX_FORMAT)
    raw = closed.record(body, where, _INDEX_FIELDS)
    found = raw["rank"], raw["chunk_bytes"], raw["digest"]
    if found != (rank, layout.CHUNK_BYTES, layout.DIGEST):
        raise DamagedCheckpointError(f"{where}: is of rank {found[0]!r} with {found[2]!r} of chunks of {found[1]!r} bytes")
    chunks = closed.items(raw["chunks"], f"{where}: chunks", _digests)
    counts = [len(of_file) for of_file in chunks]
    if counts != [-(-size // layout.CHUNK_BYTES) for size in sizes]:
        raise DamagedCheckpointError(f"{where}: {counts} chunk digests for files of {list(sizes)} bytes")
    if (raw["shared"] is None) != (rank != 0) or (rank == 0 and type(raw["shared"]) is not dict):
        raise DamagedCheckpointError(f"{where}: shared: rank 0 and no other holds an object of shared values")
    kinds = closed.items(raw["kinds"], f"{where}: kinds", lambda value, place: _parse_kind(value, place, sizes))
    return RankIndex(
        rank=rank,
        boxes=_parse_entries(raw["boxes"], f"{where}: boxes", kinds),
        own=_parse_entries(raw["own"], f"{where}: own", kinds),
        chunks=chunks,
        values=raw["values"],
        shared=raw["shared"],
    )


def _digests(value: Any, where: str) -> tuple[str, ...]:
    return closed.items(value, where, _digest)


def _digest(value: Any, where: str) -> str:
    return closed.text(value, where, _XXH3)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What boxes have in common, how many bytes each of them has, and how many the file that they are in."""

    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    file: int
    bytes: int
    file_bytes: int


def _parse_kind(value: Any, where: str, sizes: Sequence[int]) -> _Kind:
    raw = closed.record(value, where, _KIND_FIELDS)
    dtype, file = closed.text(raw["dtype"], where), closed.whole(raw["file"], where)
    shape, offset, size = (closed.wholes(raw[name], where) for name in ("shape", "offset", "size"))
    if dtype not in layout.DTYPES:
        raise DamagedCheckpointError(f"{where}: unknown dtype {dtype!r}")
    if not len(shape) == len(offset) == len(size) or any(a + n > full for a, n, full in zip(offset, size, shape, strict=True)):
        raise DamagedCheckpointError(f"{where}: box {offset}+{size} leaves its shape {shape}")
    if file >= len(sizes):
        raise DamagedCheckpointError(f"{where}: lies in data file {file} of {len(sizes)}")
    nbytes = prod(size) * layout.DTYPES[dtype].itemsize
    return _Kind(dtype=dtype, shape=shape, offset=offset, size=size, file=file, bytes=nbytes, file_bytes=sizes[file])


def _parse_entries(value: Any, where: str, kinds: Sequence[_Kind]) -> tuple[Entry, ...]:
    if type(value) is not list:
        raise DamagedCheckpointError(f"{where}: needs a list, got {closed.kind(value)}")
    for row in value:
        if (
            type(row) is not list
            or len(row) != 3
            or type(row[0]) is not str
            or type(row[1]) is not int
            or type(row[2]) is not int
        ):
            raise DamagedCheckpointError(f"{where}: needs rows of a key, a kind, and a first byte, got {closed.kind(row)}")
        key, number, begin = row
        if not 0 <= number < len(kinds):
            raise DamagedCheckpointError(f"{where}: {key}: is of kind {number}, of which there are {len(kinds)}")
        if begin < 0 or begin + kinds[number].bytes > kinds[number].file_bytes:
            raise DamagedCheckpointError(
                f"{where}: {key}: {kinds[number].bytes} bytes from {begin} on, in a file of {kinds[number].file_bytes}"
            )
    common = [(kind.dtype, kind.shape, kind.offset, kind.size, kind.bytes, kind.file) for kind in kinds]
    return tuple(
        Entry(key, dtype, shape, offset, size, begin, begin + nbytes, file)
        for key, number, begin in value
        for dtype, shape, offset, size, nbytes, file in (common[number],)
    )
