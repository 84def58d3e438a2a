"""Lay out a rank's tensors as a safetensors file, write the file with chunk digests, and verify every read.

The format: 8 bytes with the length of the header, the header (JSON: name -> dtype, shape, byte range), the data without
gaps. Tensors are in the order of falling item size, so that each is aligned. Of one item size, small tensors come last, in the
order of falling size: scalars between large tensors would cost a reader a chunk each.

Source: the format section of the safetensors README (huggingface/safetensors).
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple, Protocol, TypeAlias

import torch
import xxhash
from torch import Tensor

from dtrain import storage
from dtrain.checkpoint.layout import CHUNK_BYTES, DTYPES
from dtrain.errors import CorruptCheckpointError
from dtrain.storage import AnyPath, Buffer, FileReader


def digest_of(buffers: Iterable[Buffer]) -> str:
    """Return the digest of a chunk, whose bytes are the concatenated ``buffers``."""
    state = xxhash.xxh3_128()
    for buffer in buffers:
        state.update(buffer)
    return state.hexdigest()


def chunk_range(begin: int, end: int) -> range:
    """Return the numbers of the chunks that contain the bytes ``[begin, end)``."""
    return range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)) if end > begin else range(0)


class ReadableFile(Protocol):
    """Protocol of an open data file; ``chunks`` is None for a file without digests."""

    @property
    def file(self) -> FileReader:
        """Open file."""

    @property
    def name(self) -> str:
        """Name of the file for messages."""

    @property
    def chunks(self) -> tuple[str, ...] | None:
        """Digests of the chunks."""


FileOpener: TypeAlias = Callable[[int], AbstractContextManager[ReadableFile]]
"""Function that opens the file of a number."""


class VerifiedReader:
    """Reader of a data file that checks each chunk against its digest after every fetch.

    The last chunk is cached, so reads in the order of the file fetch each chunk once.
    """

    def __init__(self, file: FileReader, name: str, chunks: tuple[str, ...]) -> None:
        self.file, self.name, self.chunks = file, name, chunks
        self._buffer = bytearray()
        self._cached_chunk: int | None = None

    def verify(self, chunks: Iterable[int]) -> None:
        """Check the digests of these chunks."""
        for chunk in chunks:
            self._fetch(chunk)

    def read(self, begin: int, end: int) -> bytearray:
        """Return the bytes ``[begin, end)``.

        Raises:
            CorruptCheckpointError: a chunk that is missing or does not match its digest.
        """
        out = bytearray(end - begin)
        for chunk in chunk_range(begin, end):
            start = chunk * CHUNK_BYTES
            low, high = max(begin, start), min(end, start + CHUNK_BYTES)
            out[low - begin : high - begin] = self._fetch(chunk)[low - start : high - start]
        return out

    def _fetch(self, chunk: int) -> memoryview:
        start = chunk * CHUNK_BYTES
        if not self._buffer:
            self._buffer = bytearray(min(CHUNK_BYTES, self.file.size))
        view = memoryview(self._buffer)[: min(CHUNK_BYTES, self.file.size - start)]
        if self._cached_chunk == chunk:
            return view
        self._cached_chunk = None
        count = self.file.read_into(start, view)
        if count != len(view) or digest_of([view]) != self.chunks[chunk]:
            raise CorruptCheckpointError(f"{self.name}: bytes from {start} on do not match their digest")
        self._cached_chunk = chunk
        return view


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


def plan_file_layout(slots: Iterable[TensorSlot]) -> FileLayout:
    """Lay out a file that holds ``slots``."""
    ordered = tuple(sorted(slots, key=_file_order))
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, at = {}, 0
    for slot in ordered:
        offsets[slot.key] = (at, at + slot.nbytes)
        head[slot.key] = {"dtype": slot.dtype, "shape": slot.size, "data_offsets": offsets[slot.key]}
        at += slot.nbytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(
        header=header,
        slots=ordered,
        ranges={key: (len(header) + begin, len(header) + end) for key, (begin, end) in offsets.items()},
        size=len(header) + at,
    )


def _file_order(slot: TensorSlot) -> tuple[int, int, str]:
    key, dtype, _, nbytes = slot
    return -DTYPES[dtype].itemsize, -min(nbytes, SMALL_BYTES + 1), key


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


def _no_op() -> None:
    """Default of ``on_part``."""


def write_data_file(
    path: AnyPath, serialized: SerializedFile, *, threads: int = 1, on_part: Callable[[], None] = _no_op
) -> tuple[str, ...]:
    """Write a new file in chunks. The data are on the disk when the function returns.

    Args:
        path: a name that does not exist.
        serialized: content of the file.
        threads: number of threads that write and digest.
        on_part: called for every chunk, by the thread that writes the chunk.

    Returns:
        The digest of each chunk.
    """
    chunks = chunk_sizes(serialized.size)
    digests = [""] * len(chunks)

    def part_of(number: int) -> list[memoryview]:
        on_part()
        part = serialized.views(number * CHUNK_BYTES, number * CHUNK_BYTES + chunks[number])
        digests[number] = digest_of(part)
        return part

    storage.write_parts(path, chunks, part_of, threads=threads)
    return tuple(digests)


def chunk_digests(serialized: SerializedFile) -> tuple[str, ...]:
    """Return the digests that ``write_data_file`` would return, without writing."""
    chunks = chunk_sizes(serialized.size)
    return tuple(digest_of(serialized.views(at * CHUNK_BYTES, at * CHUNK_BYTES + size)) for at, size in enumerate(chunks))


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
