"""system_metrics: rates between two readings of made-up files, GPUs by torch, one rank of each host."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dtrain.dist.init import get_dist_info
from dtrain.monitors import hardware
from dtrain.monitors.hardware import local_memory_stats, memory_stats, system_metrics
from dtrain.testing import count_collectives, count_host_syncs, memory_budget

CPU, GPU = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(device=torch.device("cuda", 0))
NET = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 999999 1 0 0 0 0 0 0 999999 1 0 0 0 0 0 0
  eth0: {received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0
 bond0: {received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0
"""
DISKS = (
    "   7 0 loop0 9 9 999 9 9 9 999 9 0 0 0\n 254 0 vda 9 9 {read} 9 9 9 {written} 9 0 0 0\n 254 1 vda1 9 9 5 9 9 9 5 9 0 0 0\n"
)


class Machine:
    """A /proc and a /sys with known numbers."""

    def __init__(self, root: Path, monkeypatch) -> None:
        self.proc, self.now = root / "proc", 100.0
        for folder in ("sys/class/net/eth0/device", "sys/block/vda/device", "sys/block/loop0", "proc/net"):
            (root / folder).mkdir(parents=True)
        monkeypatch.setattr(hardware, "PROC", self.proc)
        monkeypatch.setattr(hardware, "SYS", root / "sys")
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def say(self, *, busy: int, idle: int, received: int, sent: int, read: int, written: int) -> None:
        (self.proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 7 7\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
        (self.proc / "net" / "dev").write_text(NET.format(received=received, sent=sent))
        (self.proc / "diskstats").write_text(DISKS.format(read=read, written=written))
        (self.proc / "meminfo").write_text("MemTotal:  1000 kB\nMemFree:  1 kB\nMemAvailable:  750 kB\nHugePages_Total: 0\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


MEMORY = {"system/memory_bytes": 256000.0, "system/memory_percent": 25.0}


def test_rates_cover_time_between_calls(machine):
    meter = system_metrics()
    machine.say(busy=100, idle=100, received=1000, sent=2000, read=10, written=20)
    assert meter(CPU) == MEMORY
    machine.say(busy=130, idle=110, received=1500, sent=2200, read=14, written=21)
    machine.now += 2.0
    assert meter(CPU) == {
        "system/cpu_percent": 75.0,
        **MEMORY,
        "system/network_in_bytes_per_s": 250.0,
        "system/network_out_bytes_per_s": 100.0,
        "system/disk_read_bytes_per_s": 1024.0,
        "system/disk_write_bytes_per_s": 256.0,
    }


def test_reset_counter_gives_no_negative_rate(machine):
    meter = system_metrics()
    machine.say(busy=1, idle=1, received=1000, sent=1000, read=10, written=10)
    meter(CPU)
    machine.say(busy=2, idle=2, received=10, sent=2000, read=10, written=10)
    machine.now += 1.0
    readings = meter(CPU)
    assert (readings["system/network_in_bytes_per_s"], readings["system/network_out_bytes_per_s"]) == (0.0, 1000.0)


def test_container_counts_all_interfaces_except_loopback(machine):
    machine.say(busy=1, idle=1, received=1000, sent=10, read=0, written=0)
    (hardware.SYS / "class" / "net" / "eth0" / "device").rmdir()
    counters = hardware.read_counters()
    assert (counters["received"], counters["sent"]) == (2000.0, 20.0)


def test_unreadable_counters_are_omitted(machine):
    meter = system_metrics()
    assert meter(CPU) == {}
    machine.now += 1.0
    assert meter(CPU) == {}
    assert hardware.read_counters() == {}


def test_real_machine_gives_readings():
    meter = system_metrics()
    meter(CPU)
    readings = meter(CPU)
    assert 0.0 < readings["system/memory_percent"] < 100.0
    assert all(value >= 0.0 for value in readings.values())


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    for name, scale in (("utilization", 10), ("temperature", 1), ("power_draw", 1000)):
        monkeypatch.setattr(torch.cuda, name, lambda index, scale=scale: scale * (index + 60), raising=False)


def test_gpu_metrics_cover_gpus_of_local_ranks(machine, gpus, monkeypatch):
    info = SimpleNamespace(local_rank=0, local_world_size=2, node_rank=0)
    monkeypatch.setattr("dtrain.monitors.hardware.get_dist_info", lambda: info)
    assert system_metrics()(GPU) == {
        "system/gpu_percent": 605.0,
        "system/gpu_temperature_c": 61.0,
        "system/gpu_power_w": 121.0,
    }


def test_missing_nvml_warns_once(machine, gpus, monkeypatch):
    def missing(index: int) -> int:
        raise ModuleNotFoundError("pynvml does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "utilization", missing)
    meter = system_metrics()
    with pytest.warns(
        UserWarning, match="system_metrics: NVML must be readable .*: pynvml does not seem .* pip install nvidia-ml-py"
    ):
        assert meter(GPU) == {}
    assert meter(GPU) == {}


def on_ranks(all_hosts: bool) -> dict[str, float]:
    meter = system_metrics(all_hosts=all_hosts)
    meter(CPU)
    return dict(meter(CPU))


def test_only_first_rank_of_host_reads_metrics(ranks):
    first, second = ranks(2).run(on_ranks, False)
    assert "system/memory_bytes" in first
    assert second == {}


def as_two_hosts() -> dict[str, float]:
    """Each rank is a host of its own."""
    info = get_dist_info()
    pretended = SimpleNamespace(local_rank=0, local_world_size=1, node_rank=info.rank)
    from dtrain.monitors import hardware

    hardware.get_dist_info = lambda: pretended
    try:
        return on_ranks(True)
    finally:
        hardware.get_dist_info = get_dist_info


def test_metrics_of_all_hosts_reach_every_rank(ranks):
    one = ranks(2).run(on_ranks, True)
    assert one[0] == one[1]
    assert {name.rsplit("/", 1)[1] for name in one[0]} == {"host0"}
    two = ranks(2).run(as_two_hosts)
    assert two[0] == two[1]
    assert {name.rsplit("/", 1)[1] for name in two[0]} == {"host0", "host1"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:system_metrics. NVML must be readable")
def test_real_gpu_is_read_with_nvml():
    pytest.importorskip("pynvml")
    readings = system_metrics()(GPU)
    assert 0.0 <= readings["system/gpu_percent"] <= 100.0
    assert readings["system/gpu_power_w"] > 0.0


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
    readings = local_memory_stats(CPU)
    assert set(readings) == HOST
    assert 1 << 20 < readings["memory/rss_bytes"] <= readings["memory/peak_rss_bytes"]


def test_memory_budget_reports_its_counters():
    with memory_budget(1 << 20):
        kept = torch.zeros(100)
        _ = torch.zeros(200)
        del _
        readings = local_memory_stats(CPU)
        assert kept.numel() == 100
    assert (readings["memory/allocated_bytes"], readings["memory/peak_bytes"]) == (400.0, 1200.0)


def count_with(monkeypatch: pytest.MonkeyPatch, stats: dict[str, int]) -> None:
    """Let the allocator of CUDA count ``stats``."""
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: stats)
    monkeypatch.setattr("dtrain.monitors.hardware.counts_memory", lambda device_type: True)


@pytest.mark.parametrize("stats", [STATS, {}], ids=["used", "unused"])
def test_gpu_reports_allocator_counters(monkeypatch, stats):
    count_with(monkeypatch, stats)
    readings = local_memory_stats(SimpleNamespace(device=torch.device("cuda", 0)))
    assert {name: value for name, value in readings.items() if name not in HOST} == {
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
    """Return all ranks' numbers and this rank's, inside a budget on rank 1 only, and the cost."""
    with memory_budget({1: 1 << 20}):
        kept = [torch.zeros(100 * (1 + get_dist_info().rank))]
        memory_stats(CPU)  # makes the record that later calls use
        with count_host_syncs() as waits, count_collectives() as talk:
            readings = memory_stats(CPU)
        mine = local_memory_stats(CPU)
        kept.clear()
    return readings, mine, waits.count, [call.op for call in talk.records]


def test_rank_with_highest_memory_is_named(ranks):
    rows = ranks(2).run(reduced)
    assert rows[0][0] == rows[1][0]
    readings = rows[0][0]
    assert set(readings) == {
        name + end for name in {*HOST, "memory/allocated_bytes", "memory/peak_bytes"} for end in ("", "/rank")
    }
    assert readings["memory/allocated_bytes/rank"] == 1.0
    assert readings["memory/allocated_bytes"] == rows[1][1]["memory/allocated_bytes"] >= 800.0
    for name in HOST:
        assert readings[f"{name}/rank"] in (0.0, 1.0)


def test_reduction_uses_one_collective_and_at_most_one_sync(ranks):
    for _, _, waits, calls in ranks(2).run(reduced):
        assert waits <= 1  # numbers that were on the host all along
        assert len(calls) == 1


def missing_on_rank_1() -> dict[str, float]:
    gpu = SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.MonkeyPatch.context() as patch:
        count_with(patch, STATS)
        return memory_stats(gpu if get_dist_info().rank == 0 else CPU)


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
    readings = local_memory_stats(gpu)
    assert readings["memory/allocated_bytes"] - before >= kept.numel() * 4
    assert readings["memory/peak_bytes"] >= readings["memory/allocated_bytes"]
    assert 0.0 <= readings["memory/fragmentation"] < 1.0
