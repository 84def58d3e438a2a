"""Read byte ranges of files into host tensors in parallel, and verify the digest of each block before use.

Adjacent blocks are fetched together, in fetches of at most ``CHUNK_BYTES``. Large segments of a fetch are read directly into
their tensor, and all others into a buffer. The digests are computed from memory, piece by piece, and then the small segments
are copied out of the buffer. The verified bytes are therefore the bytes in use, and the additional memory is one buffer per
thread. Each block is fetched once.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dtrain.checkpoint import layout
from dtrain.checkpoint.data_file import FileOpener, MemoryPool, OpenedFile, as_bytes, read_exactly, verify_pieces
from dtrain.checkpoint.layout import DTYPES
from dtrain.checkpoint.plan import Fetch, ReadItem, Span, TensorRead, plan_fetches
from dtrain.storage.parallel_parts import for_each_part

# One thread fetches while the other digests.
READ_THREADS = 2
# Concurrent requests to a server.
REMOTE_REQUESTS = 8
# Fewer fetches are not worth the threads.
_MIN_THREADED_FETCHES = 4
# Size of a read whose digest is computed from the second-level cache of common processors.
_PIECE_BYTES = 256 * 2**10
# Smaller segments are copied out of a buffer, which saves a system call for each of them.
_DIRECT_MIN_BYTES = 64 * 2**10


def read_tensors(
    tensors: Mapping[str, TensorRead],
    open_file: FileOpener,
    *,
    targets: Mapping[str, Tensor] | None = None,
    shareable: Container[str] = (),
    verify: Iterable[ReadItem] = (),
) -> dict[str, Tensor]:
    """Read tensors on the CPU with the stored dtypes.

    Args:
        tensors: planned reads of each tensor, by key.
        open_file: function that opens the file of a number.
        targets: tensors by key, filled in place if plain, contiguous, on the CPU and of the stored dtype. Others are new.
        shareable: keys of tensors that may share memory with others, because the caller copies them. Saves a copy.
        verify: reads whose blocks are verified only.

    Mutates: ``targets``.

    Raises:
        CorruptCheckpointError: bytes that do not match their digest, or a file that is too short.
        OSError: an unreadable file.
    """
    host_tensors = _HostTensors(tensors, targets or {}, shareable)
    by_file: dict[int, tuple[list[ReadItem], list[Span]]] = defaultdict(lambda: ([], []))
    for read in sorted((read for tensor in tensors.values() for read in tensor.reads), key=itemgetter(0, 1)):
        by_file[read.file][0].append(read)
    for read in verify:
        by_file[read.file][1].append((read.begin, read.end))
    with torch.no_grad(), ExitStack() as stack:
        work: list[tuple[OpenedFile, Fetch, list[_Place]]] = []
        for number, (reads, spans) in sorted(by_file.items()):
            file = stack.enter_context(open_file(number))
            is_remote = file.file.is_remote
            for fetch in plan_fetches(file.blocks, reads, spans, is_remote=is_remote):
                work.append((file, fetch, [host_tensors.place(*segment, is_remote) for segment in fetch.segments]))
        buffers = MemoryPool()

        def run(number: int) -> None:
            # The autograd mode belongs to a thread.
            with torch.no_grad():
                _read_fetch(*work[number], host_tensors, buffers)

        remote = any(file.file.is_remote for file, _, _ in work)
        threads = REMOTE_REQUESTS if remote else READ_THREADS if len(work) >= _MIN_THREADED_FETCHES else 1
        for_each_part(len(work), run, threads=threads, name="dtrain-read", activity="load")
    return host_tensors.filled


def _read_fetch(file: OpenedFile, fetch: Fetch, places: Sequence[_Place], tensors: _HostTensors, buffers: MemoryPool) -> None:
    """Make a fetch, verify the digests of its blocks, and pass its bytes to their tensors."""
    buffer = buffers.acquire(fetch.end - fetch.begin)
    memory = as_bytes(buffer)
    if places or file.file.is_remote:
        spans = [
            (begin, memory[begin - fetch.begin : end - fetch.begin] if direct is None else direct)
            for begin, end, direct in _plan_memory(fetch, places, has_digests=file.blocks is not None)
        ]
    else:
        # Bytes that are only verified need no memory of their own.
        end = fetch.begin if file.blocks is None else fetch.end
        spans = [(begin, memory[: min(_PIECE_BYTES, end - begin)]) for begin in range(fetch.begin, end, _PIECE_BYTES)]
    pieces = _read_pieces(file, spans)
    if file.blocks is None:
        deque(pieces, maxlen=0)
    else:
        verify_pieces(file.name, file.blocks, fetch.blocks, pieces)
    if not tensors.fill(places, buffer, memory, fetch.begin):
        buffers.release(buffer)


def _plan_memory(fetch: Fetch, places: Sequence[_Place], *, has_digests: bool) -> Iterator[tuple[int, int, memoryview | None]]:
    """Plan the reads of a fetch in order, each into the memory of its tensor, or into the buffer if None.

    With digests, all bytes are read. Otherwise only the places are read, and adjacent places in the buffer together.
    """
    # The bytes from ``low`` to ``high`` are read into the buffer.
    low = high = fetch.begin
    for place in places:
        if place.begin > high and not has_digests:
            if low < high:
                yield low, high, None
            low = place.begin
        if place.direct:
            if low < place.begin:
                yield low, place.begin, None
            yield place.begin, place.end, place.memory
            low = place.end
        high = place.end
    high = fetch.end if has_digests else high
    if low < high:
        yield low, high, None


def _read_pieces(file: OpenedFile, spans: Iterable[tuple[int, memoryview]]) -> Iterator[memoryview]:
    """Read from the file into memory, in order. Each piece is still in the processor's cache when it is digested."""
    for begin, memory in spans:
        # Requests to a server should be large.
        step = len(memory) if file.file.is_remote else _PIECE_BYTES
        for offset in range(0, len(memory), step):
            piece = memory[offset : offset + step]
            read_exactly(file.file, file.name, begin + offset, piece)
            yield piece


class _Place(NamedTuple):
    """Place of the bytes ``[begin, end)`` of a fetch: the memory of their tensor, or rows that are gathered.

    A small tensor has neither: it is cut out of the buffer. ``direct`` is True if the bytes are read into ``memory``, and
    not into the buffer first.
    """

    begin: int
    end: int
    key: str
    memory: memoryview | None = None
    rows: GatherBuffer | None = None
    direct: bool = False


class _HostTensors:
    """Tensors that are read, ``filled``: targets that fit, which are filled in place, and new tensors."""

    def __init__(self, tensors: Mapping[str, TensorRead], targets: Mapping[str, Tensor], shareable: Container[str]) -> None:
        self._tensors, self._shareable = tensors, shareable
        self._targets = {
            key: target
            for key, target in targets.items()
            # The memory of a subclass may not be that of its values.
            if type(target) in (Tensor, nn.Parameter)
            and target.dtype == DTYPES[tensors[key].dtype]
            and target.is_cpu
            and target.is_contiguous()
        }
        self._memory: dict[str, memoryview] = {}
        self._rows: dict[ReadItem, GatherBuffer] = {}
        self._pool = MemoryPool()
        self.filled: dict[str, Tensor] = {key: self._new(key) for key, tensor in tensors.items() if 0 in tensor.size}

    def _new(self, key: str) -> Tensor:
        target = self._targets.get(key)
        if target is None:
            return torch.empty(self._tensors[key].size, dtype=DTYPES[self._tensors[key].dtype], device="cpu")
        # Writes to the memory do not count as changes of the tensor, but an operation on a part of no elements does.
        target.view(-1)[:0].zero_()
        return target

    def place(self, begin: int, end: int, read: ReadItem, is_remote: bool) -> _Place:
        """Return the place of a segment of a read."""
        key, (dtype, _, reads) = read.key, self._tensors[read.key]
        nbytes = end - begin
        if len(reads) == 1 and nbytes == read.end - read.begin < _DIRECT_MIN_BYTES and read.offset is not None:
            return _Place(begin, end, key)
        if key not in self.filled:
            self.filled[key] = self._new(key)
        if read.offset is None:
            if read not in self._rows:
                self._rows[read] = GatherBuffer(read, DTYPES[dtype], self.filled[key], self._pool)
            return _Place(begin, end, key, rows=self._rows[read])
        if key not in self._memory:
            self._memory[key] = as_bytes(self.filled[key])
        start = read.offset + begin - read.begin
        # Requests to a server should be large. Smaller segments are copied out of a buffer, which saves system calls.
        direct = nbytes >= (layout.CHUNK_BYTES if is_remote else _DIRECT_MIN_BYTES)
        return _Place(begin, end, key, memory=self._memory[key][start : start + nbytes], direct=direct)

    def fill(self, places: Sequence[_Place], buffer: Tensor, memory: memoryview, start: int) -> bool:
        """Fill the tensors from a buffer, whose first byte is byte ``start`` of the file.

        Returns:
            True if tensors share the memory of the buffer. They do not if most of the buffer would be kept for nothing.
        """
        small = []
        for place in places:
            begin, end = place.begin - start, place.end - start
            if place.rows is not None:
                place.rows.add(place.begin, buffer[begin:end])
            elif place.memory is None:
                small.append(place)
            elif not place.direct:
                place.memory[:] = memory[begin:end]
        parts = dict(self._cut(small, buffer, start))
        in_place = parts.keys() & self._targets.keys()
        if in_place:
            torch._foreach_copy_([self._targets[key] for key in in_place], [parts[key] for key in in_place])
        shareable = {place.key: place.end - place.begin for place in small if place.key in self._shareable}
        share = bool(shareable) and 2 * sum(shareable.values()) >= len(buffer)
        for key, view in parts.items():
            is_view = share and key in shareable
            self.filled[key] = self._targets[key] if key in in_place else view if is_view else view.clone()
        return share

    def _cut(self, places: Sequence[_Place], buffer: Tensor, start: int) -> Iterator[tuple[str, Tensor]]:
        """Yield small tensors as views of the buffer."""
        for name, of_dtype in groupby(places, key=lambda place: self._tensors[place.key].dtype):
            run, dtype = list(of_dtype), DTYPES[name]
            low = run[0].begin
            if any((place.begin - low) % dtype.itemsize for place in run):
                # Third-party files may have unaligned tensors.
                views: Sequence[Tensor] = [view_as(buffer[place.begin - start : place.end - start], dtype) for place in run]
            else:
                # One split is faster than a slice for each tensor. Every second view is the gap between two tensors.
                values = view_as(buffer[low - start : run[-1].end - start], dtype)
                bounds = [byte for place in run for byte in (place.begin, place.end)]
                views = values.split_with_sizes([(end - begin) // dtype.itemsize for begin, end in pairwise(bounds)])[::2]
            yield from ((place.key, view.view(self._tensors[place.key].size)) for place, view in zip(run, views, strict=True))


class GatherBuffer:
    """Rows of a stored shard that are not contiguous in their tensor; they are copied when all rows have been read."""

    def __init__(self, read: ReadItem, dtype: torch.dtype, target: Tensor, pool: MemoryPool) -> None:
        self._read, self._dtype, self._target, self._pool = read, dtype, target, pool
        self._lock = threading.Lock()
        self._buffer: Tensor | None = None
        self._missing = read.end - read.begin

    def add(self, begin: int, data: Tensor) -> None:
        """Add verified bytes of the file from ``begin`` on."""
        nbytes = self._read.end - self._read.begin
        if len(data) == nbytes:
            self._copy(data)
            return
        # The remaining rows are in another fetch, which another thread may make.
        with self._lock:
            if self._buffer is None:
                self._buffer = self._pool.acquire(nbytes)
            offset = begin - self._read.begin
            self._buffer[offset : offset + len(data)].copy_(data)
            self._missing -= len(data)
            if self._missing == 0:
                self._copy(self._buffer[:nbytes])
                self._pool.release(self._buffer)
                self._buffer = None

    def _copy(self, data: Tensor) -> None:
        block = view_as(data, self._dtype).view(self._read.block)
        source, target = (tuple(slice(*span) for span in spans) for spans in (self._read.source, self._read.target))
        self._target[target].copy_(block[source])


def view_as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as values; unaligned bytes are copied."""
    return (data if data.storage_offset() % dtype.itemsize == 0 else data.clone()).view(dtype)


def copy_into_(targets: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy each tensor into the plain target tensor of the same key, with a cast to its dtype.

    Mutates: ``targets``.
    """
    groups: dict[tuple[torch.dtype, torch.dtype, torch.device], list[str]] = defaultdict(list)
    for key, target in targets.items():
        groups[target.dtype, tensors[key].dtype, target.device].append(key)
    with torch.no_grad():
        for keys in groups.values():
            torch._foreach_copy_([targets[key] for key in keys], [tensors[key] for key in keys])
