"""A rank's tensors as an ordinary safetensors file: how it is laid out, its content, and writing it with its digests.

The format: 8 bytes with the length of the header, the header (JSON: name -> dtype, shape, byte range), the data without
gaps. Boxes lie in order of falling item size, so that each is aligned.

Source: the format section of the safetensors README (huggingface/safetensors).

Digests of a data file in chunks: computed by the threads that write it, checked whenever it is read."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from dtrain import storage
from dtrain.checkpoint.layout import CHUNK_BYTES, DTYPES
from dtrain.errors import CorruptCheckpointError
from dtrain.storage import AnyPath, Buffer, FileReader


def digest_of(buffers: Iterable[Buffer]) -> str:
    """The digest of a chunk, whose bytes are those of ``buffers`` one after the other."""
    state = xxhash.xxh3_128()
    for buffer in buffers:
        state.update(buffer)
    return state.hexdigest()


def chunk_range(begin: int, end: int) -> range:
    """The chunks that bytes ``[begin, end)`` lie in."""
    return range(begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)) if end > begin else range(0)


class VerifiedReader:
    """Byte ranges of a data file, each chunk checked against its digest every time it is fetched.

    Keeps the chunk it fetched last, so reads in the order of the file fetch each chunk once.
    """

    def __init__(self, file: FileReader, name: str, chunks: tuple[str, ...]) -> None:
        self.file, self.name, self.chunks = file, name, chunks
        self._buffer = bytearray()
        self._cached_chunk: int | None = None

    def verify(self, chunks: Iterable[int]) -> None:
        """Check these chunks, whatever is in them."""
        for chunk in chunks:
            self._fetch(chunk)

    def read(self, begin: int, end: int) -> bytearray:
        """The bytes ``[begin, end)``.

        Raises:
            CorruptCheckpointError: a chunk does not have its digest, or is not there.
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
        got = self.file.read_into(start, view)
        if got != len(view) or digest_of([view]) != self.chunks[chunk]:
            raise CorruptCheckpointError(f"{self.name}: bytes from {start} on do not match their digest")
        self._cached_chunk = chunk
        return view


_GATHER_BELOW_BYTES = 64 * 2**10  # what is smaller is gathered, to spare a call for each
_MAX_GROUP_BYTES = 32 * 2**20  # gathered at once: it is a copy


class TensorSlot(NamedTuple):
    """A tensor of the file: its name there, dtype by its safetensors name, shape, and bytes of data."""

    key: str
    dtype: str
    size: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, key: str, dtype: str, size: tuple[int, ...]) -> TensorSlot:
        """The box with its size in bytes."""
        return cls(key, dtype, size, prod(size) * DTYPES[dtype].itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """A file's plan: the header's bytes, the boxes in the order of the file, each one's byte range in it, its size."""

    header: bytes
    slots: tuple[TensorSlot, ...]
    ranges: Mapping[str, tuple[int, int]]
    size: int


def plan_file_layout(boxes: Iterable[TensorSlot]) -> FileLayout:
    """Lay out a file that holds ``boxes``, a pure function."""
    ordered = tuple(sorted(boxes, key=lambda box: (-DTYPES[box.dtype].itemsize, box.key)))
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, at = {}, 0
    for box in ordered:
        offsets[box.key] = (at, at + box.nbytes)
        head[box.key] = {"dtype": box.dtype, "shape": box.size, "data_offsets": offsets[box.key]}
        at += box.nbytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(
        header=header,
        slots=ordered,
        ranges={key: (len(header) + begin, len(header) + end) for key, (begin, end) in offsets.items()},
        size=len(header) + at,
    )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SerializedFile:
    """The content of a file that is to be written: pieces of host memory in a row, which nobody changes meanwhile."""

    buffers: Sequence[Buffer]
    starts: Sequence[int]
    size: int

    @classmethod
    def from_buffers(cls, pieces: Iterable[Buffer]) -> SerializedFile:
        """The image of these pieces; empty ones are left out."""
        kept = [piece for piece in pieces if len(piece)]
        ends = list(accumulate(map(len, kept)))
        return cls(kept, [0, *ends[:-1]], ends[-1] if ends else 0)

    def views(self, begin: int, end: int) -> list[memoryview]:
        """The bytes ``[begin, end)``, as views."""
        found, at = [], bisect_right(self.starts, begin) - 1
        while begin < end:
            low = begin - self.starts[at]
            view = memoryview(self.buffers[at])[low : low + end - begin]
            found.append(view)
            begin, at = begin + len(view), at + 1
        return found


def _no_op() -> None:
    """For callers who do not watch."""


def write_data_file(
    path: AnyPath, image: SerializedFile, *, threads: int = 1, on_part: Callable[[], None] = _no_op
) -> tuple[str, ...]:
    """Write a new file in chunks, on the disk when this returns.

    Args:
        path: a name that does not exist.
        image: its content.
        threads: how many write and digest at a time.
        on_part: called for every chunk, by the thread that writes it.

    Returns:
        The digest of each chunk.
    """
    chunks = chunk_sizes(image.size)
    digests = [""] * len(chunks)

    def part_of(number: int) -> list[memoryview]:
        on_part()
        part = image.views(number * CHUNK_BYTES, number * CHUNK_BYTES + chunks[number])
        digests[number] = digest_of(part)
        return part

    storage.write_parts(path, chunks, part_of, threads=threads)
    return tuple(digests)


def chunk_digests(image: SerializedFile) -> tuple[str, ...]:
    """What ``write_data_file`` would return, with nothing written."""
    chunks = chunk_sizes(image.size)
    return tuple(digest_of(image.views(at * CHUNK_BYTES, at * CHUNK_BYTES + size)) for at, size in enumerate(chunks))


def chunk_sizes(size: int) -> list[int]:
    """The sizes of the chunks of a file of ``size`` bytes."""
    whole, rest = divmod(size, CHUNK_BYTES)
    return [CHUNK_BYTES] * whole + [rest] * (rest > 0)


def group_slots(placed: FileLayout, tensors: Mapping[str, Tensor]) -> Iterator[tuple[TensorSlot, ...]]:
    """The boxes of a file in stretches handled at once: a large one alone, small ones of a dtype and device together."""
    run: list[TensorSlot] = []
    held, kind = 0, None
    for box in placed.slots:
        kind_here = (box.dtype, tensors[box.key].device)
        large = box.nbytes > _GATHER_BELOW_BYTES
        if run and (large or kind_here != kind or held >= _MAX_GROUP_BYTES):
            yield tuple(run)
            run, held = [], 0
        if large:
            yield (box,)
            continue
        run.append(box)
        held, kind = held + box.nbytes, kind_here
    if run:
        yield tuple(run)


def serialize_in_place(placed: FileLayout, tensors: Mapping[str, Tensor]) -> SerializedFile:
    """The image of a file, made of the memory of the tensors where they lie on the CPU row by row, and of copies else.

    Host sync: one for each run of tensors that is not on the CPU.
    """
    return SerializedFile.from_buffers(
        [placed.header, *(_bytes_of(flatten([tensors[box.key] for box in run])) for run in group_slots(placed, tensors))]
    )


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """The data of tensors of one dtype and device as one flat tensor, sharing memory where it is a single contiguous one."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def as_bytes(tensor: Tensor) -> memoryview:
    """The data of a plain tensor, row by row; sharing memory where it lies so already."""
    return _bytes_of(flatten([tensor]))


def _bytes_of(flat: Tensor) -> memoryview:
    return memoryview(flat.cpu().resolve_neg().view(torch.uint8).numpy().data)
