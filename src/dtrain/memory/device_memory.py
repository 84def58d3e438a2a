"""Measure the memory of a device, recognize errors that mean out of memory, and write the tensors in memory to a file.

On an accelerator the numbers come from the caching allocator. On a CPU nothing counts the bytes of tensors, so memory is
measured only inside ``testing.memory_budget``, which installs its own ``DeviceMemory``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from dtrain import storage
from dtrain.device import backend_function, counts_memory, is_accelerator
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.memory.live_tensors import LiveStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """Memory of one process, in bytes.

    Args:
        live: bytes held by this process's tensors.
        peak: most bytes held since the last ``reset``.
        capacity: bytes that this process's tensors may hold. On an accelerator: the free memory of the device and the memory
            of this process's allocator, within the share that ``set_per_process_memory_fraction`` allows.
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
class _AllocatorMemory:
    """Memory of the caching allocator of one accelerator.

    Its counters are on the host, so a read waits for no work of the device. ``get_memory_info`` asks the driver, which takes
    some tens of microseconds: read at the edges of a step, not in every operation.
    """

    device: torch.device

    def reset(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.device)

    def read(self) -> MemoryStats:
        stats = torch.accelerator.memory_stats(self.device)
        free, total = torch.accelerator.get_memory_info(self.device)
        reserved = stats.get("reserved_bytes.all.current", 0)
        # Not each backend can limit a process.
        get_fraction = backend_function(self.device, "get_per_process_memory_fraction")
        allowed = total if get_fraction is None else int(total * get_fraction(self.device))
        return MemoryStats(
            live=stats.get("allocated_bytes.all.current", 0),
            peak=stats.get("allocated_bytes.all.peak", 0),
            capacity=min(free + reserved, allowed),
            used_by_others=max(0, total - free - reserved),
            alloc_retries=stats.get("num_alloc_retries", 0),
        )

    def release(self) -> None:
        # empty_cache takes no device and creates a context on the current device.
        with torch.accelerator.device_index(self.device.index):
            torch.accelerator.empty_cache()


# A stack of the process, innermost last. It is not per thread: autograd's threads read the memory of the thread that called
# backward. The key is the context, because contexts in two threads may end in another order than they began.
_overrides: dict[object, DeviceMemory] = {}


def get_device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the installed ``DeviceMemory``, else the allocator's; None if the memory of ``device`` cannot be measured."""
    installed = list(_overrides.values())
    if installed:
        return installed[-1]
    return _AllocatorMemory(device=device) if is_accelerator(device) and counts_memory(device.type) else None


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
    context = object()
    _overrides[context] = memory
    try:
        yield
    finally:
        del _overrides[context]


@runtime_checkable
class _ListsStorages(Protocol):
    """Device memory that lists its storages, such as the memory budget of a test."""

    def storages(self) -> list[LiveStorage]: ...


def write_snapshot(path: storage.AnyPath | str, *, max_storages: int = 1000) -> str:
    """Write the tensors in this rank's device memory to a file, and return its path.

    On CUDA the file is torch's own snapshot (a pickle) for https://docs.pytorch.org/memory_viz, with all segments and blocks,
    and their call stacks if ``torch.cuda.memory._record_memory_history()`` was called before. Inside ``testing.memory_budget``
    the file is JSON: ``live``, ``peak``, ``capacity``, and the largest storages with bytes, shape, dtype, the operation that
    allocated each, and the call stack if ``stack_depth`` is set.

    Args:
        path: path of the file, which is replaced; ``{rank}`` in the path becomes this rank. Each rank needs its own path.
        max_storages: number of storages in the JSON file.

    Example:
        if dt.memory.is_out_of_memory(error):
            path = dt.memory.write_snapshot("snapshots/oom-{rank}.pickle")
            print(f"memory snapshot in {path}")

    Raises:
        ConfigError: the memory cannot be measured: a CPU without a budget.
    """
    info = get_dist_info()
    memory = get_device_memory(info.device)
    rank_path = str(path).replace("{rank}", str(info.rank))
    target = storage.resolve_path(Path(rank_path) if isinstance(path, Path) else rank_path)
    if isinstance(memory, _ListsStorages):
        stats = memory.read()
        numbers = {"live": stats.live, "peak": stats.peak, "capacity": stats.capacity}
        rows = [asdict(row) for row in memory.storages()]
        text = json.dumps(
            {"rank": info.rank, **numbers, "storages": rows[:max_storages], "left_out": len(rows[max_storages:])}, indent=1
        )
        storage.replace_file(target, text.encode())
    elif info.device.type == "cuda":
        # torch writes to local folders only.
        torch.cuda.memory._dump_snapshot(str(target))
    else:
        raise ConfigError(
            f"write_snapshot: device must be a CUDA device, got {info.device}. On a CPU, use testing.memory_budget."
        )
    return str(target)


def snapshot_suffix() -> str | None:
    """Return the suffix of a snapshot of this rank's device, ``.json`` or ``.pickle``; None if no snapshot is possible."""
    info = get_dist_info()
    if isinstance(get_device_memory(info.device), _ListsStorages):
        return ".json"
    return ".pickle" if info.device.type == "cuda" else None


# torch has one class for out of memory of its CUDA allocator. All other sources raise a RuntimeError, known only by its text.
_OOM_PATTERN = re.compile(
    "|".join(
        (
            r"DefaultCPUAllocator: (can't allocate|not enough) memory",
            r"std::bad_alloc",
            # Raised as text without the class.
            r"(CUDA|HIP|XPU|MPS|MTIA)( backend)? out of memory",
            # Raised for pinned memory, graphs and kernels.
            r"(CUDA|HIP)( driver| runtime)? error: (out of memory|hipErrorOutOfMemory)",
            r"\bCU(BLAS|DNN|SOLVER|SPARSE)_STATUS_(INTERNAL_ERROR_(HOST|DEVICE)_)?ALLOC(ATION)?_FAILED",
            r"\bCUFFT_ALLOC_FAILED",
            r"\b(HIPBLAS|ROCBLAS|MIOPEN)_STATUS_(ALLOC_FAILED|MEMORY_ERROR)",
            # torch tries one convolution algorithm after another, and drops the error that the workspace had no memory.
            r"unable to find a valid cuDNN algorithm",
            r"unable to find an engine to execute this computation",
        )
    ),
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` means out of memory, a smaller batch may help, and the process is usable.

    True for ``torch.OutOfMemoryError``, ``MemoryError``, the CPU allocator's ``RuntimeError``, allocation failures of cuBLAS,
    cuDNN and similar libraries, and an error raised ``from`` one of these. False for errors of collectives (NCCL reports its
    own lack of memory as ``DistBackendError``): after such an error ranks are out of step, and a smaller batch does not help.

    Example:
        try:
            state, metrics = step(state, batch)
        except Exception as error:
            if not dt.memory.is_out_of_memory(error):
                raise
            dt.memory.write_snapshot("oom-{rank}.pickle")
    """
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if isinstance(current, dist.DistError):
            return False
        if isinstance(current, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(current, RuntimeError) and _OOM_PATTERN.search(str(current)):
            return True
        current = current.__cause__
    return False
