"""Which errors mean that there was no memory for a tensor, and that the process can go on with less."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

__all__ = ["is_out_of_memory"]

# torch has one class for what its CUDA allocator refuses. All else is a RuntimeError that only its text tells apart.
_OOM_PATTERN = re.compile(
    "|".join(
        (
            r"DefaultCPUAllocator: (can't allocate|not enough) memory",
            r"std::bad_alloc",
            r"(CUDA|HIP|XPU|MPS|MTIA)( backend)? out of memory",  # from code that throws the text without the class
            r"(CUDA|HIP)( driver| runtime)? error: (out of memory|hipErrorOutOfMemory)",  # pinned memory, graphs, kernels
            r"\bCU(BLAS|DNN|SOLVER|SPARSE)_STATUS_(INTERNAL_ERROR_(HOST|DEVICE)_)?ALLOC(ATION)?_FAILED",
            r"\bCUFFT_ALLOC_FAILED",
            r"\b(HIPBLAS|ROCBLAS|MIOPEN)_STATUS_(ALLOC_FAILED|MEMORY_ERROR)",
            # torch tries one convolution algorithm after the other, and swallows that there was no memory for the workspace
            r"unable to find a valid cuDNN algorithm",
            r"unable to find an engine to execute this computation",
        )
    ),
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed that a smaller batch may not need, and this process is sound.

    True for ``torch.OutOfMemoryError``, ``MemoryError``, the CPU allocator's ``RuntimeError``, the allocation failures of
    cuBLAS, cuDNN and their like, and an error that was raised ``from`` one of these. False for what a collective raises (NCCL
    reports its own lack of memory as ``DistBackendError``): ranks are then no longer at the same place, and less data does not
    help.
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
