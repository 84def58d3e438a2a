"""Index of one rank, ``rank-<rank>.json``: where its parts of the tensors begin, digests of its data files, plain values.

The index of the run says which tensors a rank holds, in which order, and what part of each. So the index of a rank lists
numbers only, and a load parses the indexes of those ranks that it reads from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta, Struct

from dtrain.checkpoint import layout, strict_json, tree_json
from dtrain.checkpoint.data_file import Blocks
from dtrain.checkpoint.layout import DIGEST, DTYPES, VERSION, RankFiles, check_format, data_name, index_name
from dtrain.checkpoint.strict_json import Count
from dtrain.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from dtrain.checkpoint.run_index import RunIndex

RANK_INDEX_FORMAT = "dtrain-checkpoint-rank"
# No file is as large, and the number fits into 64 bits.
_MAX_BYTES = 2**62


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RankIndex:
    """Index of the files of one rank.

    Args:
        rank: the rank that wrote the files.
        begins: first byte of the rank's part of each tensor of the run that the rank holds, in the order of the run's index.
        per_rank: first byte of each tensor that only this rank has, in the order of ``values``.
        blocks: blocks of each data file.
        values: encoded plain values of the rank.
    """

    rank: int
    begins: Sequence[int]
    per_rank: Sequence[int]
    blocks: tuple[Blocks, ...]
    values: Any


def encode_rank_index(index: RankIndex) -> bytes:
    """Encode ``rank-<rank>.json``.

    Raises:
        CheckpointError: more JSON than the reader accepts.
    """
    body = {
        "format": RANK_INDEX_FORMAT,
        "version": VERSION,
        "digest": DIGEST,
        "rank": index.rank,
        "begins": index.begins,
        "per_rank": index.per_rank,
        "blocks": [{"ends": blocks.ends, "digests": blocks.digests.hex()} for blocks in index.blocks],
        "values": index.values,
    }
    return strict_json.encode_limited(body, index_name(index.rank))


class _FileBlocks(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Blocks of a data file: the byte after each, and all digests in order."""

    ends: list[Count]
    digests: Annotated[str, Meta(pattern=r"\A[0-9a-f]*\Z")]


@strict_json.compile_schema
class _RankIndexFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of ``rank-<rank>.json``."""

    format: str
    version: int
    digest: str
    rank: Count
    begins: list[Count]
    per_rank: list[Count]
    blocks: tuple[_FileBlocks, ...]
    values: Any


def parse_rank_index(data: bytes, rank: int, files: RankFiles) -> RankIndex:
    """Parse the index of ``rank``. ``place_shards`` compares it with the index of the run.

    Raises:
        CorruptCheckpointError: bytes that ``encode_rank_index`` does not write, or blocks that do not cover the data files.
        CheckpointError: a valid index of another format version.
    """
    location = index_name(rank)
    body = strict_json.parse_json(data, location)
    check_format(body, location, RANK_INDEX_FORMAT)
    raw = strict_json.convert(body, _RankIndexFile, location)
    if (raw.rank, raw.digest) != (rank, DIGEST):
        raise CorruptCheckpointError(f"{location}: rank and digest must be {(rank, DIGEST)}, got {(raw.rank, raw.digest)}")
    if len(raw.blocks) != len(files.data_bytes):
        raise CorruptCheckpointError(f"{location}: blocks: must list {len(files.data_bytes)} files, got {len(raw.blocks)}")
    blocks = tuple(
        _parse_blocks(of_file, size, f"{location}: blocks[{number}]")
        for number, (of_file, size) in enumerate(zip(raw.blocks, files.data_bytes, strict=True))
    )
    return RankIndex(rank=rank, begins=raw.begins, per_rank=raw.per_rank, blocks=blocks, values=raw.values)


def _parse_blocks(raw: _FileBlocks, size: int, location: str) -> Blocks:
    last = raw.ends[-1] if raw.ends else 0
    if last != size or max(raw.ends, default=0) != last:
        raise CorruptCheckpointError(f"{location}: must end with the file of {size} bytes, got {last}")
    if len(raw.digests) != 32 * len(raw.ends):
        raise CorruptCheckpointError(f"{location}: {len(raw.ends)} blocks do not have {len(raw.digests) / 32:g} digests")
    lengths = np.diff(np.array(raw.ends, dtype=np.int64), prepend=0)
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= layout.CHUNK_BYTES:
        raise CorruptCheckpointError(
            f"{location}: a block must have 1 to {layout.CHUNK_BYTES} bytes, got {lengths.min()} to {lengths.max()}"
        )
    return Blocks(raw.ends, bytes.fromhex(raw.digests))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class PlacedShards:
    """Places of the shards of one rank, checked.

    Args:
        numbers: numbers of the tensors of the run that the rank holds in part, ascending.
        begins: first byte of each part.
        per_rank: shards of the tensors that only this rank has, by key. Files are counted within the rank.
        blocks: blocks of each data file.
        values: encoded plain values of the rank.
    """

    numbers: Any
    begins: Any
    per_rank: Mapping[str, StoredShard]
    blocks: tuple[Blocks, ...]
    values: Any

    def begins_of(self, numbers: Sequence[int]) -> list[int]:
        """Return the first bytes of the parts of these tensors, which the rank holds."""
        found: list[int] = self.begins[np.searchsorted(self.numbers, np.array(numbers, dtype=np.int64))].tolist()
        return found


def place_shards(index: RankIndex, run: RunIndex) -> PlacedShards:
    """Return the places of the shards of a rank, after a check against the index of the run.

    Raises:
        CorruptCheckpointError: another number of shards, a shard outside of its file, or shards that share bytes.
    """
    name, sizes = index_name(index.rank), run.files[index.rank].data_bytes
    numbers, parts = run.parts_of(index.rank)
    refs = tree_json.tensor_refs(index.values, "")
    for column, found, expected in (("begins", index.begins, len(numbers)), ("per_rank", index.per_rank, len(refs))):
        if len(found) != expected:
            raise CorruptCheckpointError(f"{name}: {column}: must have {expected} numbers, got {len(found)}")
    own = [shard_kind(ref.dtype, ref.shape, (0,) * len(ref.shape), ref.shape) for ref in refs.values()]
    kinds = np.array(run.tensors, dtype=np.int64)[numbers] - 1
    # There are many tensors and few kinds, so lengths and files are looked up by kind. The last one is for no kind at all.
    lengths = np.array([*(0 if part is None else min(part.nbytes, _MAX_BYTES) for part in parts), 0], dtype=np.int64)
    files = np.array([*(kind.file for kind in run.kinds), 0], dtype=np.int64)
    own_lengths = np.array([min(kind.nbytes, _MAX_BYTES) for kind in own], dtype=np.int64)
    _check_places(
        index.rank,
        [*index.begins, *index.per_rank],
        np.concatenate([lengths[kinds], own_lengths]),
        np.concatenate([files[kinds], np.zeros(len(own), dtype=np.int64)]),
        sizes,
    )
    per_rank = {key: StoredShard(0, begin, kind) for key, begin, kind in zip(refs, index.per_rank, own, strict=True)}
    return PlacedShards(
        numbers=numbers,
        begins=np.array(index.begins, dtype=np.int64),
        per_rank=per_rank,
        blocks=index.blocks,
        values=index.values,
    )


def _check_places(rank: int, begins: list[int], lengths: Any, files: Any, sizes: Sequence[int]) -> None:
    """Raise if a shard is outside of its file, or if two share a byte, which a reader would fetch for each of them."""
    if not begins:
        return
    name = index_name(rank)
    if max(begins) > max(sizes):
        raise CorruptCheckpointError(f"{name}: byte {max(begins)} is outside of a file of {max(sizes)} bytes")
    first = np.array(begins, dtype=np.int64)
    last = np.array(sizes, dtype=np.int64)[files] - lengths
    outside = np.flatnonzero(first > last)
    if len(outside):
        at = int(outside[0])
        size = sizes[int(files[at])]
        raise CorruptCheckpointError(
            f"{name}: shard {at}: bytes {begins[at]} to {begins[at] + int(lengths[at])} are outside of a file of {size} bytes"
        )
    order = np.lexsort((first, files))
    order = order[lengths[order] > 0]
    of_file, first, ends = files[order], first[order], (first + lengths)[order]
    # The first pair of neighbours that overlap exists if any pair of shards overlaps.
    overlaps = np.flatnonzero((first[1:] < ends[:-1]) & (of_file[1:] == of_file[:-1]))
    if len(overlaps):
        at = int(overlaps[0]) + 1
        file = data_name(rank, frozen=bool(of_file[at]))
        raise CorruptCheckpointError(
            f"{name}: {file}: shard {int(order[at])}: begins at byte {int(first[at])}, inside of another shard"
        )
