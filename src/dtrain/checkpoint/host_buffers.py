"""Host memory for bytes that are read: reusable buffers, and rows that are gathered before they are copied to their tensor."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from dtrain.checkpoint.reshard import ReadItem


class BufferPool:
    """Pool of reusable buffers, because memory that threads free often does not return to the system."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def acquire(self, size: int) -> Tensor:
        """Return an unused buffer of at least ``size`` bytes."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        return buffer if len(buffer) >= size else torch.empty(size, dtype=torch.uint8, device="cpu")

    def release(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        self._free.append(buffer)


class GatherBuffer:
    """Rows of a stored shard that are not contiguous in their tensor; they are copied when all rows have been read."""

    def __init__(self, read: ReadItem, dtype: torch.dtype, target: Tensor, pool: BufferPool) -> None:
        self._read, self._dtype, self._target, self._pool = read, dtype, target, pool
        self._lock = threading.Lock()
        self._buffer: Tensor | None = None
        self._missing = read.end - read.begin

    def add(self, begin: int, data: Tensor) -> None:
        """Add verified bytes of the file from ``begin`` on."""
        if len(data) == self._read.end - self._read.begin:
            self._copy(data)
            return
        # The remaining rows are in another fetch, which another thread may make.
        with self._lock:
            if self._buffer is None:
                self._buffer = self._pool.acquire(self._read.end - self._read.begin)
            at = begin - self._read.begin
            self._buffer[at : at + len(data)].copy_(data)
            self._missing -= len(data)
            if self._missing == 0:
                self._copy(self._buffer[: self._read.end - self._read.begin])
                self._pool.release(self._buffer)
                self._buffer = None

    def _copy(self, data: Tensor) -> None:
        block = view_as(data, self._dtype).view(self._read.block)
        source, target = (tuple(slice(*span) for span in spans) for spans in (self._read.source, self._read.target))
        self._target[target].copy_(block[source])


def view_as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as values; unaligned bytes are copied."""
    return (data if data.storage_offset() % dtype.itemsize == 0 else data.clone()).view(dtype)
