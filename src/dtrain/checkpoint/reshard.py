"""Who writes which copy, and which bytes a rank reads: pure functions of boxes, for any world size on either side."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, repeat
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from dtrain.checkpoint.layout import DTYPES
from dtrain.checkpoint.rank_index import TensorShardEntry
from dtrain.errors import CorruptCheckpointError

MAX_STRIDED_READ_BYTES = (
    2**20
)  # of one read that is not straight, at most, unless a single row is larger: they need memory of their own
Span = tuple[int, int]
_LINEAR_SEARCH_MAX = 8  # so many boxes are looked at one by one


class Region(NamedTuple):
    """A box of a global tensor: ``[offset, offset + size)`` in each dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


def full_region(shape: tuple[int, ...]) -> Region:
    """The region that is all of a tensor."""
    return Region(offset=(0,) * len(shape), size=shape)


class ReadItem(NamedTuple):
    """Bytes ``[begin, end)`` of a file: ``block`` whole rows of a stored box, part of which is wanted.

    ``block[source]`` goes to ``target`` of the local tensor ``key``; both are one ``(start, stop)`` per dim. ``contiguous`` says
    that these bytes lie in the local tensor one after the other, too. (A tuple, because there is one for every tensor.)
    """

    file: int
    begin: int
    end: int
    key: str
    block: tuple[int, ...]
    source: tuple[Span, ...]
    target: tuple[Span, ...]
    contiguous: bool


class StoredShard(NamedTuple):
    """An entry, and the number of the file it is in: in a checkpoint of ours, the rank that wrote it."""

    file: int
    entry: TensorShardEntry


def assign_writers(tensors: Iterable[tuple[str, int, int]]) -> dict[str, int]:
    """Which copy of each tensor is stored: the one that has least to write so far, in the order given.

    Args:
        tensors: ``(key, bytes, copies)``, the same on all ranks.

    Returns:
        The number of the copy, below ``copies``, by key.
    """
    loads: dict[int, list[int]] = {}
    chosen = {}
    for key, nbytes, copies in tensors:
        load = loads.setdefault(copies, [0] * copies)
        chosen[key] = load.index(min(load))
        load[chosen[key]] += nbytes
    return chosen


def index_shards(by_file: Sequence[Sequence[TensorShardEntry]]) -> dict[str, list[StoredShard]]:
    """All entries by key, those of one tensor in order of their offset."""
    found: dict[str, list[StoredShard]] = {}
    several: set[str] = set()
    for file, entries in enumerate(by_file):
        for box in map(StoredShard, repeat(file), entries):
            key = box.entry.key
            if key in found:
                found[key].append(box)
                several.add(key)
            else:
                found[key] = [box]
    for key in several:
        found[key].sort(key=lambda box: box.entry.offset)
    return found


def plan_reads(index: Mapping[str, Sequence[StoredShard]], targets: Mapping[str, Region]) -> list[ReadItem]:
    """What to read to fill the targets, in the order of the files.

    Of a tensor's boxes, those that a target may touch are found by bisection, and whether they cover it exactly once is told
    from their order: the work grows with the boxes that are there, not with the pairs of them.

    Args:
        index: the stored boxes by key, in order of their offset, each with as many dims as its target.
        targets: the region of each tensor that is wanted here; an empty one needs nothing.

    Raises:
        CorruptCheckpointError: a target that the stored boxes do not cover exactly once.
    """
    reads: list[ReadItem] = []
    plans: dict[Any, list[_RelativeRead]] = {}
    for key, target in targets.items():
        boxes = index.get(key, ())
        # Most tensors are stored like many others, and are to be cut like them: what to read of their boxes is the same.
        alike = (target, *[(entry.dtype, entry.offset, entry.size) for _, entry in boxes])
        plan = plans.get(alike)
        if plan is None:
            plan = plans[alike] = _plan_tensor(key, boxes, target)
        for at, begin, end, block, source, into, straight in plan:
            file, entry = boxes[at]
            reads.append(ReadItem(file, entry.begin + begin, entry.begin + end, key, block, source, into, straight))
    reads.sort(key=itemgetter(0, 1))
    return reads


_RelativeRead: TypeAlias = tuple[int, int, int, tuple[int, ...], tuple[Span, ...], tuple[Span, ...], bool]
"""Bytes of a stored box, which has this place among the tensor's; the rest is as in ``Read``."""


def _plan_tensor(key: str, boxes: Sequence[StoredShard], target: Region) -> list[_RelativeRead]:
    """What to read of the boxes of one tensor."""
    wanted = prod(target.size)
    if not wanted:
        return []
    parts = _intersections(boxes, target)
    _check_cover(key, parts, wanted)
    return [stretch for part in parts for stretch in _byte_ranges(boxes[part.at].entry, part, target)]


class _Intersection(NamedTuple):
    """What the stored box at this place among the tensor's has of a target: ``[low, high)`` of the global tensor."""

    at: int
    low: tuple[int, ...]
    high: tuple[int, ...]


def _intersections(boxes: Sequence[StoredShard], target: Region) -> list[_Intersection]:
    begins, ends = target.offset, tuple(at + n for at, n in zip(target.offset, target.size, strict=True))
    found = []
    for at in _candidates(boxes, begins, ends):
        entry = boxes[at].entry
        low = tuple(map(max, entry.offset, begins))
        high = tuple(min(at + n, end) for at, n, end in zip(entry.offset, entry.size, ends, strict=True))
        if all(map(int.__lt__, low, high)):
            found.append(_Intersection(at, low, high))
    return found


def _candidates(boxes: Sequence[StoredShard], begins: tuple[int, ...], ends: tuple[int, ...]) -> range:
    """The places of the boxes that may touch ``[begins, ends)``: those that do along the first dim in which they differ.

    In order of their offset, they are in order along that dim.
    """
    if len(boxes) <= _LINEAR_SEARCH_MAX:
        return range(len(boxes))
    differing = (dim for dim, (a, b) in enumerate(zip(boxes[0].entry.offset, boxes[-1].entry.offset, strict=True)) if a != b)
    dim = next(differing, None)
    if dim is None:
        return range(len(boxes))
    stop = bisect_left(boxes, ends[dim], key=lambda box: box.entry.offset[dim])
    # Where boxes lie inside others, their ends are not in order; the furthest end so far is.
    reach = list(accumulate((box.entry.offset[dim] + box.entry.size[dim] for box in boxes[:stop]), max))
    return range(bisect_right(reach, begins[dim]), stop)


def _check_cover(key: str, parts: Sequence[_Intersection], wanted: int) -> None:
    """Disjoint parts inside a target cover it if their sizes add up to its own."""
    twice = _find_overlap(parts) if len(parts) > 1 else None
    if twice is not None:
        raise CorruptCheckpointError(f"{key}: two stored boxes overlap at {twice}")
    have = sum(prod(map(int.__sub__, high, low)) for _, low, high in parts)
    if have != wanted:
        raise CorruptCheckpointError(f"{key}: stored boxes hold {have} of the {wanted} elements needed")


def _find_overlap(parts: Sequence[_Intersection]) -> tuple[int, ...] | None:
    """Where two of the parts share an element, or None.

    Parts that fall into groups with a cut between them along some dim are looked at group by group; a grid, and whatever else
    comes from cutting boxes in two, falls apart into single ones. Only where no cut goes through are pairs compared.
    """
    for dim in range(len(parts[0].low)):
        groups = _split_disjoint(parts, dim)
        if len(groups) > 1:
            found = (_find_overlap(group) for group in groups if len(group) > 1)
            return next((at for at in found if at is not None), None)
    for number, (_, low, high) in enumerate(parts):
        for _, other_low, other_high in parts[number + 1 :]:
            at = tuple(map(max, low, other_low))
            if all(map(int.__lt__, at, map(min, high, other_high))):
                return at
    return None


def _split_disjoint(parts: Sequence[_Intersection], dim: int) -> list[list[_Intersection]]:
    """The parts in groups that do not meet along ``dim``."""
    groups: list[list[_Intersection]] = []
    reach = -1
    for part in sorted(parts, key=lambda part: part.low[dim]):
        if part.low[dim] >= reach:
            groups.append([])
        groups[-1].append(part)
        reach = max(reach, part.high[dim])
    return groups


def _byte_ranges(entry: TensorShardEntry, part: _Intersection, target: Region) -> Iterator[_RelativeRead]:
    """The rows of the box that ``part`` touches, straight in one, or else in runs of ``READ_BYTES``; whole rows are read."""
    at, low, high = part
    if not entry.size:
        yield at, 0, entry.end - entry.begin, (), (), (), True
        return
    row_bytes = prod(entry.size[1:]) * DTYPES[entry.dtype].itemsize
    inner = tuple((a - base, b - base) for a, b, base in zip(low[1:], high[1:], entry.offset[1:], strict=True))
    outer = tuple((a - base, b - base) for a, b, base in zip(low[1:], high[1:], target.offset[1:], strict=True))
    straight = entry.size[1:] == target.size[1:] and entry.offset[1:] == target.offset[1:]
    run = high[0] - low[0] if straight else max(1, MAX_STRIDED_READ_BYTES // row_bytes)
    for row in range(low[0], high[0], run):
        rows = min(run, high[0] - row)
        begin, into = (row - entry.offset[0]) * row_bytes, row - target.offset[0]
        source, to = ((0, rows), *inner), ((into, into + rows), *outer)
        yield at, begin, begin + rows * row_bytes, (rows, *entry.size[1:]), source, to, straight
