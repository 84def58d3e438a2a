"""Recognize errors that mean out of memory and leave the process usable."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

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
