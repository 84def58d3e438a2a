"""Read the memory and load of this process and machine from /proc, /sys, torch and NVML.

``memory_stats`` reports the memory of the ranks, on the device and on the host. ``system_metrics`` reports the load of the
machine. A read of /proc takes tens of microseconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from dtrain.arguments import single_line, warn
from dtrain.device import backend_function, counts_memory, is_accelerator
from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.init import get_dist_info
from dtrain.memory.device_memory import get_device_memory
from dtrain.monitors.meters import Meter
from dtrain.state import TrainState

PROC, SYS = Path("/proc"), Path("/sys")
# bytes; unit of /proc/diskstats on every disk
_SECTOR = 512


def process_memory() -> tuple[int, int] | None:
    """Return the resident memory of this process in bytes, current and peak; None if unreadable."""
    sizes = _read_sizes("self/status", "VmRSS", "VmHWM")
    if "VmRSS" not in sizes:
        return None
    return sizes["VmRSS"], max(sizes["VmRSS"], sizes.get("VmHWM", 0))


def host_memory() -> tuple[int, int] | None:
    """Return the used and total main memory in bytes; None if unreadable."""
    sizes = _read_sizes("meminfo", "MemTotal", "MemAvailable")
    if "MemTotal" not in sizes or "MemAvailable" not in sizes:
        return None
    return sizes["MemTotal"] - sizes["MemAvailable"], sizes["MemTotal"]


def read_counters() -> dict[str, float]:
    """Read the counters since boot that are readable: processor time in kernel ticks, bytes over the network and of disks."""
    counters: dict[str, float] = {}
    for line in _read_lines("stat"):
        if line.startswith("cpu "):
            # user nice system idle iowait irq softirq steal
            ticks = [int(part) for part in line.split()[1:9]]
            counters |= {"busy_ticks": float(sum(ticks) - ticks[3] - ticks[4]), "total_ticks": float(sum(ticks))}
    interfaces = {}
    for line in _read_lines("net/dev"):
        name, colon, numbers = line.partition(":")
        if colon and name.strip() != "lo":
            parts = numbers.split()
            interfaces[name.strip()] = (int(parts[0]), int(parts[8]))
    # Bridges and bonds would count traffic twice. A container has no physical interface: then all except loopback count.
    real = {name: row for name, row in interfaces.items() if _exists(f"{SYS}/class/net/{name}/device")} or interfaces
    if real:
        received, sent = zip(*real.values(), strict=True)
        counters |= {"received": float(sum(received)), "sent": float(sum(sent))}
    # Partitions and logical volumes would count bytes twice.
    disks = [line.split() for line in _read_lines("diskstats")]
    disks = [parts for parts in disks if len(parts) > 9 and _exists(f"{SYS}/block/{parts[2]}/device")]
    if disks:
        read, written = (sum(int(parts[column]) for parts in disks) for column in (5, 9))
        counters |= {"read": float(read * _SECTOR), "written": float(written * _SECTOR)}
    return counters


def _read_sizes(name: str, *wanted: str) -> dict[str, int]:
    """Return lines such as ``VmRSS:  2080 kB`` in bytes. Only the wanted lines are parsed, which halves the time."""
    text, sizes = f"\n{_read_text(name)}", {}
    for key in wanted:
        start = text.find(f"\n{key}:")
        parts = text[start : text.find("\n", start + 1)].split() if start >= 0 else ()
        if len(parts) == 3 and parts[2] == "kB" and parts[1].isdecimal():
            sizes[key] = int(parts[1]) * 1024
    return sizes


def _read_lines(name: str) -> list[str]:
    return _read_text(name).split("\n")


def _read_text(name: str) -> str:
    try:
        # An unbuffered read takes half the time of Path.read_text.
        with open(f"{PROC}/{name}", "rb", buffering=0) as file:
            return file.read().decode("ascii", errors="replace")
    # A container may hide the file.
    except OSError:
        return ""


@cache
def _exists(path: str) -> bool:
    """Return True if a path in /sys exists. The result is cached, because devices do not change during training."""
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
    """Report the largest memory use over all ranks, and the rank; a meter.

    Device tensors: ``memory/allocated_bytes`` and ``memory/peak_bytes``. Allocator cache: ``memory/reserved_bytes``,
    ``memory/peak_reserved_bytes`` and ``memory/fragmentation``, the unused fraction of the cache. ``memory/retries`` counts
    cache flushes, ``memory/out_of_memory`` failed allocations. Process: ``memory/rss_bytes`` and ``memory/peak_rss_bytes``. On
    a CPU only the process is reported; inside ``testing.memory_budget`` also the allocated and peak bytes of the budget.

    Each number is the maximum over ranks. On several ranks, ``memory/peak_bytes/rank`` names the (first) rank with the
    maximum, and so on for each number. ``local_memory_stats`` reports this rank only.

    Args:
        state: training state, for its device.

    Returns:
        The same numbers and names on every rank.

    Collective: one all-gather of nine numbers on the control channel; every rank must call it. Host sync: none.

    Example:
        import dtrain as dt

        if state.crossed("100ba"):
            log(state.clock.step, dt.monitors.memory_stats(state))
    """
    local = local_memory_stats(state)
    if get_dist_info().world_size == 1:
        return local
    rows = all_gather_numbers([local.get(name, math.nan) for name in _MEMORY_NAMES], caller="memory_stats")
    stats: dict[str, float] = {}
    for name, column in zip(_MEMORY_NAMES, zip(*rows, strict=True), strict=True):
        known = [(value, rank) for rank, value in enumerate(column) if not math.isnan(value)]
        if known:
            largest, rank = max(known, key=lambda each: each[0])
            stats |= {name: largest, f"{name}/rank": float(rank)}
    return stats


def local_memory_stats(state: TrainState) -> dict[str, float]:
    """Report the memory of this rank, with the names of ``memory_stats``; a meter.

    Collective: none. Host sync: none; the allocator's counters are on the host.

    Example:
        >>> from types import SimpleNamespace
        >>> import dtrain as dt
        >>> sorted(dt.monitors.local_memory_stats(SimpleNamespace(device=torch.device("cpu"))))
        ['memory/peak_rss_bytes', 'memory/rss_bytes']
    """
    device, stats = state.device, dict[str, float]()
    if is_accelerator(device) and counts_memory(device.type):
        raw: dict[str, Any] = torch.accelerator.memory_stats(device)
        stats = {name: float(raw.get(key, 0)) for name, key in _ALLOCATOR_STATS.items()}
        reserved = stats["memory/reserved_bytes"]
        stats["memory/fragmentation"] = 1.0 - stats["memory/allocated_bytes"] / reserved if reserved else 0.0
    elif (counted := get_device_memory(device)) is not None:
        reading = counted.read()
        stats = {"memory/allocated_bytes": float(reading.live), "memory/peak_bytes": float(reading.peak)}
    memory = process_memory()
    if memory is not None:
        stats |= {"memory/rss_bytes": float(memory[0]), "memory/peak_rss_bytes": float(memory[1])}
    return stats


_HOST_RATES = {
    "system/network_in_bytes_per_s": "received",
    "system/network_out_bytes_per_s": "sent",
    "system/disk_read_bytes_per_s": "read",
    "system/disk_write_bytes_per_s": "written",
}
# the function of the backend for one device, and the number of all devices; power_draw is in milliwatts
_GPU_READERS: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "system/gpu_percent": ("utilization", fmean),
    "system/gpu_temperature_c": ("temperature", max),
    "system/gpu_power_w": ("power_draw", lambda milliwatts: sum(milliwatts) / 1000.0),
}
_SYSTEM_NAMES = ("system/cpu_percent", "system/memory_bytes", "system/memory_percent", *_HOST_RATES, *_GPU_READERS)


def system_metrics(*, all_hosts: bool = False) -> Meter:
    """Create a meter of this machine: processor, main memory, network, disks and GPUs, over all processes.

    ``system/cpu_percent`` of all cores, ``system/memory_bytes`` and ``system/memory_percent``. Since the previous call, so
    absent in the first call: ``system/network_in_bytes_per_s`` and ``..._out_...``, ``system/disk_read_bytes_per_s`` and
    ``..._write_...``. GPUs of the ranks on this host: ``system/gpu_percent`` (mean), ``system/gpu_temperature_c`` (maximum)
    and ``system/gpu_power_w`` (sum). GPU numbers come from NVML, for which torch needs the package nvidia-ml-py; without the
    package, GPU numbers are absent, with one warning. Unreadable numbers are left out.

    Ranks with ``local_rank`` 0 read, one per host. The other ranks return nothing.

    Args:
        all_hosts: if True, every rank returns the numbers of every host, as ``system/cpu_percent/host0`` by node rank.

    Collective: none; with ``all_hosts`` one all-gather of twelve numbers on the control channel, and every rank must call it.
    Host sync: none.

    Example:
        import dtrain as dt

        meter = dt.monitors.system_metrics()
        if state.crossed("100ba"):
            log(state.clock.step, meter(state))
    """
    host = _HostReader()

    def meter_fn(state: TrainState) -> dict[str, float]:
        info = get_dist_info()
        local = host.read(state.device) if info.local_rank == 0 else {}
        if not all_hosts:
            return local
        row = [float(info.local_rank == 0), float(info.node_rank), *(local.get(name, math.nan) for name in _SYSTEM_NAMES)]
        hosts = [row for row in all_gather_numbers(row, caller="system_metrics") if row[0]]
        named = [
            (f"{name}/host{int(row[1])}", value) for row in hosts for name, value in zip(_SYSTEM_NAMES, row[2:], strict=True)
        ]
        return {name: value for name, value in named if not math.isnan(value)}

    return meter_fn


class _HostReader:
    """Reader of machine metrics. Stores the counters of the last reading to compute rates."""

    def __init__(self) -> None:
        self._read_at = 0.0
        self._counters: dict[str, float] = {}
        self._reads_gpus = True

    def read(self, device: torch.device) -> dict[str, float]:
        counters, read_at = read_counters(), time.monotonic()
        changes = {name: count - self._counters[name] for name, count in counters.items() if name in self._counters}
        seconds = read_at - self._read_at
        self._counters, self._read_at = counters, read_at
        metrics: dict[str, float] = {}
        if changes.get("total_ticks", 0.0) > 0:
            metrics["system/cpu_percent"] = 100.0 * changes["busy_ticks"] / changes["total_ticks"]
        if seconds > 0:
            rates = {name: counter for name, counter in _HOST_RATES.items() if counter in changes}
            metrics |= {name: max(0.0, changes[counter]) / seconds for name, counter in rates.items()}
        memory = host_memory()
        if memory is not None:
            metrics |= {"system/memory_bytes": float(memory[0]), "system/memory_percent": 100.0 * memory[0] / memory[1]}
        if is_accelerator(device) and self._reads_gpus:
            metrics |= self._read_gpus(device)
        return metrics

    def _read_gpus(self, device: torch.device) -> dict[str, float]:
        devices = range(min(torch.accelerator.device_count(), get_dist_info().local_world_size))
        # A number that the backend cannot read is left out.
        readers = {name: (backend_function(device, function), total) for name, (function, total) in _GPU_READERS.items()}
        try:
            return {
                name: total([float(read(index)) for index in devices])
                for name, (read, total) in readers.items()
                if read is not None and devices
            }
        except Exception as error:  # noqa: BLE001 - NVML raises errors of any kind, and training continues
            self._reads_gpus = False
            reason = single_line(error)[:200]
            warn(
                f"system_metrics: NVML must be readable for GPU metrics, got: {reason}. GPU metrics are left out. "
                "Run pip install nvidia-ml-py."
            )
            return {}
