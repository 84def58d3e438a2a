"""Errors that mean that there is no memory, and those that only look like it."""

import pytest
import torch
import torch.distributed as dist

from dtrain.memory.oom import is_out_of_memory

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.2 GiB is free."
NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:2241, unhandled cuda error, NCCL version 2.27.3\nncclUnhandledCudaError: Call to CUDA "
    "function failed.\nLast error:\nCuda failure 2 'out of memory'"
)

YES = {
    "cuda": torch.OutOfMemoryError(CUDA),
    "cuda_text": RuntimeError(CUDA),
    "cuda_pinned": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    "cuda_driver": RuntimeError("CUDA driver error: out of memory"),
    "hip": RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"),
    "mps": RuntimeError("MPS backend out of memory (MPS allocated: 17.90 GiB)"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cublas_workspace": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasSgemm( handle, opa, opb)`"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cudnn_9": RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    "cudnn_algorithms": RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
    "cudnn_engines": RuntimeError("GET was unable to find an engine to execute this computation after trying 9 plans."),
    "cusolver": RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    "cufft": RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
    "cpu": RuntimeError(
        "[enforce fail at alloc_cpu.cpp] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
    ),
    "cpu_windows": RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    "c++": RuntimeError("std::bad_alloc"),
    "python": MemoryError(),
}
NO = {
    "other": RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    "overflow": RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904]"),
    "value": ValueError(CUDA),
    "disk": OSError(28, "No space left on device"),
    "cublas_other": RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    "assertion": RuntimeError("CUDA error: device-side assert triggered"),
    "nccl": dist.DistBackendError(NCCL),
    "interrupt": KeyboardInterrupt(),
}


@pytest.mark.parametrize("error", YES.values(), ids=YES)
def test_allocator_errors_are_out_of_memory(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", NO.values(), ids=NO)
def test_other_errors_are_not_out_of_memory(error):
    assert not is_out_of_memory(error)


def raised(error: BaseException, *, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:  # noqa: BLE001  # the very object, with what raising adds to it
        return caught


def test_error_caused_by_oom_is_out_of_memory():
    inner = raised(RuntimeError("block 3"), cause=torch.OutOfMemoryError(CUDA))
    assert is_out_of_memory(raised(ValueError("in forward"), cause=inner))


def test_collective_error_caused_by_oom_is_not_out_of_memory():
    assert not is_out_of_memory(raised(dist.DistNetworkError("reset"), cause=torch.OutOfMemoryError(CUDA)))


def test_error_while_handling_oom_is_not_out_of_memory():
    mistake = ValueError("in the handler")
    mistake.__context__ = torch.OutOfMemoryError(CUDA)
    assert not is_out_of_memory(mistake)


def test_cyclic_exception_causes_terminate():
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def test_cpu_allocator_error_message_is_recognized():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 62, dtype=torch.uint8)
    assert is_out_of_memory(refused.value)
