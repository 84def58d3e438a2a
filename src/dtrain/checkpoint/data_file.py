"""Lay out a rank's tensors as a safetensors file, write the file with block digests, and verify every read.

The format: 8 bytes with the length of the header, the header (JSON: name -> dtype, shape, byte range), the data without
gaps. Tensors are in the order of falling item size, so that each is aligned. Of one item size, small tensors come last, in the
order of falling size.

A save that must not wait for the disk copies the tensors first: ``StagingPool`` owns reusable host memory for the copies.

Each block of a file has a digest, and is read as a whole. A large tensor has blocks of its own, of whole rows, so that a rank
that needs some of its rows reads few others.

Source: the format section of the safetensors README (huggingface/safetensors).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import NamedTuple, Protocol, TypeAlias

import torch
import xxhash
from torch import Tensor

from dtrain import storage
from dtrain.checkpoint.layout import CHUNK_BYTES, DTYPES, Blocks
from dtrain.device import is_accelerator
from dtrain.errors import CorruptCheckpointError
from dtrain.storage import AnyPath, Buffer


def digest_of(buffers: Iterable[Buffer]) -> bytes:
    """Return the digest of a block, whose bytes are the concatenated ``buffers``."""
    state = xxhash.xxh3_128()
    for buffer in buffers:
        state.update(buffer)
    return state.digest()


class RangeReader(Protocol):
    """Protocol of a file that is read by ranges."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    @property
    def is_remote(self) -> bool:
        """True if each read is a request to a server."""

    def read_into(self, begin: int, out: memoryview) -> int:
        """Read into ``out`` from byte ``begin`` on. Return the number of bytes."""


class ReadableFile(Protocol):
    """Protocol of an open data file; ``blocks`` is None for a file without digests."""

    @property
    def file(self) -> RangeReader:
        """Open file."""

    @property
    def name(self) -> str:
        """Name of the file for messages."""

    @property
    def blocks(self) -> Blocks | None:
        """Blocks and their digests."""


FileOpener: TypeAlias = Callable[[int], AbstractContextManager[ReadableFile]]
"""Function that opens the file of a number."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class OpenedFile:
    """Open data file; ``blocks`` is None for a file without digests."""

    file: RangeReader
    name: str
    blocks: Blocks | None


class InMemoryFile:
    """File whose content is in memory."""

    is_remote = False

    def __init__(self, content: bytes) -> None:
        self._content, self.size = content, len(content)

    def read_into(self, begin: int, out: memoryview) -> int:
        """Read into ``out`` from byte ``begin`` on. Return the number of bytes."""
        part = self._content[begin : begin + len(out)]
        out[: len(part)] = part
        return len(part)


def split_blocks(blocks: Blocks, numbers: range) -> Iterator[range]:
    """Split adjacent blocks into ranges of at most ``CHUNK_BYTES``."""
    first = numbers.start
    while first < numbers.stop:
        stop = min(max(bisect_right(blocks.ends, blocks.begin_of(first) + CHUNK_BYTES), first + 1), numbers.stop)
        yield range(first, stop)
        first = stop


def verify_pieces(name: str, blocks: Blocks, numbers: range, pieces: Iterable[memoryview]) -> None:
    """Compare adjacent blocks with their digests, while their bytes come in pieces of any size.

    Raises:
        CorruptCheckpointError: a block that does not match its digest.
    """
    number, state = numbers.start, None
    begin = blocks.begin_of(number)
    missing = blocks.ends[number] - begin if numbers else 0
    for piece in pieces:
        at = 0
        while at < len(piece):
            part = piece[at : at + missing]
            at, missing = at + len(part), missing - len(part)
            if missing or state is not None:
                state = xxhash.xxh3_128() if state is None else state
                state.update(part)
            if not missing:
                digest = xxhash.xxh3_128_hexdigest(part) if state is None else state.hexdigest()
                if digest != blocks.digests[32 * number : 32 * number + 32]:
                    raise CorruptCheckpointError(f"{name}: bytes from {begin} on do not match their digest")
                begin, state, number = blocks.ends[number], None, number + 1
                missing = blocks.ends[number] - begin if number < numbers.stop else 0


def verify_file(opened: ReadableFile, on_bytes: Callable[[int], object] = lambda _: None) -> None:
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
        count = opened.file.read_into(begin, view)
        if count != len(view):
            raise CorruptCheckpointError(f"{opened.name}: must have at least {end} bytes, ends at byte {begin + count}")
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
    offsets, at = {}, 0
    for slot in ordered:
        offsets[slot.key] = (at, at + slot.nbytes)
        head[slot.key] = {"dtype": slot.dtype, "shape": slot.size, "data_offsets": offsets[slot.key]}
        at += slot.nbytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    header = len(text).to_bytes(8, "little") + text if with_header else b""
    return FileLayout(
        header=header,
        slots=ordered,
        ranges={key: (len(header) + begin, len(header) + end) for key, (begin, end) in offsets.items()},
        size=len(header) + at,
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
        found, at = [], bisect_right(self.starts, begin) - 1
        while begin < end:
            low = begin - self.starts[at]
            view = memoryview(self.buffers[at])[low : low + end - begin]
            found.append(view)
            begin, at = begin + len(view), at + 1
        return found


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
    chunks = chunk_sizes(serialized.size)
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
    begins = [0, *ends]
    return b"".join(digest_of(serialized.views(begins[number], ends[number])) for number in numbers).hex()


def chunk_sizes(size: int) -> list[int]:
    """Return the sizes of the chunks of a file of ``size`` bytes."""
    whole, rest = divmod(size, CHUNK_BYTES)
    return [CHUNK_BYTES] * whole + [rest] * (rest > 0)


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


def serialize_in_place(layout: FileLayout, tensors: Mapping[str, Tensor]) -> SerializedFile:
    """Serialize a file from the memory of contiguous CPU tensors, and from copies of all other tensors.

    Host sync: one per group of tensors that is not on the CPU.
    """
    groups = group_slots(layout, tensors)
    return SerializedFile.from_buffers(
        [layout.header, *(_bytes_of(flatten([tensors[slot.key] for slot in group])) for group in groups)]
    )


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Flatten tensors of one dtype and device into one tensor; a single contiguous tensor shares its memory."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the data of a plain tensor in row-major order; a contiguous CPU tensor shares its memory."""
    return _bytes_of(flatten([tensor]))


def _bytes_of(flat: Tensor) -> memoryview:
    return memoryview(flat.cpu().resolve_neg().view(torch.uint8).numpy().data)


@dataclass(slots=True, eq=False, repr=False)
class StagingBuffer:
    """Staging memory for one file at a time, pinned if tensors come from a GPU.

    Views of the memory are kept while the layout of the file does not change.

    Args:
        views: views of groups by the first and last key of the group.
    """

    memory: Tensor
    header: bytes = b""
    views: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def fill(self, layout: FileLayout, tensors: Mapping[str, Tensor]) -> SerializedFile:
        """Copy a file into the memory. Copies from a GPU are enqueued on its current stream and not awaited.

        The caller must disable autograd.

        Mutates: the memory.
        """
        # Without a header, two layouts cannot be told apart.
        if self.header != layout.header or not layout.header:
            self.header, self.views = layout.header, {}
        if layout.header and not self.views:
            self.memory[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
        for group in group_slots(layout, tensors):
            sources, into = [tensors[slot.key] for slot in group], self._view(layout, group)
            if len(sources) > 1 and sources[0].device == into.device:
                torch.cat([tensor.reshape(-1) for tensor in sources], out=into)
            else:
                into.copy_(flatten(sources), non_blocking=True)
        return SerializedFile.from_buffers([memoryview(self.memory[: layout.size].numpy().data)])

    def _view(self, layout: FileLayout, group: Sequence[TensorSlot]) -> Tensor:
        # Tensors that have moved to another device form other groups.
        ends = group[0].key, group[-1].key
        view = self.views.get(ends)
        if view is None:
            begin, end = layout.ranges[group[0].key][0], layout.ranges[group[-1].key][1]
            view = self.memory[begin:end].view(DTYPES[group[0].dtype])
            self.views[ends] = view
        return view


class StagingPool:
    """Pool of staging buffers: one per save in progress, each of the largest size needed so far."""

    def __init__(self) -> None:
        self._free: list[StagingBuffer] = []

    def acquire(self, size: int, *, pinned: bool) -> StagingBuffer:
        """Return an unused buffer of at least ``size`` bytes, to be released. The first call allocates memory."""
        fitting = [b for b in self._free if b.memory.numel() >= size and b.memory.is_pinned() == pinned]
        if fitting:
            best = min(fitting, key=lambda buffer: buffer.memory.numel())
            self._free.remove(best)
            return best
        if self._free:
            # The buffer is too small for this run, so only the new buffer is kept.
            self._free.pop()
        # The chunks of a file are written to the disk from page-aligned memory without another copy.
        memory = torch.empty(size + PAGE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        begin = -memory.data_ptr() % PAGE_BYTES
        return StagingBuffer(memory[begin : begin + size])

    def release(self, buffer: StagingBuffer) -> None:
        """Return a buffer to the pool."""
        self._free.append(buffer)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class StagedFiles:
    """Contents of a rank's files in memory, and the buffers to release after the save.

    Args:
        files: contents by file name.
        copy_events: events after the copies from GPUs.
    """

    files: Mapping[str, SerializedFile]
    copy_events: Sequence[torch.Event]
    buffers: Sequence[StagingBuffer]
    pool: StagingPool

    def wait(self) -> None:
        """Wait for the copies from GPUs."""
        for event in self.copy_events:
            event.synchronize()

    def release(self) -> None:
        """Return the buffers to their pool."""
        for buffer in self.buffers:
            self.pool.release(buffer)


def stage_files(
    layouts: Mapping[str, FileLayout], tensors: Mapping[str, Tensor], pool: StagingPool, *, copy: bool
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
        files = {name: serialize_in_place(file, tensors) for name, file in layouts.items()}
        return StagedFiles(files=files, copy_events=(), buffers=(), pool=pool)
    buffers = [pool.acquire(file.size, pinned=bool(accelerators)) for file in layouts.values()]
    files = {name: buffer.fill(file, tensors) for buffer, (name, file) in zip(buffers, layouts.items(), strict=True)}
    # The copies are in the order of each device's current stream.
    copy_events = [torch.accelerator.current_stream(device).record_event() for device in accelerators]
    return StagedFiles(files=files, copy_events=copy_events, buffers=buffers, pool=pool)
