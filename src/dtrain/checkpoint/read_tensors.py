"""Read byte ranges of files into host tensors in parallel, and verify the digest of each block before use.

Adjacent blocks are fetched together, in fetches of at most ``CHUNK_BYTES``. Large segments of a fetch are read directly into
their tensor, and all others into a buffer. The digests are computed from memory, piece by piece, and then the small segments
are copied out of the buffer. The verified bytes are therefore the bytes in use, and the additional memory is one buffer per
thread. Each block is fetched once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dtrain.checkpoint import layout
from dtrain.checkpoint.data_file import FileOpener, ReadableFile, verify_pieces
from dtrain.checkpoint.fetch_plan import Fetch, plan_fetches
from dtrain.checkpoint.host_buffers import BufferPool, GatherBuffer, view_as
from dtrain.checkpoint.layout import DTYPES, TensorRef
from dtrain.checkpoint.reshard import ReadItem
from dtrain.errors import CorruptCheckpointError
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


class _Segment(NamedTuple):
    """Bytes ``[begin, end)`` of a file inside of one fetch, and their target: memory, a gather buffer, or a new tensor."""

    begin: int
    end: int
    key: str
    memory: memoryview | None
    gather_buffer: GatherBuffer | None


def read_tensors(
    sizes: Mapping[str, tuple[int, ...]],
    reads: Iterable[ReadItem],
    refs: Mapping[str, TensorRef],
    open_file: FileOpener,
    *,
    targets: Mapping[str, Tensor] | None = None,
    shareable: Container[str] = (),
    verify: Iterable[ReadItem] = (),
) -> dict[str, Tensor]:
    """Read tensors on the CPU with the stored dtypes.

    Args:
        sizes: shape of the region of each tensor needed on this rank, by key.
        reads: reads that fill all tensors, in the order of the files.
        refs: stored dtypes, by key.
        open_file: function that opens the file of a number.
        targets: tensors by key, filled in place if plain, contiguous, on the CPU and of the stored dtype. Others are new.
        shareable: keys of tensors that may share memory with others, because the caller copies them. Saves a copy.
        verify: reads whose blocks are verified only.

    Mutates: ``targets``.

    Raises:
        CorruptCheckpointError: bytes that do not match their digest, or a file that is too short.
        OSError: an unreadable file.
    """
    layers = list(_split_repeated_reads(list(reads))) or [[]]
    to_verify = list(verify)
    with torch.no_grad(), ExitStack() as stack:
        host_tensors = _HostTensors(sizes, refs, targets or {}, shareable)
        for layer in layers:
            by_file: dict[int, tuple[list[ReadItem], list[tuple[int, int]]]] = defaultdict(lambda: ([], []))
            for read in layer:
                by_file[read.file][0].append(read)
            for read in to_verify:
                by_file[read.file][1].append((read.begin, read.end))
            to_verify.clear()
            work: list[tuple[ReadableFile, Fetch, list[_Segment]]] = []
            for number, (of_file, spans) in sorted(by_file.items()):
                file = stack.enter_context(open_file(number))
                spans += [(read.begin, read.end) for read in of_file]
                spans.sort()
                fetches = plan_fetches(file.blocks, spans, size=file.file.size, is_remote=file.file.is_remote)
                segments = host_tensors.split_reads(of_file, fetches)
                work += [(file, *item) for item in zip(fetches, segments, strict=True)]
            buffers = BufferPool()

            def fetch(at: int) -> None:
                # The autograd mode belongs to a thread. The function is called before the next iteration.
                with torch.no_grad():
                    _read_fetch(*work[at], host_tensors, buffers)  # noqa: B023

            remote = any(file.file.is_remote for file, _, _ in work)
            threads = REMOTE_REQUESTS if remote else READ_THREADS if len(work) >= _MIN_THREADED_FETCHES else 1
            for_each_part(len(work), fetch, threads=threads, name="dtrain-read", activity="load")
    return host_tensors.tensors


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


def _split_repeated_reads(reads: list[ReadItem]) -> Iterator[list[ReadItem]]:
    """Split the reads into lists without overlapping bytes. There is one list unless two names share bytes."""
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
    """Tensors to fill, and the memory of large tensors. Fitting targets are filled in place."""

    def __init__(
        self,
        sizes: Mapping[str, tuple[int, ...]],
        refs: Mapping[str, TensorRef],
        targets: Mapping[str, Tensor],
        shareable: Container[str],
    ) -> None:
        self._sizes, self._refs, self._shareable = sizes, refs, shareable
        self._targets = {key: target for key, target in targets.items() if self._fits(key, target)}
        # The size of a row and of the whole in bytes, by shape and dtype.
        self._bytes: dict[tuple[tuple[int, ...], str], tuple[int, int]] = {}
        self._views: dict[str, memoryview] = {}
        self._pool = BufferPool()
        self.tensors: dict[str, Tensor] = {key: self._new(key) for key, size in sizes.items() if 0 in size}

    def _fits(self, key: str, target: Tensor) -> bool:
        # The memory of a subclass may not be that of its values.
        plain = type(target) in (Tensor, nn.Parameter) and target.dtype == DTYPES[self._refs[key].dtype]
        return plain and target.is_cpu and target.is_contiguous()

    def _new(self, key: str) -> Tensor:
        target = self._targets.get(key)
        if target is None:
            return torch.empty(self._sizes[key], dtype=DTYPES[self._refs[key].dtype], device="cpu")
        # Writes to the memory do not count as changes of the tensor, but an operation on a part of no elements does.
        target.view(-1)[:0].zero_()
        return target

    def split_reads(self, reads: Sequence[ReadItem], fetches: Sequence[Fetch]) -> list[list[_Segment]]:
        """Split the reads of a file, which are in order and do not overlap, into the segments of each fetch."""
        segments: list[list[_Segment]] = [[] for _ in fetches]
        at = 0
        for read in reads:
            while fetches[at].end <= read.begin and at < len(fetches) - 1:
                at += 1
            self._split_read(read, fetches, at, segments)
        return segments

    def _split_read(self, read: ReadItem, fetches: Sequence[Fetch], at: int, segments: list[list[_Segment]]) -> None:
        _, begin, end, key, _, _, target, contiguous = read
        size, stored = self._sizes[key], self._refs[key].dtype
        if (size, stored) not in self._bytes:
            dtype = DTYPES[stored]
            self._bytes[size, stored] = prod(size[1:]) * dtype.itemsize, prod(size) * dtype.itemsize
        row, whole = self._bytes[size, stored]
        if contiguous and end - begin == whole < _DIRECT_MIN_BYTES and end <= fetches[at].end:
            segments[at].append(_Segment(begin, end, key, None, None))
            return
        if key not in self.tensors:
            self.tensors[key] = self._new(key)
        block = None if contiguous else GatherBuffer(read, DTYPES[stored], self.tensors[key], self._pool)
        if contiguous and key not in self._views:
            self._views[key] = _bytes_of(self.tensors[key])
        begin_in_target = target[0][0] * row if target else 0
        low = begin
        while low < end:
            # A file that is too short has no fetch for its missing bytes, which the last fetch reports.
            high = min(end, fetches[at].end) if at < len(fetches) - 1 else end
            memory = None
            if block is None:
                memory = self._views[key][begin_in_target + low - begin : begin_in_target + high - begin]
            if high > low:
                segments[at].append(_Segment(low, high, key, memory, block))
            low, at = high, at + 1

    def split_buffer(self, buffer: Tensor, start: int, segments: Sequence[_Segment]) -> bool:
        """Create tensors from small segments in ``buffer``, whose first byte is byte ``start`` of the file.

        Returns:
            True if tensors share the memory of the buffer. They do not if most of the buffer would be kept for nothing.
        """
        parts: list[tuple[str, Tensor]] = []
        for name, of_dtype in groupby(segments, key=lambda segment: self._refs[segment.key].dtype):
            dtype = DTYPES[name]
            run: list[_Segment] = []
            for segment in of_dtype:
                # Third-party files may have unaligned tensors.
                if run and (segment.begin - run[-1].end) % dtype.itemsize:
                    parts += self._split_run(buffer, start, run, dtype)
                    run = []
                run.append(segment)
            parts += self._split_run(buffer, start, run, dtype)
        in_place = [(self._targets[key], part) for key, part in parts if key in self._targets]
        if in_place:
            torch._foreach_copy_([target for target, _ in in_place], [part for _, part in in_place])
            self.tensors.update((key, self._targets[key]) for key, _ in parts if key in self._targets)
            parts = [(key, part) for key, part in parts if key not in self._targets]
        shareable_bytes = sum(end - begin for begin, end, key, _, _ in segments if key in self._shareable)
        share = 2 * shareable_bytes >= len(buffer)
        self.tensors.update((key, part if share and key in self._shareable else part.clone()) for key, part in parts)
        return share

    def _split_run(self, buffer: Tensor, start: int, run: Sequence[_Segment], dtype: torch.dtype) -> list[tuple[str, Tensor]]:
        """Return the view of each segment of a run."""
        low, high = run[0].begin - start, run[-1].end - start
        typed = view_as(buffer[low:high], dtype)
        sizes = {self._sizes[segment.key] for segment in run}
        # If all segments have one shape and are adjacent, one view splits them.
        if len(sizes) == 1 and len(typed) == len(run) * prod(size := sizes.pop()):
            views = typed.view(len(run), *size).unbind()
            return [(segment.key, view) for segment, view in zip(run, views, strict=True)]
        counts: list[int] = []
        # The key None marks a gap.
        keys: list[str | None] = []
        at = run[0].begin
        for segment in run:
            if segment.begin > at:
                counts.append((segment.begin - at) // dtype.itemsize)
                keys.append(None)
            counts.append((segment.end - segment.begin) // dtype.itemsize)
            keys.append(segment.key)
            at = segment.end
        flat = zip(keys, typed.split_with_sizes(counts), strict=True)
        return [(key, part.view(self._sizes[key])) for key, part in flat if key is not None]


def _read_fetch(
    file: ReadableFile, fetch: Fetch, segments: Sequence[_Segment], tensors: _HostTensors, buffers: BufferPool
) -> None:
    """Make a fetch, verify the digests of its blocks, and copy its segments to their tensors."""
    begin, blocks = fetch.begin, file.blocks
    # A file without digests may be shorter than its header says, which the read of the last segment reports.
    end = max(fetch.end, *(segment.end for segment in segments[-1:]), 0)
    parts = list(_plan_fetch(file, segments, begin, end))
    buffer = buffers.acquire(end - begin) if any(memory is None for _, _, memory in parts) else None
    buffer_view = memoryview(b"") if buffer is None else _bytes_of(buffer)
    places = [(at, buffer_view[at - begin : stop - begin] if memory is None else memory) for at, stop, memory in parts]
    if buffer is not None and not segments and not file.file.is_remote:
        # Bytes that are only verified need no memory of their own.
        places = [(at, buffer_view[: min(_PIECE_BYTES, end - at)]) for at in range(begin, end, _PIECE_BYTES)]
    pieces = _read_pieces(file, places)
    if blocks is None:
        deque(pieces, maxlen=0)
    else:
        verify_pieces(file.name, blocks, fetch.blocks, pieces)
    is_shared = _distribute(file, segments, tensors, buffer, buffer_view, begin)
    if buffer is not None and not is_shared:
        buffers.release(buffer)


def _read_pieces(file: ReadableFile, places: Sequence[tuple[int, memoryview]]) -> Iterator[memoryview]:
    """Read from the file into memory, in order. Each piece is still in the processor's cache when it is digested."""
    for begin, memory in places:
        # Requests to a server should be large.
        step = len(memory) if file.file.is_remote else _PIECE_BYTES
        for at in range(0, len(memory), step):
            piece = memory[at : at + step]
            count = file.file.read_into(begin + at, piece)
            if count != len(piece):
                end, found = begin + len(memory), begin + at + count
                raise CorruptCheckpointError(f"{file.name}: must have at least {end} bytes, ends at byte {found}")
            yield piece


def _plan_fetch(
    file: ReadableFile, segments: Sequence[_Segment], start: int, stop: int
) -> Iterator[tuple[int, int, memoryview | None]]:
    """Plan the reads of ``[start, stop)`` in order, each into its memory, or into the buffer if None.

    If the file has digests, all bytes are read. Otherwise only segments are read, and adjacent segments for the buffer are
    read together.
    """
    at = start
    # Begin of the current range for the buffer, which ends at ``at``.
    low = None
    for segment in segments:
        # Bytes between segments are only needed for a digest.
        if segment.begin > at and file.blocks is None:
            if low is not None:
                yield low, at, None
            low, at = None, segment.begin
        if not _is_direct(file, segment):
            low = at if low is None else low
        else:
            low = at if low is None and segment.begin > at else low
            if low is not None:
                yield low, segment.begin, None
            low = None
            yield segment.begin, segment.end, segment.memory
        at = segment.end
    if file.blocks is not None and at < stop:
        low, at = at if low is None else low, stop
    if low is not None:
        yield low, at, None


def _is_direct(file: ReadableFile, segment: _Segment) -> bool:
    """Return True if a segment is read directly into its tensor. Requests to a server should be large."""
    if segment.memory is None:
        return False
    return segment.end - segment.begin >= (layout.CHUNK_BYTES if file.file.is_remote else _DIRECT_MIN_BYTES)


def _distribute(
    file: ReadableFile,
    segments: Sequence[_Segment],
    tensors: _HostTensors,
    buffer: Tensor | None,
    buffer_view: memoryview,
    start: int,
) -> bool:
    """Copy the segments in the buffer to their tensors. Return True if tensors share the memory of the buffer."""
    small = []
    for segment in segments:
        begin, end = segment.begin - start, segment.end - start
        if segment.gather_buffer is not None:
            assert buffer is not None, "gathered segments are read into the buffer"
            segment.gather_buffer.add(segment.begin, buffer[begin:end])
        elif segment.memory is None:
            small.append(segment)
        elif not _is_direct(file, segment):
            segment.memory[:] = buffer_view[begin:end]
    if not small:
        return False
    assert buffer is not None, "small segments are read into the buffer"
    return tensors.split_buffer(buffer, start, small)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data.cast("B")
