"""Device memory: the gauge of each device, and the values that CUDA's gauge reads."""

import json
import pickle
import threading

import pytest
import torch
import torch.distributed as dist

from dtrain.errors import ConfigError
from dtrain.memory.device_memory import MemoryStats, get_device_memory, is_out_of_memory, use_device_memory, write_snapshot
from dtrain.testing import memory_budget

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CPU = torch.device("cpu")


class Fixed:
    """A gauge that always reads the same."""

    def __init__(self, live: int = 1, capacity: int = 10) -> None:
        self.reading = MemoryStats(live=live, peak=live, capacity=capacity, used_by_others=0, alloc_retries=0)

    def reset(self) -> None: ...

    def read(self) -> MemoryStats:
        return self.reading

    def release(self) -> None: ...


def test_cpu_has_no_device_memory_gauge():
    assert get_device_memory(CPU) is None


def test_innermost_gauge_applies_to_every_device():
    outer, inner = Fixed(), Fixed()
    with use_device_memory(outer):
        with use_device_memory(inner):
            assert get_device_memory(CPU) is inner
            assert get_device_memory(torch.device("cuda", 0)) is inner
        assert get_device_memory(CPU) is outer
    assert get_device_memory(CPU) is None


def test_gauge_is_removed_after_an_error_and_visible_in_other_threads():
    gauge, seen = Fixed(), []
    thread = threading.Thread(target=lambda: seen.append(get_device_memory(CPU)))
    with use_device_memory(gauge):
        thread.start()
        thread.join(90)
    with pytest.raises(ZeroDivisionError), use_device_memory(gauge):
        raise ZeroDivisionError
    assert seen == [gauge]
    assert get_device_memory(CPU) is None


def test_gauge_contexts_may_exit_in_entry_order():
    first, second = Fixed(), Fixed()
    one, two = use_device_memory(first), use_device_memory(second)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert get_device_memory(CPU) is second
    two.__exit__(None, None, None)
    assert get_device_memory(CPU) is None


def test_free_memory_is_never_negative():
    assert Fixed(live=4).read().free == 6
    assert Fixed(live=12).read().free == 0


STATS = {
    "allocated_bytes.all.current": 3,
    "allocated_bytes.all.peak": 5,
    "reserved_bytes.all.current": 8,
    "num_alloc_retries": 2,
}


@pytest.mark.parametrize(("share", "capacity"), [(1.0, 68), (0.5, 50)], ids=["all_that_is_free", "a_share"])
def test_cuda_capacity_is_free_plus_allocator_memory(monkeypatch, share, capacity):
    """Of 100 bytes 60 are free and 8 in the allocator: 32 belong to other processes."""
    monkeypatch.setattr("dtrain.memory.device_memory.counts_memory", lambda device_type: True)
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: STATS)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (60, 100))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
    reading = get_device_memory(torch.device("cuda", 0)).read()
    assert reading == MemoryStats(live=3, peak=5, capacity=capacity, used_by_others=32, alloc_retries=2)


@pytest.mark.gpu
@needs_cuda
def test_cuda_gauge_reads_live_peak_and_capacity():
    device = torch.device("cuda", torch.cuda.current_device())
    gauge = get_device_memory(device)
    gauge.reset()
    before = gauge.read()
    tensor = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    held = gauge.read()
    del tensor
    after = gauge.read()
    assert (held.live - before.live, held.peak - before.live) == (64 << 20, 64 << 20)
    assert (after.live, after.peak) == (before.live, held.peak)
    gauge.reset()
    assert gauge.read().peak == before.live
    assert 0 < held.capacity <= torch.cuda.get_device_properties(device).total_memory
    assert held.capacity + held.used_by_others == pytest.approx(torch.cuda.get_device_properties(device).total_memory, rel=0.01)


@pytest.mark.gpu
@needs_cuda
def test_cuda_gauge_counts_retries_and_releases_the_cache():
    device = torch.device("cuda", torch.cuda.current_device())
    gauge = get_device_memory(device)
    gauge.release()
    # Tensors of other tests may keep memory reserved.
    before = torch.cuda.memory_reserved(device)
    torch.empty(64 << 20, dtype=torch.uint8, device=device)
    assert torch.cuda.memory_reserved(device) >= 64 << 20
    gauge.release()
    assert torch.cuda.memory_reserved(device) <= before
    retries = gauge.read().alloc_retries
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    assert gauge.read().alloc_retries == retries + 1


@pytest.mark.gpu
@needs_cuda
def test_cuda_capacity_respects_the_per_process_memory_fraction():
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(0.25, device)
    try:
        assert get_device_memory(device).read().capacity <= total // 4
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


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
    except BaseException as caught:  # noqa: BLE001  # the very object, with the attributes that raising adds
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


def test_snapshot_in_a_memory_budget_lists_the_largest_storages(tmp_path):
    with memory_budget(1000, stack_depth=1):
        kept = [torch.zeros(3), torch.zeros(2, 5), torch.zeros(4)]
        torch.zeros(30)
        written = write_snapshot(tmp_path / "rank{rank}.json", max_storages=2)
    content = json.loads((tmp_path / "rank0.json").read_text())
    assert written == str((tmp_path / "rank0.json").resolve())
    assert (content["rank"], content["live"], content["peak"], content["capacity"]) == (0, 68, 188, 1000)
    assert [(row["bytes"], row["shape"], row["dtype"]) for row in content["storages"]] == [
        (40, [2, 5], "float32"),
        (16, [4], "float32"),
    ]
    assert all(row["made_by"] == "aten.zeros.default" and row["stack"][0].startswith(__file__) for row in content["storages"])
    assert content["left_out"] == 1
    assert len(kept) == 3


def test_snapshot_overwrites_an_existing_file(tmp_path):
    (tmp_path / "now.json").write_text("before")
    with memory_budget(1000):
        write_snapshot(str(tmp_path / "now.json"))
    assert json.loads((tmp_path / "now.json").read_text())["storages"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["now.json"]


def test_snapshot_on_cpu_without_a_budget_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"device must be a CUDA device, got cpu. On a CPU, use"):
        write_snapshot(tmp_path / "now.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_snapshot_on_cuda_is_the_torch_memory_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "dtrain.memory.device_memory.get_dist_info", lambda: type("Info", (), {"rank": 3, "device": torch.device("cuda", 0)})
    )
    kept = torch.zeros(1 << 20, device="cuda")
    write_snapshot(tmp_path / "rank{rank}.pickle")
    content = pickle.loads((tmp_path / "rank3.pickle").read_bytes())
    assert sum(segment["allocated_size"] for segment in content["segments"]) >= kept.nbytes
