"""Measure the memory of a device: bytes in use, peak and capacity.

On CUDA the numbers come from the caching allocator. On a CPU nothing counts the bytes of tensors, so memory is measured only
inside ``testing.memory_budget``, which installs its own ``DeviceMemory``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """Memory of one process, in bytes.

    Args:
        live: bytes held by this process's tensors.
        peak: most bytes held since the last ``reset``.
        capacity: bytes that this process's tensors may hold. On CUDA: the free memory of the device and the memory of this
            process's allocator, within the share set by ``torch.cuda.set_per_process_memory_fraction``.
        used_by_others: bytes of the device outside of this process's allocator: other processes, and the context and libraries
            of this process, which the driver does not report separately. 0 without a device.
        alloc_retries: number of times in this process that the allocator freed its cache and tried an allocation again.
    """

    live: int
    peak: int
    capacity: int
    used_by_others: int
    alloc_retries: int

    @property
    def free(self) -> int:
        """Bytes that tensors could still allocate, at least 0."""
        return max(0, self.capacity - self.live)


class DeviceMemory(Protocol):
    """Interface that reads the memory of one device for this process."""

    def reset(self) -> None:
        """Start the peak again from the bytes in use."""

    def read(self) -> MemoryStats:
        """Return the current memory; does not wait for the device."""

    def release(self) -> None:
        """Free cached memory that no tensor holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CudaMemory:
    """Memory of the caching allocator of one CUDA device.

    Its counters are on the host, so a read waits for no work of the device. ``mem_get_info`` asks the driver, which takes some
    tens of microseconds: read at the edges of a step, not in every operation.
    """

    device: torch.device

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> MemoryStats:
        stats = torch.cuda.memory_stats(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = stats.get("reserved_bytes.all.current", 0)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self.device))
        return MemoryStats(
            live=stats.get("allocated_bytes.all.current", 0),
            peak=stats.get("allocated_bytes.all.peak", 0),
            capacity=min(free + reserved, allowed),
            used_by_others=max(0, total - free - reserved),
            alloc_retries=stats.get("num_alloc_retries", 0),
        )

    def release(self) -> None:
        # empty_cache takes no device and creates a context on the current device.
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()


# A stack of the process, innermost last. It is not per thread: autograd's threads read the memory of the thread that called
# backward.
_overrides: list[DeviceMemory] = []
_lock = threading.Lock()


def get_device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the installed ``DeviceMemory``, else the one of CUDA; None if the memory of ``device`` cannot be measured."""
    with _lock:
        if _overrides:
            return _overrides[-1]
    return _CudaMemory(device=device) if device.type == "cuda" else None


def release_cached_memory(device: torch.device) -> None:
    """Free cached memory of ``device`` that no tensor holds, if its memory can be measured."""
    memory = get_device_memory(device)
    if memory is not None:
        memory.release()


@contextmanager
def use_device_memory(memory: DeviceMemory) -> Iterator[None]:
    """Use ``memory`` for every device of this process inside the context.

    Mutates: the result of ``get_device_memory``, until the context ends.
    """
    with _lock:
        _overrides.append(memory)
    try:
        yield
    finally:
        with _lock:
            # Search by identity from the end, because contexts in two threads may end in another order than they began.
            position = next(i for i in reversed(range(len(_overrides))) if _overrides[i] is memory)
            del _overrides[position]
