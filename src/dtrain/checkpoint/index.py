"""Indexes of a checkpoint: ``index.json`` of the run, and ``rank-<rank>.json`` of each rank.

The index of the run lists the files of all ranks, the ranks that hold each tensor of the run, and plain values. A load reads it
to find the ranks whose files it needs. Tensors that are equal in dtype, shape and sharding are of one kind, and there are few
kinds. The parts of a kind are stored as arithmetic progressions: the rows of a tensor that all ranks shard are one or two of
them at any number of ranks. Tensors of one element that all ranks hold, such as the steps of an optimizer, are in the index
itself (``inline``).

So the index of a rank lists numbers, digests of its data files and plain values: where its parts of the tensors begin. A load
parses the indexes of those ranks that it reads from.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from math import prod
from operator import sub
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta, Struct

from dtrain.checkpoint import layout
from dtrain.checkpoint.layout import (
    DIGEST,
    DTYPES,
    INDEX,
    VERSION,
    Blocks,
    Count,
    Manifest,
    RankFiles,
    TensorRef,
    check_format,
    data_name,
    index_name,
)
from dtrain.errors import CorruptCheckpointError

INDEX_FORMAT, RANK_INDEX_FORMAT = "dtrain-checkpoint-index", "dtrain-checkpoint-rank"
# Dims of stored tensors are at most 2**48, so sums of two numbers fit into 64 bits.
_MAX_OFFSET = 2**48
# No file is as large, and the number fits into 64 bits.
_MAX_BYTES = 2**62
_Offset = Annotated[int, Meta(ge=0, le=_MAX_OFFSET)]
_Rank = Annotated[int, Meta(ge=0, le=layout.MAX_RANKS)]


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


class PartRun(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Parts of a tensor in arithmetic progression: part ``i`` is ``[offset + i * step, offset + i * step + size)``.

    Rank ``rank + i * rank_step`` holds part ``i``, for ``i`` from 0 to ``count`` - 1.
    """

    rank: _Rank
    rank_step: _Rank
    count: Annotated[int, Meta(ge=1, le=layout.MAX_RANKS)]
    offset: tuple[_Offset, ...]
    step: tuple[Annotated[int, Meta(ge=-_MAX_OFFSET, le=_MAX_OFFSET)], ...]
    size: tuple[_Offset, ...]

    def offset_of(self, index: int) -> tuple[int, ...]:
        """Return the offset of a part."""
        return tuple(offset + index * step for offset, step in zip(self.offset, self.step, strict=True))


class TensorKind(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Dtype, shape and parts of tensors of the run.

    Args:
        dtype: name of the dtype.
        shape: shape of the whole tensor.
        file: number of the data file, of each rank, that holds the part: 1 for frozen parameters in a file of their own.
        runs: the parts; empty for a tensor without elements.
    """

    dtype: str
    shape: tuple[_Offset, ...]
    file: Annotated[int, Meta(ge=0, le=1)]
    runs: tuple[PartRun, ...]

    def part_of(self, rank: int) -> ShardKind | None:
        """Return the part that a rank holds; None if the rank holds none."""
        return next((self._part(row) for row in np.flatnonzero(self._columns[0] == rank)), None)

    def parts_in(self, offset: Sequence[int], size: Sequence[int]) -> list[tuple[int, ShardKind]]:
        """Return rank and part of each part that overlaps ``[offset, offset + size)``, in the order of their offset."""
        ranks, offsets, sizes = self._columns
        low, high = np.array(offset, dtype=np.int64), np.array(offset, dtype=np.int64) + np.array(size, dtype=np.int64)
        rows = np.flatnonzero(((offsets < high) & (offsets + sizes > low)).all(axis=1))
        parts = [(int(ranks[row]), self._part(row)) for row in rows]
        return sorted(parts, key=lambda rank_and_part: rank_and_part[1].offset)

    def _part(self, row: Any) -> ShardKind:
        _, offsets, sizes = self._columns
        return shard_kind(self.dtype, self.shape, tuple(offsets[row].tolist()), tuple(sizes[row].tolist()))

    @cached_property
    def _columns(self) -> tuple[Any, Any, Any]:
        """Ranks, offsets and sizes of all parts."""
        dims = len(self.shape)
        none = np.zeros((0, dims), dtype=np.int64)
        ranks, offsets, sizes = [np.zeros(0, dtype=np.int64)], [none], [none]
        for run in self.runs:
            steps = np.arange(run.count, dtype=np.int64)
            ranks.append(run.rank + steps * run.rank_step)
            offsets.append(np.array(run.offset, dtype=np.int64) + steps[:, None] * np.array(run.step, dtype=np.int64))
            sizes.append(np.broadcast_to(np.array(run.size, dtype=np.int64), (run.count, dims)))
        all_ranks = np.concatenate(ranks)
        if len(np.unique(all_ranks)) != len(all_ranks):
            raise CorruptCheckpointError(f"{INDEX}: {self.dtype} {self.shape}: a rank must have at most one part of a tensor")
        return all_ranks, np.concatenate(offsets), np.concatenate(sizes)


@layout.compile_schema
class RunIndex(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Index of the run, ``index.json``.

    Args:
        format: name of the format.
        version: version of the format.
        files: files by rank.
        kinds: kinds of the tensors.
        tensors: kind of each tensor, in the order in which ``shared`` names them: its number in ``kinds`` plus 1, or 0 for a
            tensor that is in ``inline``.
        inline: data of small tensors, in the order of falling item size, then of keys.
        local_buffers: True if each rank has saved its own buffers.
        shared: encoded plain values of the run, by section.
    """

    format: str = INDEX_FORMAT
    version: int = VERSION
    files: tuple[RankFiles, ...]
    kinds: tuple[TensorKind, ...]
    tensors: tuple[Count, ...]
    inline: bytes
    local_buffers: bool
    shared: dict[str, Any]

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes in bytes of all files of the ranks, by name."""
        return {name: size for rank, files in enumerate(self.files) for name, size in files.sizes(rank).items()}

    def parts_of(self, rank: int) -> tuple[Any, list[ShardKind | None]]:
        """Return the numbers of the tensors that a rank holds in part, in order, and the rank's part of each kind."""
        parts = [kind.part_of(rank) for kind in self.kinds]
        held = np.array([False, *(box is not None for box in parts)])
        return np.flatnonzero(held[np.array(self.tensors, dtype=np.int64)]), parts


def parse_run_index(data: bytes, manifest: Manifest) -> RunIndex:
    """Parse ``index.json`` of the step with this manifest.

    Raises:
        CorruptCheckpointError: bytes that ``encode_index`` does not write, or a part outside of its tensor.
        CheckpointError: a valid index of another format version.
    """
    body = layout.parse_json(data, INDEX)
    check_format(body, INDEX, INDEX_FORMAT)
    index = layout.convert(body, RunIndex, INDEX)
    if len(index.files) != manifest.world_size:
        raise CorruptCheckpointError(f"{INDEX}: files: must list {manifest.world_size} ranks, got {len(index.files)}")
    for rank, files in enumerate(index.files):
        if len(files.data_bytes) not in (1, 2):
            raise CorruptCheckpointError(f"{INDEX}: files[{rank}]: must have 1 or 2 data files, got {len(files.data_bytes)}")
    for number, kind in enumerate(index.kinds):
        _check_kind(kind, index.files, f"{INDEX}: kinds[{number}]")
    if max(index.tensors, default=0) > len(index.kinds):
        raise CorruptCheckpointError(f"{INDEX}: tensors: must be at most {len(index.kinds)}, got {max(index.tensors)}")
    total = len(data) + sum(files.index_bytes + sum(files.data_bytes) for files in index.files)
    if total != manifest.bytes:
        raise CorruptCheckpointError(f"{INDEX}: files must have {manifest.bytes} bytes in all as in the manifest, got {total}")
    return index


def _check_kind(kind: TensorKind, files: Sequence[RankFiles], location: str) -> None:
    if kind.dtype not in DTYPES:
        raise CorruptCheckpointError(f"{location}: unknown dtype {kind.dtype!r}")
    for number, run in enumerate(kind.runs):
        where = f"{location}: runs[{number}]"
        if not len(run.offset) == len(run.step) == len(run.size) == len(kind.shape):
            raise CorruptCheckpointError(f"{where}: offset, step and size must have {len(kind.shape)} dims")
        last = run.offset_of(run.count - 1)
        dims = zip(run.offset, last, run.size, kind.shape, strict=True)
        if any(min(first, end) < 0 or max(first, end) + size > whole for first, end, size, whole in dims):
            raise CorruptCheckpointError(
                f"{where}: parts of {run.size} from {run.offset} to {last} are outside of {kind.shape}"
            )
        if 0 in run.size:
            raise CorruptCheckpointError(f"{where}: a part must not be empty, got {run.size}")
        last_rank = run.rank + (run.count - 1) * run.rank_step
        if last_rank >= len(files) or (run.count > 1) != (run.rank_step > 0):
            raise CorruptCheckpointError(f"{where}: ranks must differ and be below {len(files)}, got {run.rank} to {last_rank}")
    if kind.file >= min(len(of_rank.data_bytes) for of_rank in files):
        raise CorruptCheckpointError(f"{location}: file: a rank has no file of frozen parameters")
    if sum(run.count for run in kind.runs) > len(files):
        raise CorruptCheckpointError(f"{location}: runs: must have at most one part per rank")


class RankParts(NamedTuple):
    """Parts that one rank has written.

    Args:
        numbers: for each tensor of the run, the number of the rank's box plus 1, or 0 for a tensor that the rank has not
            written.
        boxes: file, offset and size of each distinct part.
    """

    numbers: Any
    boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]

    @classmethod
    def of(cls, keys: Sequence[str], parts: Mapping[str, tuple[int, tuple[int, ...], tuple[int, ...]]]) -> RankParts:
        """Number the parts by their file, offset and size.

        Args:
            keys: all tensors of the run, in the order that is equal on all ranks.
            parts: file, offset and size by key.
        """
        boxes: dict[Any, int] = {}
        numbers = [boxes.setdefault(parts[key], len(boxes)) + 1 if key in parts else 0 for key in keys]
        return cls(np.array(numbers, dtype=np.int32), list(boxes))

    def encode(self) -> list[Any]:
        """Encode as JSON. The numbers of most ranks are alike and repeat themselves, so they are compressed."""
        return [base64.b64encode(zlib.compress(self.numbers.tobytes())).decode(), self.boxes]

    @classmethod
    def decode(cls, value: Any) -> RankParts:
        """Decode the value of ``encode``."""
        numbers = np.frombuffer(zlib.decompress(base64.b64decode(value[0])), dtype=np.int32)
        return cls(numbers, [(file, tuple(offset), tuple(size)) for file, offset, size in value[1]])


def merge_parts(
    refs: Mapping[str, TensorRef], inline: Collection[str], by_rank: Sequence[RankParts]
) -> tuple[tuple[TensorKind, ...], tuple[int, ...]]:
    """Merge the parts of all ranks. Return the kinds, and the kind of each tensor as in ``RunIndex.tensors``.

    Two tensors are of one kind if dtype and shape are equal, and each rank has written the same box of both.
    """
    patterns: dict[bytes, int] = {}
    pattern_of = [patterns.setdefault(parts.numbers.tobytes(), len(patterns)) for parts in by_rank]
    rows = np.stack([np.frombuffer(pattern, dtype=np.int32) for pattern in patterns])
    ranks_of: list[list[int]] = [[] for _ in patterns]
    for rank, pattern in enumerate(pattern_of):
        ranks_of[pattern].append(rank)
    kinds: list[TensorKind] = []
    kind_numbers: dict[Any, int] = {}
    tensors = []
    for (key, ref), column in zip(refs.items(), np.ascontiguousarray(rows.T), strict=True):
        if key in inline:
            tensors.append(0)
            continue
        identity = (ref.dtype, ref.shape, column.tobytes())
        if identity not in kind_numbers:
            kind_numbers[identity] = len(kind_numbers) + 1
            parts = sorted(
                (rank, *by_rank[rank].boxes[number - 1])
                for ranks, number in zip(ranks_of, column.tolist(), strict=True)
                if number
                for rank in ranks
            )
            file = parts[0][1] if parts else 0
            runs = tuple(_find_runs([(rank, offset, size) for rank, _, offset, size in parts]))
            kinds.append(TensorKind(dtype=ref.dtype, shape=ref.shape, file=file, runs=runs))
        tensors.append(kind_numbers[identity])
    return tuple(kinds), tuple(tensors)


_Part = tuple[int, tuple[int, ...], tuple[int, ...]]


def _find_runs(parts: Sequence[_Part]) -> Iterator[PartRun]:
    """Split parts in the order of ranks into arithmetic progressions, each as long as possible."""
    start = 0
    while start < len(parts):
        rank, offset, size = parts[start]
        rank_step, step, end = 0, (0,) * len(offset), start + 1
        while end < len(parts) and parts[end][2] == size:
            difference = parts[end][0] - parts[end - 1][0], tuple(map(sub, parts[end][1], parts[end - 1][1]))
            if end > start + 1 and difference != (rank_step, step):
                break
            (rank_step, step), end = difference, end + 1
        yield PartRun(rank, rank_step, end - start, offset, step, size)
        start = end


@layout.compile_schema
class RankIndex(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Index of the files of one rank, ``rank-<rank>.json``.

    Args:
        format: name of the format.
        version: version of the format.
        digest: kind of the digests of blocks.
        rank: the rank that wrote the files.
        begins: first byte of the rank's part of each tensor of the run that the rank holds, in the order of the run's index.
        per_rank: first byte of each tensor that only this rank has, in the order of ``values``.
        blocks: blocks of each data file.
        values: encoded plain values of the rank.
    """

    format: str = RANK_INDEX_FORMAT
    version: int = VERSION
    digest: str
    rank: Count
    begins: list[Count]
    per_rank: list[Count]
    blocks: tuple[Blocks, ...]
    values: Any


def parse_rank_index(data: bytes, rank: int, files: RankFiles) -> RankIndex:
    """Parse the index of ``rank``. ``place_shards`` compares it with the index of the run.

    Raises:
        CorruptCheckpointError: bytes that ``encode_index`` does not write, or blocks that do not cover the data files.
        CheckpointError: a valid index of another format version.
    """
    location = index_name(rank)
    body = layout.parse_json(data, location)
    check_format(body, location, RANK_INDEX_FORMAT)
    index = layout.convert(body, RankIndex, location)
    if (index.rank, index.digest) != (rank, DIGEST):
        raise CorruptCheckpointError(f"{location}: rank and digest must be {(rank, DIGEST)}, got {(index.rank, index.digest)}")
    if len(index.blocks) != len(files.data_bytes):
        raise CorruptCheckpointError(f"{location}: blocks: must list {len(files.data_bytes)} files, got {len(index.blocks)}")
    for number, (blocks, size) in enumerate(zip(index.blocks, files.data_bytes, strict=True)):
        _check_blocks(blocks, size, f"{location}: blocks[{number}]")
    return index


def _check_blocks(blocks: Blocks, size: int, location: str) -> None:
    """Raise unless the blocks cover a file of ``size`` bytes."""
    last = blocks.ends[-1] if blocks.ends else 0
    if last != size or max(blocks.ends, default=0) != last:
        raise CorruptCheckpointError(f"{location}: must end with the file of {size} bytes, got {last}")
    if len(blocks.digests) != 32 * len(blocks.ends):
        raise CorruptCheckpointError(f"{location}: {len(blocks.ends)} blocks do not have {len(blocks.digests) / 32:g} digests")
    lengths = np.diff(np.array(blocks.ends, dtype=np.int64), prepend=0)
    if len(lengths) and not 0 < lengths.min() <= lengths.max() <= layout.CHUNK_BYTES:
        raise CorruptCheckpointError(
            f"{location}: a block must have 1 to {layout.CHUNK_BYTES} bytes, got {lengths.min()} to {lengths.max()}"
        )


class PlacedShards(NamedTuple):
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
        begins: list[int] = self.begins[np.searchsorted(self.numbers, np.array(numbers, dtype=np.int64))].tolist()
        return begins


def place_shards(index: RankIndex, run: RunIndex, refs: Mapping[str, TensorRef]) -> PlacedShards:
    """Return the places of the shards of a rank, after a check against the index of the run.

    Args:
        index: index of the rank.
        run: index of the run.
        refs: tensors that only this rank has, as ``index.values`` name them.

    Raises:
        CorruptCheckpointError: another number of shards, a shard outside of its file, or shards that share bytes.
    """
    name, sizes = index_name(index.rank), run.files[index.rank].data_bytes
    numbers, parts = run.parts_of(index.rank)
    for column, begins, expected in (("begins", index.begins, len(numbers)), ("per_rank", index.per_rank, len(refs))):
        if len(begins) != expected:
            raise CorruptCheckpointError(f"{name}: {column}: must have {expected} numbers, got {len(begins)}")
    own = [shard_kind(ref.dtype, ref.shape, (0,) * len(ref.shape), ref.shape) for ref in refs.values()]
    kinds = np.array(run.tensors, dtype=np.int64)[numbers] - 1
    # There are many tensors and few kinds, so lengths and files are looked up by kind. The last one is for no kind at all.
    lengths = np.array([*(0 if box is None else min(box.nbytes, _MAX_BYTES) for box in parts), 0], dtype=np.int64)
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
    return PlacedShards(numbers, np.array(index.begins, dtype=np.int64), per_rank, index.blocks, index.values)


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
        shard = int(outside[0])
        begin, size = begins[shard], sizes[int(files[shard])]
        raise CorruptCheckpointError(
            f"{name}: shard {shard}: bytes {begin} to {begin + int(lengths[shard])} are outside of a file of {size} bytes"
        )
    order = np.lexsort((first, files))
    order = order[lengths[order] > 0]
    of_file, first, ends = files[order], first[order], (first + lengths)[order]
    # The first pair of neighbours that overlap exists if any pair of shards overlaps.
    overlaps = np.flatnonzero((first[1:] < ends[:-1]) & (of_file[1:] == of_file[:-1]))
    if len(overlaps):
        position = int(overlaps[0]) + 1
        file = data_name(rank, frozen=bool(of_file[position]))
        raise CorruptCheckpointError(
            f"{name}: {file}: shard {int(order[position])}: begins at byte {int(first[position])}, inside of another shard"
        )
