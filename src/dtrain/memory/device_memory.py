"""What is known about the memory of a device: now, at most, and how much there is.

One reading has the same fields wherever it comes from. On CUDA that is the caching allocator; on a CPU nothing counts the bytes
of tensors, so there is a gauge only inside ``testing.memory_budget``, which installs its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["DeviceMemory", "MemoryStats", "get_device_memory", "release_cached_memory", "use_device_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """Memory in bytes, as one process sees it.

    Args:
        live: what this process's tensors hold now.
        peak: the most that they have held since the last ``reset``.
        capacity: what they may hold. On CUDA what is free on the device, and what this process's allocator already has from it,
            within the share set by ``torch.cuda.set_per_process_memory_fraction``.
        used_by_others: what is held on the device by anything but this process's allocator: other processes, and the context and
            libraries of this one, which the driver does not tell apart. 0 where there is no device.
        alloc_retries: how often the allocator has found nothing, given its cache back and tried again; so far, in this process.
    """

    live: int
    peak: int
    capacity: int
    used_by_others: int
    alloc_retries: int

    @property
    def free(self) -> int:
        """What tensors could still take, and never less than 0."""
        return max(0, self.capacity - self.live)


class DeviceMemory(Protocol):
    """Reads the memory of one device for this process."""

    def reset(self) -> None:
        """Let the peak start again from what is live."""

    def read(self) -> MemoryStats:
        """The memory as it is now; does not wait for the device."""

    def release(self) -> None:
        """Give memory that is cached, and held by no tensor, back to the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CudaMemory:
    """The caching allocator of one CUDA device.

    Its counters live on the host, so reading them waits for nothing that the device computes. ``mem_get_info`` asks the driver,
    some tens of microseconds: a gauge is for the edges of a step, not for every operation.
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
        with torch.cuda.device(self.device):  # empty_cache has no argument for it, and makes a context on the current device
            torch.cuda.empty_cache()


# The innermost last. A stack of the process and not of a thread: autograd's threads must read the gauge of who called backward.
_overrides: list[DeviceMemory] = []
_lock = threading.Lock()


def get_device_memory(device: torch.device) -> DeviceMemory | None:
    """How to read the memory of ``device``: the gauge that is installed, else CUDA's; None where nothing is known of it."""
    with _lock:
        if _overrides:
            return _overrides[-1]
    return _CudaMemory(device=device) if device.type == "cuda" else None


def release_cached_memory(device: torch.device) -> None:
    """Give memory that is cached, and held by no tensor, back to ``device``; nothing where nothing is known of it."""
    gauge = get_device_memory(device)
    if gauge is not None:
        gauge.release()


@contextmanager
def use_device_memory(gauge: DeviceMemory) -> Iterator[None]:
    """A context in which ``gauge`` is that of every device of this process.

    Mutates: what ``get_device_memory`` finds, until the context is left.
    """
    with _lock:
        _overrides.append(gauge)
    try:
        yield
    finally:
        with _lock:
            # The last one of them by identity: two contexts in two threads need not end in the order in which they began.
            position = next(i for i in reversed(range(len(_overrides))) if _overrides[i] is gauge)
            del _overrides[position]
