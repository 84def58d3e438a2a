"""Carries out a plan of reads: byte ranges of files into host memory, verified on the way, each chunk fetched once.

Chunk by chunk, several at a time: what is large goes from the file to where it stays, what is small and what nobody wants
through a buffer. Then the digest of the chunk is computed over what is in memory, and the small things are taken out of the
buffer. So what was verified is what is there afterwards, and memory beyond that is a buffer per thread.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import groupby
from math import prod
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from dtrain.checkpoint import layout
from dtrain.checkpoint.data_file import chunk_range, digest_of
from dtrain.checkpoint.layout import DTYPES
from dtrain.checkpoint.reshard import ReadItem
from dtrain.checkpoint.tree_json import TensorRef
from dtrain.dtensor import to_local
from dtrain.errors import CorruptCheckpointError
from dtrain.storage import FileReader
from dtrain.storage.parallel_parts import for_each_part

READ_THREADS = 2  # that read; one fetches while another digests
REMOTE_REQUESTS = 8  # to a server at a time
_MIN_THREADED_CHUNKS = 4  # fewer are not worth the threads
_DIRECT_MIN_BYTES = 64 * 2**10  # what is smaller is copied out of a buffer, to spare a system call for each


class ReadableFile(Protocol):
    """A data file: open, its name, and the digests of its chunks; None for a file of others, which has none."""

    @property
    def file(self) -> FileReader:
        """What reads it."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def chunks(self) -> tuple[str, ...] | None:
        """The digests."""


FileOpener: TypeAlias = Callable[[int], AbstractContextManager[ReadableFile]]
"""Opens the file of this number."""


class _BufferPool:
    """Memory that is used again: what threads free goes back to the allocator, but often not to the system."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def acquire(self, size: int) -> Tensor:
        """At least so many bytes, which nobody else has."""
        try:
            found = self._free.pop()
        except IndexError:
            found = torch.empty(size, dtype=torch.uint8)
        return found if len(found) >= size else torch.empty(size, dtype=torch.uint8)

    def release(self, memory: Tensor) -> None:
        """Take back what nobody needs any more."""
        self._free.append(memory)


class _GatherBuffer:
    """Rows of a stored box that do not lie in their tensor as they lie in the file, and are copied when they are all there."""

    def __init__(self, read: ReadItem, dtype: torch.dtype, into: Tensor, memory: _BufferPool) -> None:
        self._read, self._dtype, self._into, self._memory = read, dtype, into, memory
        self._lock = threading.Lock()
        self._buffer: Tensor | None = None
        self._missing = read.end - read.begin

    def add(self, begin: int, data: Tensor) -> None:
        """Take the bytes of the file from ``begin`` on, which have been verified."""
        if len(data) == self._read.end - self._read.begin:
            self._copy(data)
            return
        with self._lock:  # the rest is in another chunk, which another thread may have
            if self._buffer is None:
                self._buffer = self._memory.acquire(self._read.end - self._read.begin)
            at = begin - self._read.begin
            self._buffer[at : at + len(data)].copy_(data)
            self._missing -= len(data)
            if self._missing == 0:
                self._copy(self._buffer[: self._read.end - self._read.begin])
                self._memory.release(self._buffer)
                self._buffer = None

    def _copy(self, data: Tensor) -> None:
        block = _view_as(data, self._dtype).view(self._read.block)
        source, target = (tuple(slice(*span) for span in spans) for spans in (self._read.source, self._read.target))
        self._into[target].copy_(block[source])


class _Segment(NamedTuple):
    """Bytes ``[begin, end)`` of a file, inside of one chunk, and where they go: into memory, a block, or a small new tensor."""

    begin: int
    end: int
    key: str
    memory: memoryview | None
    gather_buffer: _GatherBuffer | None


def read_tensors(
    sizes: Mapping[str, tuple[int, ...]], reads: Iterable[ReadItem], refs: Mapping[str, TensorRef], open_file: FileOpener
) -> dict[str, Tensor]:
    """New tensors on the CPU, of the stored dtypes, filled with what is read.

    Args:
        sizes: the shape of each tensor's part that is wanted here, by key.
        reads: that fill all of them, in the order of the files.
        refs: the stored dtypes, by key.
        open_file: gives the files.

    Raises:
        CorruptCheckpointError: bytes that do not have their digest, or a file that ends too early.
        OSError: a file cannot be read.
    """
    landed = _HostTensors(sizes, refs)
    with torch.no_grad(), ExitStack() as stack:
        for layer in _split_repeated_reads(list(reads)):
            work: dict[tuple[int, int], list[_Segment]] = defaultdict(list)
            for read in layer:
                landed.add_read(read, work)
            files = {number: stack.enter_context(open_file(number)) for number in {number for number, _ in work}}
            chunks = [(files[number], chunk, pieces) for (number, chunk), pieces in work.items()]
            buffers = _BufferPool()

            def fetch(at: int) -> None:
                file, chunk, pieces = chunks[at]  # noqa: B023  # called before the next turn
                with torch.no_grad():  # which belongs to a thread
                    _read_chunk(file, chunk, pieces, landed, buffers)  # noqa: B023

            remote = any(file.file.is_remote for file in files.values())
            threads = REMOTE_REQUESTS if remote else READ_THREADS if len(chunks) >= _MIN_THREADED_CHUNKS else 1
            for_each_part(len(chunks), fetch, threads=threads, name="dtrain-read", activity="load")
    return landed.tensors


def fill_(
    tensors: Mapping[str, Tensor], reads: Iterable[ReadItem], refs: Mapping[str, TensorRef], open_file: FileOpener
) -> None:
    """Copy what is read into the local shards of ``tensors``, cast to their dtypes, when all of it has been verified.

    Args:
        tensors: by key; those that no read names stay as they are.
        reads: in the order of the files.
        refs: the stored dtypes by key.
        open_file: gives the files.

    Mutates: ``tensors``.
    """
    planned = list(reads)
    with torch.no_grad():
        into = {key: to_local(tensors[key]) for key in {read.key for read in planned}}
        copy_into_(into, read_tensors({key: tuple(tensor.shape) for key, tensor in into.items()}, planned, refs, open_file))


def copy_into_(targets: Mapping[str, Tensor], landed: Mapping[str, Tensor]) -> None:
    """Copy each landed tensor into the plain tensor of the same key, cast to its dtype.

    Mutates: ``targets``.
    """
    groups: dict[tuple[torch.dtype, torch.dtype, torch.device], list[str]] = defaultdict(list)
    for key, target in targets.items():
        groups[target.dtype, landed[key].dtype, target.device].append(key)
    with torch.no_grad():
        for keys in groups.values():
            torch._foreach_copy_([targets[key] for key in keys], [landed[key] for key in keys])


def _split_repeated_reads(reads: list[ReadItem]) -> Iterator[list[ReadItem]]:
    """The reads in lists within which no byte is asked for twice: one list, unless two names stand for the same bytes."""
    while reads:
        layer, rest, number, reach = [], [], -1, 0
        for read in reads:
            if read.file == number and read.begin < reach:
                rest.append(read)
            else:
                layer.append(read)
                number, reach = read.file, read.end
        yield layer
        reads = rest


class _HostTensors:
    """The tensors that are filled, and for the large ones their memory."""

    def __init__(self, sizes: Mapping[str, tuple[int, ...]], refs: Mapping[str, TensorRef]) -> None:
        self._sizes, self._refs = sizes, refs
        self._bytes: dict[tuple[tuple[int, ...], str], tuple[int, int]] = {}  # of a row, and of all, by size and dtype
        self._views: dict[str, memoryview] = {}
        self._pool = _BufferPool()
        self.tensors: dict[str, Tensor] = {key: self._new(key) for key, size in sizes.items() if 0 in size}

    def _new(self, key: str) -> Tensor:
        return torch.empty(self._sizes[key], dtype=DTYPES[self._refs[key].dtype])

    def add_read(self, read: ReadItem, work: dict[tuple[int, int], list[_Segment]]) -> None:
        """Append where the bytes of a read go to the work on the chunks that they lie in."""
        number, begin, end, key, *_, straight = read
        size, stored = self._sizes[key], self._refs[key].dtype
        if (size, stored) not in self._bytes:
            dtype = DTYPES[stored]
            self._bytes[size, stored] = prod(size[1:]) * dtype.itemsize, prod(size) * dtype.itemsize
        row, whole = self._bytes[size, stored]
        first = begin // layout.CHUNK_BYTES
        if straight and end - begin == whole < _DIRECT_MIN_BYTES and end <= (first + 1) * layout.CHUNK_BYTES:
            work[number, first].append(_Segment(begin, end, key, None, None))
            return
        if key not in self.tensors:
            self.tensors[key] = self._new(key)
        block = None if straight else _GatherBuffer(read, DTYPES[stored], self.tensors[key], self._pool)
        if straight and key not in self._views:
            self._views[key] = _bytes_of(self.tensors[key])
        at = read.target[0][0] * row if read.target else 0
        for chunk in chunk_range(begin, end):
            low, high = max(begin, chunk * layout.CHUNK_BYTES), min(end, (chunk + 1) * layout.CHUNK_BYTES)
            memory = None if block is not None else self._views[key][at + low - begin : at + high - begin]
            work[number, chunk].append(_Segment(low, high, key, memory, block))

    def split_buffer(self, buffer: Tensor, start: int, pieces: Sequence[_Segment]) -> None:
        """New tensors for small pieces that lie in ``buffer``, whose first byte is byte ``start`` of the file."""
        for name, of_dtype in groupby(pieces, key=lambda piece: self._refs[piece.key].dtype):
            dtype = DTYPES[name]
            run: list[_Segment] = []
            for piece in of_dtype:
                if run and (piece.begin - run[-1].end) % dtype.itemsize:  # a file of others may lie anyhow
                    self._split_run(buffer, start, run, dtype)
                    run = []
                run.append(piece)
            self._split_run(buffer, start, run, dtype)

    def _split_run(self, buffer: Tensor, start: int, run: Sequence[_Segment], dtype: torch.dtype) -> None:
        low, high = run[0].begin - start, run[-1].end - start
        typed = _view_as(buffer[low:high], dtype)
        sizes = {self._sizes[piece.key] for piece in run}
        if len(sizes) == 1 and len(typed) == len(run) * prod(size := sizes.pop()):  # all alike, and nothing between them
            for piece, part in zip(run, typed.view(len(run), *size).unbind(), strict=True):
                self.tensors[piece.key] = part.clone()
            return
        counts: list[int] = []
        keys: list[str | None] = []  # None for what lies between
        at = run[0].begin
        for piece in run:
            if piece.begin > at:
                counts.append((piece.begin - at) // dtype.itemsize)
                keys.append(None)
            counts.append((piece.end - piece.begin) // dtype.itemsize)
            keys.append(piece.key)
            at = piece.end
        for key, part in zip(keys, typed.split_with_sizes(counts), strict=True):
            if key is not None:
                self.tensors[key] = part.clone().view(self._sizes[key])


def _read_chunk(file: ReadableFile, chunk: int, pieces: Sequence[_Segment], landed: _HostTensors, buffers: _BufferPool) -> None:
    """Read a chunk, verify it, and put its pieces where they belong."""
    start = chunk * layout.CHUNK_BYTES
    size = max(0, min(layout.CHUNK_BYTES, file.file.size - start))  # the file may have shrunk since
    parts = list(_plan_chunk(file, pieces, start, start + size))
    buffer = buffers.acquire(size) if any(memory is None for _, _, memory in parts) else None
    held = memoryview(b"") if buffer is None else _bytes_of(buffer)
    views = []
    for begin, end, memory in parts:
        views.append(held[begin - start : end - start] if memory is None else memory)
        got = file.file.read_into(begin, views[-1])
        if got != end - begin:
            raise CorruptCheckpointError(f"{file.name}: ends at byte {begin + got}, {end} or more were promised")
    if file.chunks is not None and digest_of(views) != file.chunks[chunk]:
        raise CorruptCheckpointError(f"{file.name}: bytes from {start} on do not match their digest")
    _distribute(file, pieces, landed, buffer, held, start)
    if buffer is not None:
        buffers.release(buffer)


def _plan_chunk(
    file: ReadableFile, pieces: Sequence[_Segment], start: int, stop: int
) -> Iterator[tuple[int, int, memoryview | None]]:
    """What to read of ``[start, stop)`` in which order, each part into this memory, or None for the buffer.

    Where there is a digest, that is everything; otherwise the pieces, and together those that touch and go
    through the buffer.
    """
    at = start
    low = None  # where the stretch for the buffer begins that ends at ``at``
    for piece in pieces:
        if piece.begin > at and file.chunks is None:  # nobody wants what is between
            if low is not None:
                yield low, at, None
            low, at = None, piece.begin
        if not _is_direct(file, piece):
            low = at if low is None else low
        else:
            low = at if low is None and piece.begin > at else low
            if low is not None:
                yield low, piece.begin, None
            low = None
            yield piece.begin, piece.end, piece.memory
        at = piece.end
    if file.chunks is not None and at < stop:
        low, at = at if low is None else low, stop
    if low is not None:
        yield low, at, None


def _is_direct(file: ReadableFile, piece: _Segment) -> bool:
    """Whether a piece is read to where it stays. A server is asked for chunks as whole as can be."""
    if piece.memory is None:
        return False
    return piece.end - piece.begin >= (layout.CHUNK_BYTES if file.file.is_remote else _DIRECT_MIN_BYTES)


def _distribute(
    file: ReadableFile, pieces: Sequence[_Segment], landed: _HostTensors, buffer: Tensor | None, held: memoryview, start: int
) -> None:
    """What went through the buffer goes on to where it stays."""
    small = []
    for piece in pieces:
        begin, end = piece.begin - start, piece.end - start
        if piece.gather_buffer is not None:
            assert buffer is not None, "blocks go through the buffer"
            piece.gather_buffer.add(piece.begin, buffer[begin:end])
        elif piece.memory is None:
            small.append(piece)
        elif not _is_direct(file, piece):
            piece.memory[:] = held[begin:end]
    if small:
        assert buffer is not None, "small pieces went through a buffer"
        landed.split_buffer(buffer, start, small)


def _view_as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as values; a copy where they lie at an address that such values cannot have."""
    return (data if data.storage_offset() % dtype.itemsize == 0 else data.clone()).view(dtype)


def as_tensor(data: bytearray, dtype: str, shape: Sequence[int]) -> Tensor:
    """The tensor whose rows these bytes are, sharing their memory."""
    if not data:
        return torch.empty(tuple(shape), dtype=DTYPES[dtype])
    return torch.frombuffer(data, dtype=torch.uint8).view(DTYPES[dtype]).reshape(tuple(shape))


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data.cast("B")
