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


def test_nothing_is_known_of_a_cpu():
    assert get_device_memory(CPU) is None


def test_the_innermost_gauge_is_found_on_every_device():
    outer, inner = Fixed(), Fixed()
    with use_device_memory(outer):
        with use_device_memory(inner):
            assert get_device_memory(CPU) is inner
            assert get_device_memory(torch.device("cuda", 0)) is inner
        assert get_device_memory(CPU) is outer
    assert get_device_memory(CPU) is None


def test_a_gauge_is_gone_after_an_error():
    with pytest.raises(ZeroDivisionError), use_device_memory(Fixed()):
        raise ZeroDivisionError
    assert get_device_memory(CPU) is None


def test_other_threads_find_it_too():
    gauge, found = Fixed(), []
    with use_device_memory(gauge):
        thread = threading.Thread(target=lambda: found.append(get_device_memory(CPU)))
        thread.start()
        thread.join(90)
    assert found == [gauge]


def test_contexts_may_end_in_the_order_in_which_they_began():
    first, second = Fixed(), Fixed()
    one, two = use_device_memory(first), use_device_memory(second)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert get_device_memory(CPU) is second
    two.__exit__(None, None, None)
    assert get_device_memory(CPU) is None


def test_free_is_never_negative():
    assert Fixed(live=4).read().free == 6
    assert Fixed(live=12).read().free == 0


STATS = {
    "allocated_bytes.all.current": 3,
    "allocated_bytes.all.peak": 5,
    "reserved_bytes.all.current": 8,
    "num_alloc_retries": 2,
}


@pytest.mark.parametrize(("share", "capacity"), [(1.0, 68), (0.5, 50)], ids=["all_that_is_free", "a_share"])
def test_cuda_has_what_is_free_and_what_its_allocator_holds(monkeypatch, share, capacity):
    """Of 100 bytes 60 are free and 8 in the allocator: 32 belong to others."""
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: STATS)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60, 100))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: share)
    reading = get_device_memory(torch.device("cuda", 0)).read()
    assert reading == MemoryStats(live=3, peak=5, capacity=capacity, used_by_others=32, alloc_retries=2)


@pytest.mark.gpu
@needs_cuda
def test_cuda_reads_what_tensors_hold_and_what_there_is():
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
def test_cuda_counts_retries_and_gives_its_cache_back():
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
def test_cuda_capacity_is_within_the_share_of_this_process():
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(0.25, device)
    try:
        assert get_device_memory(device).read().capacity <= total // 4
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
