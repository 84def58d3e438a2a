"""Who writes which copy, and which bytes a rank reads: pure functions of boxes, for any world size on either side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from dtrain.checkpoint.layout import DTYPES, Entry
from dtrain.errors import DamagedCheckpointError

READ_BYTES = 32 * 2**20  # of one read at most, unless a single row is larger
Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A box of a global tensor: ``[offset, offset + size)`` in each dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Bytes ``[begin, end)`` of a file: ``block`` whole rows of a stored box, part of which is wanted.

    ``block[source]`` goes to ``target`` of the local tensor ``key``; both are one ``(start, stop)`` per dim.
    """

    file: int
    begin: int
    end: int
    key: str
    block: tuple[int, ...]
    source: tuple[Span, ...]
    target: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBox:
    """An entry, and the number of the file it is in: in a checkpoint of ours, the rank that wrote it."""

    file: int
    entry: Entry


def choose_writers(tensors: Iterable[tuple[str, int, int]]) -> dict[str, int]:
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


def stored_boxes(by_file: Sequence[Sequence[Entry]]) -> dict[str, list[StoredBox]]:
    """All entries by key, those of one tensor in order of their offset."""
    found: dict[str, list[StoredBox]] = defaultdict(list)
    for file, entries in enumerate(by_file):
        for entry in entries:
            found[entry.key].append(StoredBox(file=file, entry=entry))
    for boxes in found.values():
        boxes.sort(key=lambda box: box.entry.offset)
    return dict(found)


def plan_reads(index: Mapping[str, Sequence[StoredBox]], targets: Mapping[str, Region]) -> list[Read]:
    """What to read to fill the targets, in the order of the files.

    Args:
        index: the stored boxes by key, in order of their offset.
        targets: the region of each tensor that is wanted here; an empty one needs nothing.

    Raises:
        DamagedCheckpointError: a target that the stored boxes do not cover exactly once.
    """
    reads: list[Read] = []
    for key, target in targets.items():
        wanted = prod(target.size)
        if wanted:
            parts = [(box, part) for box in index.get(key, ()) if (part := _overlap(box.entry, target)) is not None]
            _check_cover(key, [part for _, part in parts], wanted)
            for box, part in parts:
                reads.extend(_reads(box, part, target))
    return sorted(reads, key=lambda read: (read.file, read.begin))


def _overlap(entry: Entry, target: Region) -> Region | None:
    """The part of the target that the box holds, or None. The shapes have as many dims."""
    low = tuple(map(max, entry.offset, target.offset))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(entry.offset, entry.size, target.offset, target.size, strict=True))
    if any(start >= stop for start, stop in zip(low, high, strict=True)):
        return None
    return Region(offset=low, size=tuple(stop - start for start, stop in zip(low, high, strict=True)))


def _check_cover(key: str, parts: Sequence[Region], wanted: int) -> None:
    """Disjoint parts inside a target cover it if their sizes add up to its own."""
    for at, part in enumerate(parts):
        for other in parts[at + 1 :]:
            if not part.size or other.offset[0] >= part.offset[0] + part.size[0]:
                break  # in order of the first offset: no later one overlaps either
            if _meet(part, other):
                raise DamagedCheckpointError(f"{key}: two stored boxes overlap at {other.offset}")
    have = sum(prod(part.size) for part in parts)
    if have != wanted:
        raise DamagedCheckpointError(f"{key}: stored boxes hold {have} of the {wanted} elements needed")


def _meet(a: Region, b: Region) -> bool:
    return all(x < y + m and y < x + n for x, n, y, m in zip(a.offset, a.size, b.offset, b.size, strict=True))


def _reads(box: StoredBox, part: Region, target: Region) -> Iterable[Read]:
    """The rows of the box that ``part`` touches, in runs of at most ``READ_BYTES``; whole rows are read."""
    entry = box.entry
    if not entry.size:
        yield Read(file=box.file, begin=entry.begin, end=entry.end, key=entry.key, block=(), source=(), target=())
        return
    row_bytes = prod(entry.size[1:]) * DTYPES[entry.dtype].itemsize
    inner = tuple((at - base, at - base + n) for at, base, n in zip(part.offset, entry.offset, part.size, strict=True))[1:]
    outer = tuple((at - base, at - base + n) for at, base, n in zip(part.offset, target.offset, part.size, strict=True))[1:]
    run = max(1, READ_BYTES // row_bytes)
    stop = part.offset[0] + part.size[0]
    for row in range(part.offset[0], stop, run):
        rows = min(run, stop - row)
        begin = entry.begin + (row - entry.offset[0]) * row_bytes
        yield Read(
            file=box.file,
            begin=begin,
            end=begin + rows * row_bytes,
            key=entry.key,
            block=(rows, *entry.size[1:]),
            source=((0, rows), *inner),
            target=((row - target.offset[0], row - target.offset[0] + rows), *outer),
        )
