"""Plan which replica of a tensor is written, which bytes a rank reads, and which bytes of a file are fetched together.

World size and placements may differ between the save and the load. All functions are pure functions of regions, shards and
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from dtrain.checkpoint import layout
from dtrain.checkpoint.data_file import split_blocks
from dtrain.checkpoint.index import ShardKind, StoredShard
from dtrain.checkpoint.layout import DTYPES, Blocks, TensorRef
from dtrain.dist.dtensor import shard_box
from dtrain.errors import CorruptCheckpointError

# Limit of one read that is not contiguous, unless a single row is larger: such a read needs a buffer of its own.
MAX_STRIDED_READ_BYTES = 2**20
Span = tuple[int, int]
# More replicas write no faster, and a reader opens the files of all of them.
MAX_WRITERS = 8
# Replicas with less to write each are not worth the files that a reader opens.
MIN_WRITER_BYTES = 2**20
# A server sends so many bytes in the time of a request, so smaller gaps between needed blocks are fetched as well.
_MAX_REMOTE_GAP_BYTES = 2**20


class Region(NamedTuple):
    """Region of a global tensor: ``[offset, offset + size)`` in each dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


@lru_cache(maxsize=4096)
def full_region(shape: tuple[int, ...]) -> Region:
    """Return the region of a whole tensor."""
    return Region(offset=(0,) * len(shape), size=shape)


def local_region(tensor: Tensor, shape: tuple[int, ...] | None = None) -> Region:
    """Return the region of a tensor that this rank has, or the region of a tensor of another shape that is sharded alike."""
    box = shard_box(tensor, shape)
    return Region(offset=box.offset, size=box.size)


ShardFinder: TypeAlias = Callable[[Mapping[str, Region]], Mapping[str, Sequence[StoredShard]]]
"""Function that returns the stored shards that overlap the region of each tensor, by key."""


class ReadItem(NamedTuple):
    """Read of the bytes ``[begin, end)`` of a file: ``block`` whole rows of a stored shard, which may be needed in part.

    ``block[source]`` goes to ``target`` of the local tensor ``key``; both have one ``(start, stop)`` per dim. If the bytes are
    contiguous in the local tensor, too, they begin at its byte ``offset``. A tuple, because every tensor has at least one read.
    """

    file: int
    begin: int
    end: int
    key: str
    block: tuple[int, ...]
    source: tuple[Span, ...]
    target: tuple[Span, ...]
    offset: int | None


def assign_writers(tensors: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Choose the replica of each tensor that writes it.

    At most ``MAX_WRITERS`` replicas write, about as many bytes each, and at least ``MIN_WRITER_BYTES`` if there are several.
    The first of them gets the smallest tensors, the last the largest, so a reader finds small tensors in few files.

    Args:
        tensors: bytes and number of replicas by key, equal on all ranks.

    Returns:
        The number of the replica, below the number of replicas, by key.
    """
    totals: dict[int, int] = {}
    for nbytes, copies in tensors.values():
        totals[copies] = totals.get(copies, 0) + nbytes
    done = dict.fromkeys(totals, 0)
    chosen = {}
    for key, (nbytes, copies) in sorted(tensors.items(), key=lambda item: item[1][0]):
        writers = max(1, min(copies, MAX_WRITERS, totals[copies] // MIN_WRITER_BYTES))
        # A tensor goes to the writer in whose share of the bytes its middle lies.
        middle = 2 * done[copies] + nbytes
        writer = min(middle * writers // max(1, 2 * totals[copies]), writers - 1)
        chosen[key] = writer * copies // writers
        done[copies] += nbytes
    return chosen


def plan_reads(index: Mapping[str, Sequence[StoredShard]], targets: Mapping[str, Region], prefix: str = "") -> list[ReadItem]:
    """Plan the reads that fill the targets, in the order of the files.

    The work grows with the number of shards, not with the number of pairs.

    Args:
        index: stored shards by key, which a ``ShardFinder`` has found, each with as many dims as its target.
        targets: region of each tensor needed on this rank; an empty region needs no read.
        prefix: prefix of the keys in the reads.

    Raises:
        CorruptCheckpointError: a target that the stored shards do not cover exactly once.
    """
    reads: list[ReadItem] = []
    plans: dict[Any, list[_RelativeRead]] = {}
    for key, target in targets.items():
        shards = index.get(key, ())
        # Most tensors are stored and sharded like many others, and their reads relative to the shards are the same.
        layout_key = (target, *[id(kind) for _, _, kind in shards])
        plan = plans.get(layout_key)
        if plan is None:
            plan = plans[layout_key] = _plan_tensor(key, shards, target)
        for shard, begin, end, block, source, into, offset in plan:
            file, start, _ = shards[shard]
            reads.append(ReadItem(file, start + begin, start + end, prefix + key, block, source, into, offset))
    reads.sort(key=itemgetter(0, 1))
    return reads


def check_cover(key: str, shards: Sequence[StoredShard], shape: tuple[int, ...]) -> None:
    """Raise if the shards do not cover a tensor of this shape exactly once.

    Raises:
        CorruptCheckpointError: two shards that overlap, or elements that no shard holds.
    """
    _plan_tensor(key, shards, full_region(shape))


_RelativeRead: TypeAlias = tuple[int, int, int, tuple[int, ...], tuple[Span, ...], tuple[Span, ...], int | None]
"""Bytes relative to a stored shard, which has this index among the tensor's shards; the other fields are as in ``ReadItem``."""


def _plan_tensor(key: str, shards: Sequence[StoredShard], target: Region) -> list[_RelativeRead]:
    """Plan the reads from the shards of one tensor."""
    needed = prod(target.size)
    if not needed:
        return []
    begins, ends = target.offset, tuple(begin + size for begin, size in zip(target.offset, target.size, strict=True))
    parts = []
    for shard, (_, _, kind) in enumerate(shards):
        low = tuple(map(max, kind.offset, begins))
        high = tuple(min(begin + size, end) for begin, size, end in zip(kind.offset, kind.size, ends, strict=True))
        if all(map(int.__lt__, low, high)):
            parts.append(_Intersection(shard, low, high))
    overlap = _find_overlap(parts) if len(parts) > 1 else None
    if overlap is not None:
        raise CorruptCheckpointError(f"{key}: two stored shards overlap at {overlap}")
    # Disjoint parts inside a target cover the target if their sizes add up to its size.
    stored = sum(prod(map(int.__sub__, high, low)) for _, low, high in parts)
    if stored != needed:
        raise CorruptCheckpointError(f"{key}: stored shards hold {stored} of the {needed} elements needed")
    return [read for intersection in parts for read in _byte_ranges(shards[intersection.shard].kind, intersection, target)]


class _Intersection(NamedTuple):
    """Intersection ``[low, high)`` of a target and the stored shard of this index, in coordinates of the global tensor."""

    shard: int
    low: tuple[int, ...]
    high: tuple[int, ...]


def _find_overlap(parts: Sequence[_Intersection]) -> tuple[int, ...] | None:
    """Return an element that two parts share, or None.

    Parts are first split into groups that are disjoint along a dim, and each group is checked separately. Parts of a grid, and
    all parts that come from repeated bisection, split into single parts. Pairs are compared only if no dim splits the parts.
    """
    for dim in range(len(parts[0].low)):
        groups = _split_disjoint(parts, dim)
        if len(groups) > 1:
            overlaps = (_find_overlap(group) for group in groups if len(group) > 1)
            return next((element for element in overlaps if element is not None), None)
    for number, (_, low, high) in enumerate(parts):
        for _, other_low, other_high in parts[number + 1 :]:
            element = tuple(map(max, low, other_low))
            if all(map(int.__lt__, element, map(min, high, other_high))):
                return element
    return None


def _split_disjoint(parts: Sequence[_Intersection], dim: int) -> list[list[_Intersection]]:
    """Split the parts into groups that are disjoint along ``dim``."""
    groups: list[list[_Intersection]] = []
    reach = -1
    for intersection in sorted(parts, key=lambda intersection: intersection.low[dim]):
        if intersection.low[dim] >= reach:
            groups.append([])
        groups[-1].append(intersection)
        reach = max(reach, intersection.high[dim])
    return groups


def _byte_ranges(kind: ShardKind, intersection: _Intersection, target: Region) -> Iterator[_RelativeRead]:
    """Split the rows of an intersection into reads of whole rows: one if contiguous, else of ``MAX_STRIDED_READ_BYTES``."""
    shard, low, high = intersection
    if not kind.size:
        yield shard, 0, kind.nbytes, (), (), (), 0
        return
    row_bytes = prod(kind.size[1:]) * DTYPES[kind.dtype].itemsize
    inner = tuple((a - base, b - base) for a, b, base in zip(low[1:], high[1:], kind.offset[1:], strict=True))
    outer = tuple((a - base, b - base) for a, b, base in zip(low[1:], high[1:], target.offset[1:], strict=True))
    contiguous = kind.size[1:] == target.size[1:] and kind.offset[1:] == target.offset[1:]
    run = high[0] - low[0] if contiguous else max(1, MAX_STRIDED_READ_BYTES // row_bytes)
    for row in range(low[0], high[0], run):
        rows = min(run, high[0] - row)
        begin, into = (row - kind.offset[0]) * row_bytes, row - target.offset[0]
        source, to = ((0, rows), *inner), ((into, into + rows), *outer)
        offset = into * row_bytes if contiguous else None
        yield shard, begin, begin + rows * row_bytes, (rows, *kind.size[1:]), source, to, offset


class TensorRead(NamedTuple):
    """Reads that fill a tensor of this dtype and size."""

    dtype: str
    size: tuple[int, ...]
    reads: list[ReadItem]

    @property
    def nbytes(self) -> int:
        """Number of bytes to read."""
        return sum(read.end - read.begin for read in self.reads)


def plan_tensors(
    find_shards: ShardFinder, regions: Mapping[str, Region], refs: Mapping[str, TensorRef], prefix: str = ""
) -> dict[str, TensorRead]:
    """Plan the reads of the region of each tensor, by key after ``prefix``. An empty region has no reads.

    Raises:
        CorruptCheckpointError: a region that the stored shards do not cover exactly once.
    """
    tensors = {prefix + key: TensorRead(refs[key].dtype, region.size, []) for key, region in regions.items()}
    for read in plan_reads(find_shards(regions), regions, prefix):
        tensors[read.key].reads.append(read)
    return tensors


class Segment(NamedTuple):
    """Bytes ``[begin, end)`` of a read that are inside of one fetch."""

    begin: int
    end: int
    read: ReadItem


class Fetch(NamedTuple):
    """Bytes ``[begin, end)`` of a file that are fetched together, the numbers of their blocks, and the segments in them."""

    begin: int
    end: int
    blocks: range
    segments: list[Segment]


def plan_fetches(
    blocks: Blocks | None, reads: Sequence[ReadItem], verify: Iterable[Span] = (), *, is_remote: bool
) -> list[Fetch]:
    """Plan the fetches of a file, so that the needed blocks are fetched completely and once, and split the reads by fetch.

    Adjacent blocks are fetched together, at most ``CHUNK_BYTES``. An example with a limit of two blocks::

        blocks     |   0   |   1   |   2   |   3   |   4   |
        reads         aa     bbbbbbbbbbbb             cc
        fetches    [---------------[-------]       [-------]
        segments      aa     bbbbbb bbbbbb            cc

    Args:
        blocks: blocks of the file; None for a file without digests, which is fetched in chunks.
        reads: reads from the file in the order of their begin, without overlaps.
        verify: byte ranges whose blocks are fetched to be verified only.
        is_remote: if True, a gap between blocks is fetched rather than a further request made.
    """
    spans = sorted([*((read.begin, read.end) for read in reads), *verify])
    if blocks is None:
        size = layout.CHUNK_BYTES
        chunks = sorted({chunk for begin, end in spans if begin < end for chunk in range(begin // size, -(-end // size))})
        fetches = [Fetch(chunk * size, (chunk + 1) * size, range(0), []) for chunk in chunks]
    else:
        fetches = [
            Fetch(blocks.begin_of(numbers.start), blocks.ends[numbers.stop - 1], numbers, [])
            for needed in _needed_blocks(blocks, spans, _MAX_REMOTE_GAP_BYTES if is_remote else 0)
            for numbers in split_blocks(blocks, needed)
        ]
    number = 0
    for read in reads:
        begin = read.begin
        while begin < read.end:
            while fetches[number].end <= begin:
                number += 1
            end = min(read.end, fetches[number].end)
            fetches[number].segments.append(Segment(begin, end, read))
            begin = end
    return fetches


def _needed_blocks(blocks: Blocks, spans: Iterable[Span], gap: int) -> list[range]:
    """Return the blocks that contain the spans, as ranges with more than ``gap`` bytes between them."""
    needed: list[range] = []
    reach = -1
    for begin, end in spans:
        # Most spans are small, and in the block of the span before.
        if end <= reach or begin == end:
            continue
        numbers = blocks.numbers_of(begin, end)
        if needed and blocks.begin_of(numbers.start) - reach <= gap:
            needed[-1] = range(needed[-1].start, max(numbers.stop, needed[-1].stop))
        else:
            needed.append(numbers)
        reach = blocks.ends[needed[-1].stop - 1]
    return needed


def group_by_size(sizes: Mapping[str, int], *, limit: int) -> Iterator[list[str]]:
    """Split the names in order into groups of at most ``limit`` bytes. A larger tensor is alone in its group."""
    group: list[str] = []
    remaining = limit
    for name, size in sizes.items():
        if group and size > remaining:
            yield group
            group, remaining = [], limit
        group.append(name)
        remaining -= size
    if group:
        yield group
