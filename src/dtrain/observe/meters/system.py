"""``system_metrics``: how busy the machine is."""

from __future__ import annotations

import math
import time
import warnings

import torch

from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.init import current
from dtrain.observe.meters.host import Counters, counters, host_memory
from dtrain.observe.meters.readings import Meter
from dtrain.state import TrainState

_RATES = {
    "system/network_in_bytes_per_s": "received",
    "system/network_out_bytes_per_s": "sent",
    "system/disk_read_bytes_per_s": "read",
    "system/disk_write_bytes_per_s": "written",
}
_GPU = ("system/gpu_percent", "system/gpu_temperature_c", "system/gpu_power_w")
_NAMES = ("system/cpu_percent", "system/memory_bytes", "system/memory_percent", *_RATES, *_GPU)


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
    host = _Host()

    def system(state: TrainState) -> dict[str, float]:
        info = current()
        mine = host.read(state.device) if info.local_rank == 0 else {}
        if not all_hosts:
            return mine
        row = [float(info.local_rank == 0), float(info.node_rank), *(mine.get(name, math.nan) for name in _NAMES)]
        hosts = [row for row in all_gather_numbers(row, where="system_metrics") if row[0]]
        named = [(f"{name}/host{int(row[1])}", value) for row in hosts for name, value in zip(_NAMES, row[2:], strict=True)]
        return {name: value for name, value in named if not math.isnan(value)}

    return system


class _Host:
    """What was counted at the last reading."""

    def __init__(self) -> None:
        self._at = 0.0
        self._before: Counters | None = None
        self._asks_gpus = True

    def read(self, device: torch.device) -> dict[str, float]:
        now, at, before, since = counters(), time.monotonic(), self._before, self._at
        self._before, self._at = now, at
        found = {} if before is None or at <= since else _rates(before, now, at - since)
        memory = host_memory()
        if memory is not None:
            found |= {"system/memory_bytes": float(memory[0]), "system/memory_percent": 100.0 * memory[0] / memory[1]}
        if device.type == "cuda" and self._asks_gpus:
            found |= self._gpus()
        return found

    def _gpus(self) -> dict[str, float]:
        devices = range(min(torch.cuda.device_count(), current().local_world_size))
        try:
            busy = [float(torch.cuda.utilization(index)) for index in devices]
            heat = [float(torch.cuda.temperature(index)) for index in devices]
            watts = [torch.cuda.power_draw(index) / 1000.0 for index in devices]
        except Exception as error:  # noqa: BLE001  # of the driver's library, of any kind; nothing that observes stops training
            self._asks_gpus = False
            why = " ".join(str(error).split())[:200]
            warnings.warn(f"system_metrics: no numbers of GPUs: {why}; pip install nvidia-ml-py", stacklevel=4)
            return {}
        return dict(zip(_GPU, (sum(busy) / len(busy), max(heat), sum(watts)), strict=True)) if busy else {}


def _rates(before: Counters, now: Counters, seconds: float) -> dict[str, float]:
    """What is known of the time between two readings."""
    found = {}
    if None not in (before.busy, before.cpu, now.busy, now.cpu) and now.cpu > before.cpu:  # type: ignore[operator]
        found["system/cpu_percent"] = 100.0 * (now.busy - before.busy) / (now.cpu - before.cpu)  # type: ignore[operator]
    for name, field in _RATES.items():
        first, last = getattr(before, field), getattr(now, field)
        if first is not None and last is not None:
            found[name] = max(0.0, last - first) / seconds
    return found
