"""Device memory: the gauge of each device, and the values that CUDA's gauge reads."""

import threading

import pytest
import torch

from dtrain.memory.device_memory import MemoryStats, get_device_memory, use_device_memory

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


def test_gauge_is_removed_after_an_error():
    with pytest.raises(ZeroDivisionError), use_device_memory(Fixed()):
        raise ZeroDivisionError
    assert get_device_memory(CPU) is None


def test_gauge_is_visible_in_other_threads():
    gauge, found = Fixed(), []
    with use_device_memory(gauge):
        thread = threading.Thread(target=lambda: found.append(get_device_memory(CPU)))
        thread.start()
        thread.join(90)
    assert found == [gauge]


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
    """Of 100 bytes 60 are free and 8 in the allocator: 32 belong to others."""
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: STATS)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
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
    torch.empty(64 << 20, dtype=torch.uint8, device=device)
    gauge.release()
    assert torch.cuda.memory_reserved(device) < 64 << 20
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
