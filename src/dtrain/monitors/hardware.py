"""What Linux says of this process and this machine: files in /proc and /sys, read in some tens of microseconds.

``memory_stats``: what the ranks hold in memory, on the device and on the host.

``system_metrics``: how busy the machine is."""

from __future__ import annotations

import math
import time
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.init import get_dist_info
from dtrain.memory.device_memory import get_device_memory
from dtrain.monitors.meter import Meter
from dtrain.state import TrainState

PROC, SYS = Path("/proc"), Path("/sys")
_SECTOR = 512  # bytes, whatever the disk has: the unit of /proc/diskstats


class HostCounters(NamedTuple):
    """Counts since the machine was started; None where they cannot be read."""

    busy_ticks: float | None = None
    total_ticks: float | None = None
    received: float | None = None
    sent: float | None = None
    read: float | None = None
    written: float | None = None


def process_memory(pid: int | str = "self") -> tuple[int, int] | None:
    """Bytes of main memory that the process holds, and the most that it has held; None where that cannot be read."""
    sizes = _read_sizes(f"{pid}/status", "VmRSS", "VmHWM")
    if "VmRSS" not in sizes:
        return None
    return sizes["VmRSS"], max(sizes["VmRSS"], sizes.get("VmHWM", 0))


def host_memory() -> tuple[int, int] | None:
    """Bytes of main memory that are in use, and how many there are; None where that cannot be read."""
    sizes = _read_sizes("meminfo", "MemTotal", "MemAvailable")
    if "MemTotal" not in sizes or "MemAvailable" not in sizes:
        return None
    return sizes["MemTotal"] - sizes["MemAvailable"], sizes["MemTotal"]


def read_counters() -> HostCounters:
    """What has been counted so far: processor time (in the kernel's ticks), bytes over the network, bytes of disks."""
    busy, cpu = _cpu_ticks()
    received, sent = _network_bytes()
    read, written = _disk_bytes()
    return HostCounters(busy, cpu, received, sent, read, written)


def _cpu_ticks() -> tuple[float | None, float | None]:
    """Ticks of all cores that were not idle, and all ticks."""
    for line in _read_lines("stat"):
        if line.startswith("cpu "):
            ticks = [int(part) for part in line.split()[1:9]]  # user nice system idle iowait irq softirq steal
            return float(sum(ticks) - ticks[3] - ticks[4]), float(sum(ticks))
    return None, None


def _network_bytes() -> tuple[float | None, float | None]:
    """Bytes in and out over real interfaces; where there is none, as in a container, over all but the loopback."""
    rows = {}
    for line in _read_lines("net/dev"):
        name, colon, numbers = line.partition(":")
        if colon:
            parts = numbers.split()
            rows[name.strip()] = (int(parts[0]), int(parts[8]))
    rows.pop("lo", None)
    # A bridge or bond would count what goes through it a second time.
    real = {name: row for name, row in rows.items() if _exists(f"{SYS}/class/net/{name}/device")} or rows
    if not real:
        return None, None
    return float(sum(row[0] for row in real.values())), float(sum(row[1] for row in real.values()))


def _disk_bytes() -> tuple[float | None, float | None]:
    """Bytes read and written by real disks: partitions and what is made of disks would count them again."""
    read, written, any_disk = 0, 0, False
    for line in _read_lines("diskstats"):
        parts = line.split()
        if len(parts) > 9 and _exists(f"{SYS}/block/{parts[2]}/device"):
            read, written, any_disk = read + int(parts[5]), written + int(parts[9]), True
    return (float(read * _SECTOR), float(written * _SECTOR)) if any_disk else (None, None)


def _read_sizes(name: str, *wanted: str) -> dict[str, int]:
    """Lines such as ``VmRSS:  2080 kB``, in bytes; only those, since to take all of them apart takes twice the time."""
    text, found = f"\n{_read_text(name)}", {}
    for key in wanted:
        at = text.find(f"\n{key}:")
        parts = text[at : text.find("\n", at + 1)].split() if at >= 0 else ()
        if len(parts) == 3 and parts[2] == "kB" and parts[1].isdecimal():
            found[key] = int(parts[1]) * 1024
    return found


def _read_lines(name: str) -> list[str]:
    return _read_text(name).split("\n")


def _read_text(name: str) -> str:
    try:
        with open(f"{PROC}/{name}", "rb", buffering=0) as file:  # half the time of Path.read_text
            return file.read().decode("ascii", errors="replace")
    except OSError:
        return ""  # a container may hide it


@cache
def _exists(path: str) -> bool:
    """Asked once: of the devices of a machine, which do not change while it trains."""
    return Path(path).exists()


_ALLOCATOR_STATS = {
    "memory/allocated_bytes": "allocated_bytes.all.current",
    "memory/peak_bytes": "allocated_bytes.all.peak",
    "memory/reserved_bytes": "reserved_bytes.all.current",
    "memory/peak_reserved_bytes": "reserved_bytes.all.peak",
    "memory/retries": "num_alloc_retries",
    "memory/out_of_memory": "num_ooms",
}
_MEMORY_NAMES = (*_ALLOCATOR_STATS, "memory/fragmentation", "memory/rss_bytes", "memory/peak_rss_bytes")


def memory_stats(state: TrainState) -> dict[str, float]:
    """What the fullest rank holds in memory, and which rank that is; a meter.

    Bytes of tensors on the device (``memory/allocated_bytes``, at most ``memory/peak_bytes``), of the allocator's cache with
    them (``memory/reserved_bytes``, ``memory/peak_reserved_bytes``), ``memory/fragmentation``, the share of the cache that no
    tensor is in, how often the allocator had to give its cache back (``memory/retries``) and how often it found no memory
    (``memory/out_of_memory``); of each process in main memory (``memory/rss_bytes``, ``memory/peak_rss_bytes``). On a CPU
    there are the latter only; inside of ``testing.memory_budget`` also what it counts, as allocated and peak.

    Each number is the largest of any rank. On several ranks ``memory/peak_bytes/rank`` is whose it is (the first, of equals),
    and so for all others. ``local_memory_stats`` is the same of this rank alone.

    Args:
        state: whose device.

    Returns:
        The same numbers on every rank, with the same names.

    Collective: one all-gather of nine numbers on the control group; every rank must call it. Host sync: none.

    Example:
        >>> from types import SimpleNamespace
        >>> sorted(memory_stats(SimpleNamespace(device=torch.device("cpu"))))
        ['memory/peak_rss_bytes', 'memory/rss_bytes']
    """
    mine = local_memory_stats(state)
    if get_dist_info().world_size == 1:
        return mine
    rows = all_gather_numbers([mine.get(name, math.nan) for name in _MEMORY_NAMES], caller="memory_stats")
    found: dict[str, float] = {}
    for name, column in zip(_MEMORY_NAMES, zip(*rows, strict=True), strict=True):
        known = [(value, rank) for rank, value in enumerate(column) if not math.isnan(value)]
        if known:
            most, rank = max(known, key=lambda each: each[0])
            found |= {name: most, f"{name}/rank": float(rank)}
    return found


def local_memory_stats(state: TrainState) -> dict[str, float]:
    """What this rank holds in memory, by the names of ``memory_stats``; a meter.

    Collective: none. Host sync: none; the allocator's counters are on the host.
    """
    found = _allocator_stats(state.device)
    held = process_memory()
    if held is not None:
        found |= {"memory/rss_bytes": float(held[0]), "memory/peak_rss_bytes": float(held[1])}
    return found


def _allocator_stats(device: torch.device) -> dict[str, float]:
    if device.type == "cuda":
        stats: dict[str, Any] = torch.cuda.memory_stats(device)
        found = {name: float(stats.get(key, 0)) for name, key in _ALLOCATOR_STATS.items()}
        reserved = found["memory/reserved_bytes"]
        found["memory/fragmentation"] = 1.0 - found["memory/allocated_bytes"] / reserved if reserved else 0.0
        return found
    gauge = get_device_memory(device)
    if gauge is None:
        return {}
    reading = gauge.read()
    return {"memory/allocated_bytes": float(reading.live), "memory/peak_bytes": float(reading.peak)}


_HOST_RATES = {
    "system/network_in_bytes_per_s": "received",
    "system/network_out_bytes_per_s": "sent",
    "system/disk_read_bytes_per_s": "read",
    "system/disk_write_bytes_per_s": "written",
}
_GPU_NAMES = ("system/gpu_percent", "system/gpu_temperature_c", "system/gpu_power_w")
_SYSTEM_NAMES = ("system/cpu_percent", "system/memory_bytes", "system/memory_percent", *_HOST_RATES, *_GPU_NAMES)


def system_metrics(*, all_hosts: bool = False) -> Meter:
    """A meter of this machine: processor, main memory, network, disks, GPUs. Of all processes on it, not of training alone.

    ``system/cpu_percent`` of all cores, ``system/memory_bytes`` in use and ``system/memory_percent``,
    ``system/network_in_bytes_per_s`` and ``..._out_...``, ``system/disk_read_bytes_per_s`` and ``..._write_...`` since the call
    before (so not in the first), and of the GPUs of this host's ranks ``system/gpu_percent`` (the mean),
    ``system/gpu_temperature_c`` (the hottest) and ``system/gpu_power_w`` (of all together), by the driver's library NVML, for
    which torch needs the package nvidia-ml-py; without it there are none, and one warning. What cannot be read is left out.

    Ranks with ``local_rank`` 0 read, one of each host; the others give nothing.

    Args:
        all_hosts: whether every rank gets the numbers of every host, as ``system/cpu_percent/host0`` by node rank.

    Collective: none; with ``all_hosts`` one all-gather of twelve numbers on the control group, and every rank must call it.
    Host sync: none.
    """
    host = _HostReader()

    def system(state: TrainState) -> dict[str, float]:
        info = get_dist_info()
        mine = host.read(state.device) if info.local_rank == 0 else {}
        if not all_hosts:
            return mine
        row = [float(info.local_rank == 0), float(info.node_rank), *(mine.get(name, math.nan) for name in _SYSTEM_NAMES)]
        hosts = [row for row in all_gather_numbers(row, caller="system_metrics") if row[0]]
        named = [
            (f"{name}/host{int(row[1])}", value) for row in hosts for name, value in zip(_SYSTEM_NAMES, row[2:], strict=True)
        ]
        return {name: value for name, value in named if not math.isnan(value)}

    return system


class _HostReader:
    """What was counted at the last reading."""

    def __init__(self) -> None:
        self._read_at = 0.0
        self._last_counters: HostCounters | None = None
        self._reads_gpus = True

    def read(self, device: torch.device) -> dict[str, float]:
        now, at, before, since = read_counters(), time.monotonic(), self._last_counters, self._read_at
        self._last_counters, self._read_at = now, at
        found = {} if before is None or at <= since else _host_rates(before, now, at - since)
        memory = host_memory()
        if memory is not None:
            found |= {"system/memory_bytes": float(memory[0]), "system/memory_percent": 100.0 * memory[0] / memory[1]}
        if device.type == "cuda" and self._reads_gpus:
            found |= self._read_gpus()
        return found

    def _read_gpus(self) -> dict[str, float]:
        devices = range(min(torch.cuda.device_count(), get_dist_info().local_world_size))
        try:
            busy = [float(torch.cuda.utilization(index)) for index in devices]
            heat = [float(torch.cuda.temperature(index)) for index in devices]
            watts = [torch.cuda.power_draw(index) / 1000.0 for index in devices]
        except Exception as error:  # noqa: BLE001  # of the driver's library, of any kind; nothing that observes stops training
            self._reads_gpus = False
            why = " ".join(str(error).split())[:200]
            warnings.warn(f"system_metrics: no numbers of GPUs: {why}; pip install nvidia-ml-py", stacklevel=4)
            return {}
        return dict(zip(_GPU_NAMES, (sum(busy) / len(busy), max(heat), sum(watts)), strict=True)) if busy else {}


def _host_rates(before: HostCounters, now: HostCounters, seconds: float) -> dict[str, float]:
    """What is known of the time between two readings."""
    found = {}
    if (
        before.busy_ticks is not None
        and now.busy_ticks is not None
        and before.total_ticks is not None
        and now.total_ticks is not None
    ):
        elapsed = now.total_ticks - before.total_ticks
        if elapsed > 0:
            found["system/cpu_percent"] = 100.0 * (now.busy_ticks - before.busy_ticks) / elapsed
    for name, field in _HOST_RATES.items():
        first, last = getattr(before, field), getattr(now, field)
        if first is not None and last is not None:
            found[name] = max(0.0, last - first) / seconds
    return found
