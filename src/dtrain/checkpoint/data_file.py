"""Lay out a rank's tensors as a safetensors file, write the file with block digests, and verify every read.

The format: 8 bytes with the length of the header, the header (JSON: name -> dtype, shape, byte range), the data without
gaps. Tensors are in the order of falling item size, so that each is aligned. Of one item size, small tensors come last, in the
order of falling size.

A save that must not wait for the disk copies the tensors first: ``MemoryPool`` owns reusable host memory for the copies.

Each block of a file has a digest, and is read as a whole. A large tensor has blocks of its own, of whole rows, so that a rank
that needs some of its rows reads few others.

Source: the format section of the safetensors README (huggingface/safetensors).
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple, TypeAlias

import torch
import xxhash
from torch import Tensor

from dtrain import storage
from dtrain.checkpoint.layout import CHUNK_BYTES, DTYPES, Blocks
from dtrain.device import is_accelerator
from dtrain.errors import CorruptCheckpointError
from dtrain.storage import AnyPath, Buffer


class InMemoryFile:
    """File whose content is in memory."""

    is_remote = False

    def __init__(self, content: bytes) -> None:
        self._content, self.size = content, len(content)

    def read_into(self, begin: int, out: memoryview) -> int:
        """Read into ``out`` from byte ``begin`` on. Return the number of bytes."""
        content = self._content[begin : begin + len(out)]
        out[: len(content)] = content
        return len(content)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class OpenedFile:
    """Open data file; ``blocks`` is None for a file without digests."""

    file: storage.FileReader | InMemoryFile
    name: str
    blocks: Blocks | None


FileOpener: TypeAlias = Callable[[int], AbstractContextManager[OpenedFile]]
"""Function that opens the file of a number."""


def read_exactly(file: storage.FileReader | InMemoryFile, name: str, begin: int, out: memoryview) -> None:
    """Fill ``out`` with the bytes of a file from ``begin`` on. Raise CorruptCheckpointError if the file is too short."""
    count = file.read_into(begin, out)
    if count != len(out):
        raise CorruptCheckpointError(f"{name}: must have at least {begin + len(out)} bytes, ends at byte {begin + count}")


def split_blocks(blocks: Blocks, numbers: range) -> Iterator[range]:
    """Split adjacent blocks into ranges of at most ``CHUNK_BYTES``."""
    first = numbers.start
    while first < numbers.stop:
        stop = min(max(bisect_right(blocks.ends, blocks.begin_of(first) + CHUNK_BYTES), first + 1), numbers.stop)
        yield range(first, stop)
        first = stop


class BlockDigester:
    """Digester of adjacent blocks of a file, whose bytes come in pieces of any size. ``digests`` are hex digests.

    Args:
        ends: the byte after each block of the file.
        first: number of the first block.
    """

    def __init__(self, ends: Sequence[int], first: int = 0) -> None:
        self.digests: list[str] = []
        self._ends, self._number, self._offset = ends, first, ends[first - 1] if first else 0
        self._state: xxhash.xxh3_128 | None = None

    def update(self, data: Buffer) -> None:
        """Add the next bytes."""
        rest = memoryview(data).cast("B")
        while rest:
            end = self._ends[self._number]
            piece, rest = rest[: end - self._offset], rest[end - self._offset :]
            self._offset += len(piece)
            if self._offset == end and self._state is None:
                # Most blocks come as a whole.
                self.digests.append(xxhash.xxh3_128_hexdigest(piece))
                self._number += 1
                continue
            self._state = xxhash.xxh3_128() if self._state is None else self._state
            self._state.update(piece)
            if self._offset == end:
                self.digests.append(self._state.hexdigest())
                self._state, self._number = None, self._number + 1


def verify_pieces(name: str, blocks: Blocks, numbers: range, pieces: Iterable[memoryview]) -> None:
    """Compare adjacent blocks with their digests, while their bytes come in pieces of any size.

    Raises:
        CorruptCheckpointError: a block that does not match its digest.
    """
    digester = BlockDigester(blocks.ends, numbers.start)
    for piece in pieces:
        digester.update(piece)
    for number, digest in zip(numbers, digester.digests, strict=True):
        if digest != blocks.digests[32 * number : 32 * number + 32]:
            raise CorruptCheckpointError(f"{name}: bytes from {blocks.begin_of(number)} on do not match their digest")


def verify_file(opened: OpenedFile, on_bytes: Callable[[int], object] = lambda _: None) -> None:
    """Verify every block of a file. Memory is limited to one chunk.

    Args:
        opened: file with digests.
        on_bytes: called with the number of bytes after each chunk.

    Raises:
        CorruptCheckpointError: a block that does not match its digest.
    """
    blocks = opened.blocks
    assert blocks is not None, "only files with digests can be verified"
    buffer = memoryview(bytearray(min(CHUNK_BYTES, opened.file.size)))
    for numbers in split_blocks(blocks, range(len(blocks.ends))):
        begin, end = blocks.begin_of(numbers.start), blocks.ends[numbers.stop - 1]
        view = buffer[: end - begin]
        read_exactly(opened.file, opened.name, begin, view)
        verify_pieces(opened.name, blocks, numbers, [view])
        on_bytes(end - begin)


PAGE_BYTES = 4096
# Smaller tensors are gathered into one buffer, which saves a call for each of them.
SMALL_BYTES = 64 * 2**10
# A gathered group is a copy, so its size is limited.
_MAX_GROUP_BYTES = 32 * 2**20


class TensorSlot(NamedTuple):
    """Slot of a tensor in a file: name, safetensors dtype name, shape, and size of the data in bytes."""

    key: str
    dtype: str
    size: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, key: str, dtype: str, size: tuple[int, ...]) -> TensorSlot:
        """Compute the size in bytes of a slot."""
        return cls(key, dtype, size, prod(size) * DTYPES[dtype].itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """Layout of a file: bytes of the header, slots in the order of the file, byte range of each slot, and size."""

    header: bytes
    slots: tuple[TensorSlot, ...]
    ranges: Mapping[str, tuple[int, int]]
    size: int


def plan_file_layout(slots: Iterable[TensorSlot], *, with_header: bool = True) -> FileLayout:
    """Lay out a file that holds ``slots``; without header, only their data."""
    ordered = tuple(
        sorted(slots, key=lambda slot: (-DTYPES[slot.dtype].itemsize, -min(slot.nbytes, SMALL_BYTES + 1), slot.key))
    )
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for slot in ordered:
        begin, end = end, end + slot.nbytes
        offsets[slot.key] = (begin, end)
        head[slot.key] = {"dtype": slot.dtype, "shape": slot.size, "data_offsets": (begin, end)}
    text = json.dumps(head, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    header = len(text).to_bytes(8, "little") + text if with_header else b""
    return FileLayout(
        header=header,
        slots=ordered,
        ranges={key: (len(header) + begin, len(header) + end) for key, (begin, end) in offsets.items()},
        size=len(header) + end,
    )


# A tensor of more bytes is divided into blocks of its own.
_SHARED_BLOCK_BYTES = 16 * 2**10
# A rank that needs a part of a tensor reads at most about this share of it too much, at each end.
_BLOCKS_PER_TENSOR = 16
# The digests of smaller blocks would be too many.
_MIN_BLOCK_BYTES = 8 * 2**10


def plan_blocks(layout: FileLayout) -> list[int]:
    """Return the byte after each block of a file.

    The header belongs to the first block, as long as a block has room for both. Small tensors share blocks.
    """
    ends: list[int] = []
    begin = 0
    for slot in layout.slots:
        low, high = layout.ranges[slot.key]
        if slot.nbytes <= _SHARED_BLOCK_BYTES:
            if begin < low and high - begin > (len(layout.header) if not ends else 0) + _SHARED_BLOCK_BYTES:
                _end_block(ends, begin, low)
                begin = low
            continue
        if begin < low and low > len(layout.header):
            _end_block(ends, begin, low)
        # Whole rows, unless a row is longer than a block may be.
        row = slot.nbytes // slot.size[0]
        wanted = max(_MIN_BLOCK_BYTES, slot.nbytes // _BLOCKS_PER_TENSOR)
        size = min(max(1, wanted // row) * row, CHUNK_BYTES)
        for end in (*range(low + size, high, size), high):
            _end_block(ends, ends[-1] if ends else 0, end)
        begin = high
    if begin < layout.size:
        _end_block(ends, begin, layout.size)
    return ends


def _end_block(ends: list[int], begin: int, end: int) -> None:
    """Add a block, or several if it is too large."""
    ends += [*range(begin + CHUNK_BYTES, end, CHUNK_BYTES), end]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SerializedFile:
    """Content of a file to write: consecutive buffers of host memory, which must not change until the file is written."""

    buffers: Sequence[Buffer]
    starts: Sequence[int]
    size: int

    @classmethod
    def from_buffers(cls, buffers: Iterable[Buffer]) -> SerializedFile:
        """Serialize the buffers; empty buffers are skipped."""
        filled = [buffer for buffer in buffers if len(buffer)]
        ends = list(accumulate(map(len, filled)))
        return cls(filled, [0, *ends[:-1]], ends[-1] if ends else 0)

    def views(self, begin: int, end: int) -> list[memoryview]:
        """Return the bytes ``[begin, end)`` as views."""
        views, number = [], bisect_right(self.starts, begin) - 1
        while begin < end:
            low = begin - self.starts[number]
            view = memoryview(self.buffers[number])[low : low + end - begin]
            views.append(view)
            begin, number = begin + len(view), number + 1
        return views


def write_data_file(
    path: AnyPath,
    serialized: SerializedFile,
    ends: list[int],
    *,
    threads: int = 1,
    on_part: Callable[[], object] = lambda: None,
) -> Blocks:
    """Write a new file in chunks. The data are on the disk when the function returns.

    Args:
        path: a name that does not exist.
        serialized: content of the file.
        ends: the byte after each block; see ``plan_blocks``.
        threads: number of threads that write and digest.
        on_part: called for every chunk, by the thread that writes the chunk.

    Returns:
        The blocks with their digests.
    """
    chunks = [min(CHUNK_BYTES, serialized.size - begin) for begin in range(0, serialized.size, CHUNK_BYTES)]
    digests = [""] * len(chunks)

    def part_of(number: int) -> list[memoryview]:
        on_part()
        begin, end = number * CHUNK_BYTES, number * CHUNK_BYTES + chunks[number]
        # The thread that writes a chunk digests the blocks that end in it.
        digests[number] = _digest_blocks(serialized, ends, range(bisect_right(ends, begin), bisect_right(ends, end)))
        return serialized.views(begin, end)

    storage.write_parts(path, chunks, part_of, threads=threads)
    return Blocks(ends, "".join(digests))


def digest_blocks(serialized: SerializedFile, ends: list[int]) -> Blocks:
    """Return the blocks that ``write_data_file`` would return, without writing."""
    return Blocks(ends, _digest_blocks(serialized, ends, range(len(ends))))


def _digest_blocks(serialized: SerializedFile, ends: list[int], numbers: range) -> str:
    """Return the hex digests of blocks."""
    if not numbers:
        return ""
    digester = BlockDigester(ends, numbers.start)
    for view in serialized.views(ends[numbers.start - 1] if numbers.start else 0, ends[numbers.stop - 1]):
        digester.update(view)
    return "".join(digester.digests)


def group_slots(layout: FileLayout, tensors: Mapping[str, Tensor]) -> Iterator[tuple[TensorSlot, ...]]:
    """Group the slots of a file: a large slot alone, small slots of one dtype and device together."""
    group: list[TensorSlot] = []
    group_bytes, group_kind = 0, None
    for slot in layout.slots:
        kind = (slot.dtype, tensors[slot.key].device)
        large = slot.nbytes > SMALL_BYTES
        if group and (large or kind != group_kind or group_bytes >= _MAX_GROUP_BYTES):
            yield tuple(group)
            group, group_bytes = [], 0
        if large:
            yield (slot,)
            continue
        group.append(slot)
        group_bytes, group_kind = group_bytes + slot.nbytes, kind
    if group:
        yield tuple(group)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Flatten tensors of one dtype and device into one tensor; a single contiguous tensor shares its memory."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def as_bytes(*tensors: Tensor) -> memoryview:
    """Return the data of plain tensors of one dtype and device in row-major order.

    A single contiguous CPU tensor shares its memory.
    """
    return memoryview(flatten(tensors).cpu().resolve_neg().view(torch.uint8).numpy().data)


def fill_staging_(memory: Tensor, layout: FileLayout, tensors: Mapping[str, Tensor]) -> SerializedFile:
    """Copy a file into staging memory. Copies from a GPU are enqueued on its current stream and not awaited.

    The caller must disable autograd.

    Mutates: ``memory``.
    """
    content = memory[: layout.size].numpy().data
    content[: len(layout.header)] = layout.header
    for group in group_slots(layout, tensors):
        sources = [tensors[slot.key] for slot in group]
        begin, end = layout.ranges[group[0].key][0], layout.ranges[group[-1].key][1]
        target = memory[begin:end].view(DTYPES[group[0].dtype])
        if len(sources) > 1 and sources[0].device == target.device:
            torch.cat([tensor.reshape(-1) for tensor in sources], out=target)
        else:
            target.copy_(flatten(sources), non_blocking=True)
    return SerializedFile.from_buffers([content])


class MemoryPool:
    """Pool of reusable host memory, because memory that threads free often does not return to the system."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def acquire(self, size: int, *, pinned: bool = False) -> Tensor:
        """Return unused memory of at least ``size`` bytes, to be released; pinned memory for copies from a GPU."""
        with self._lock:
            fitting = [memory for memory in self._free if len(memory) >= size and memory.is_pinned() == pinned]
            if fitting:
                smallest = min(fitting, key=len)
                self._free = [memory for memory in self._free if memory is not smallest]
                return smallest
            if self._free:
                # The memory is too small for this caller, so only the new memory is kept.
                self._free.pop()
        # The chunks of a file are written to the disk from page-aligned memory without another copy.
        memory = torch.empty(size + PAGE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        begin = -memory.data_ptr() % PAGE_BYTES
        return memory[begin : begin + size]

    def release(self, memory: Tensor) -> None:
        """Return memory to the pool."""
        with self._lock:
            self._free.append(memory)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class StagedFiles:
    """Contents of a rank's files in memory, and the staging memory to release after the save.

    Args:
        files: contents by file name.
        copy_events: events after the copies from GPUs.
        memory: staging memory of ``pool``.
    """

    files: Mapping[str, SerializedFile]
    copy_events: Sequence[torch.Event]
    memory: Sequence[Tensor]
    pool: MemoryPool

    def wait(self) -> None:
        """Wait for the copies from GPUs."""
        for event in self.copy_events:
            event.synchronize()

    def release(self) -> None:
        """Return the staging memory to its pool."""
        for memory in self.memory:
            self.pool.release(memory)


def stage_files(
    layouts: Mapping[str, FileLayout], tensors: Mapping[str, Tensor], pool: MemoryPool, *, copy: bool
) -> StagedFiles:
    """Serialize a rank's files. Tensors are copied if ``copy`` is True, or if they are not on the CPU.

    Args:
        layouts: layout of each file by name.
        tensors: tensors of all files by key.
        pool: pool that owns the memory of the copies.
        copy: if True, tensors on the CPU are copied as well.
    """
    accelerators = {tensor.device for tensor in tensors.values() if not tensor.is_cpu and is_accelerator(tensor.device)}
    if not copy and not accelerators:
        files = {}
        for name, layout in layouts.items():
            buffers = (as_bytes(*(tensors[slot.key] for slot in group)) for group in group_slots(layout, tensors))
            files[name] = SerializedFile.from_buffers([layout.header, *buffers])
        return StagedFiles(files=files, copy_events=(), memory=(), pool=pool)
    memory = [pool.acquire(layout.size, pinned=bool(accelerators)) for layout in layouts.values()]
    files = {name: fill_staging_(m, layout, tensors) for m, (name, layout) in zip(memory, layouts.items(), strict=True)}
    # The copies are in the order of each device's current stream.
    copy_events = [torch.accelerator.current_stream(device).record_event() for device in accelerators]
    return StagedFiles(files=files, copy_events=copy_events, memory=memory, pool=pool)
