"""memory_stats: the allocator's counters under their names, the fullest rank and which it is, and no wait for the device."""

from types import SimpleNamespace

import pytest
import torch

from dtrain.dist.init import get_dist_info
from dtrain.monitors import hardware
from dtrain.monitors.hardware import local_memory_stats, memory_stats
from dtrain.testing import count_collectives, count_host_syncs, memory_budget

CPU = SimpleNamespace(device=torch.device("cpu"))
HOST = {"memory/rss_bytes", "memory/peak_rss_bytes"}
STATS = {
    "allocated_bytes.all.current": 600,
    "allocated_bytes.all.peak": 900,
    "reserved_bytes.all.current": 800,
    "reserved_bytes.all.peak": 1000,
    "num_alloc_retries": 3,
    "num_ooms": 1,
}


def test_cpu_reports_process_memory():
    found = local_memory_stats(CPU)
    assert set(found) == HOST
    assert 1 << 20 < found["memory/rss_bytes"] <= found["memory/peak_rss_bytes"]


def test_memory_budget_reports_its_counters():
    with memory_budget(1 << 20):
        kept = torch.zeros(100)
        _ = torch.zeros(200)
        del _
        found = local_memory_stats(CPU)
        assert kept.numel() == 100
    assert (found["memory/allocated_bytes"], found["memory/peak_bytes"]) == (400.0, 1200.0)


@pytest.mark.parametrize("stats", [STATS, {}], ids=["used", "unused"])
def test_gpu_reports_allocator_counters(monkeypatch, stats):
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    found = local_memory_stats(SimpleNamespace(device=torch.device("cuda", 0)))
    assert {name: value for name, value in found.items() if name not in HOST} == {
        "memory/allocated_bytes": stats.get("allocated_bytes.all.current", 0),
        "memory/peak_bytes": stats.get("allocated_bytes.all.peak", 0),
        "memory/reserved_bytes": stats.get("reserved_bytes.all.current", 0),
        "memory/peak_reserved_bytes": stats.get("reserved_bytes.all.peak", 0),
        "memory/retries": stats.get("num_alloc_retries", 0),
        "memory/out_of_memory": stats.get("num_ooms", 0),
        "memory/fragmentation": 0.25 if stats else 0.0,
    }


def test_missing_proc_gives_no_readings(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "PROC", tmp_path)
    assert local_memory_stats(CPU) == {}


def reduced() -> tuple[dict[str, float], dict[str, float], int, list[str]]:
    """All ranks' numbers and this one's, inside a budget on rank 1 only, and what it took."""
    with memory_budget({1: 1 << 20}):
        kept = [torch.zeros(100 * (1 + get_dist_info().rank))]
        memory_stats(CPU)  # makes the record that later calls use
        with count_host_syncs() as waits, count_collectives() as talk:
            found = memory_stats(CPU)
        mine = local_memory_stats(CPU)
        kept.clear()
    return found, mine, waits.count, [call.op for call in talk.records]


def test_rank_with_highest_memory_is_named(ranks):
    rows = ranks(2).run(reduced)
    assert rows[0][0] == rows[1][0]
    found = rows[0][0]
    assert set(found) == {
        name + end for name in {*HOST, "memory/allocated_bytes", "memory/peak_bytes"} for end in ("", "/rank")
    }
    assert found["memory/allocated_bytes/rank"] == 1.0
    assert found["memory/allocated_bytes"] == rows[1][1]["memory/allocated_bytes"] >= 800.0
    for name in HOST:
        assert found[f"{name}/rank"] in (0.0, 1.0)


def test_reduction_uses_one_collective_and_at_most_one_sync(ranks):
    for _, _, waits, calls in ranks(2).run(reduced):
        assert waits <= 1  # numbers that were on the host all along
        assert len(calls) == 1


def missing_on_rank_1() -> dict[str, float]:
    gpu = SimpleNamespace(device=torch.device("cuda", 0))
    original = torch.cuda.memory_stats
    torch.cuda.memory_stats = lambda device: STATS
    try:
        return memory_stats(gpu if get_dist_info().rank == 0 else CPU)
    finally:
        torch.cuda.memory_stats = original


def test_ranks_with_different_counters_agree_on_names(ranks):
    first, second = ranks(2).run(missing_on_rank_1)
    assert first == second
    assert (first["memory/retries"], first["memory/retries/rank"]) == (3.0, 0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_gpu_counts_allocated_tensor():
    gpu = SimpleNamespace(device=torch.device("cuda", torch.cuda.current_device()))
    before = local_memory_stats(gpu)["memory/allocated_bytes"]
    kept = torch.zeros(1 << 20, device="cuda")
    found = local_memory_stats(gpu)
    assert found["memory/allocated_bytes"] - before >= kept.numel() * 4
    assert found["memory/peak_bytes"] >= found["memory/allocated_bytes"]
    assert 0.0 <= found["memory/fragmentation"] < 1.0
