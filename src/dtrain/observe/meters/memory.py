"""``memory_stats``: what the ranks hold in memory, on the device and on the host."""

from __future__ import annotations

import math
from typing import Any

import torch

from dtrain.dist.collectives import all_gather_numbers
from dtrain.dist.init import current
from dtrain.memory.gauge import gauge_for
from dtrain.observe.meters.host import resident
from dtrain.state import TrainState

_ALLOCATOR = {
    "memory/allocated_bytes": "allocated_bytes.all.current",
    "memory/peak_bytes": "allocated_bytes.all.peak",
    "memory/reserved_bytes": "reserved_bytes.all.current",
    "memory/peak_reserved_bytes": "reserved_bytes.all.peak",
    "memory/retries": "num_alloc_retries",
    "memory/out_of_memory": "num_ooms",
}
_NAMES = (*_ALLOCATOR, "memory/fragmentation", "memory/rss_bytes", "memory/peak_rss_bytes")


def memory_stats(state: TrainState) -> dict[str, float]:
    """What the fullest rank holds in memory, and which rank that is; a meter.

    Bytes of tensors on the device (``memory/allocated_bytes``, at most ``memory/peak_bytes``), of the allocator's cache with
    them (``memory/reserved_bytes``, ``memory/peak_reserved_bytes``), ``memory/fragmentation``, the share of the cache that no
    tensor is in, how often the allocator had to give its cache back (``memory/retries``) and how often it found no memory
    (``memory/out_of_memory``); of each process in main memory (``memory/rss_bytes``, ``memory/peak_rss_bytes``). On a CPU
    there are the latter only; inside of ``testing.memory_budget`` also what it counts, as allocated and peak.

    Each number is the largest of any rank. On several ranks ``memory/peak_bytes/rank`` is whose it is (the first, of equals),
    and so for all others. ``memory_here`` is the same of this rank alone.

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
    mine = memory_here(state)
    if current().world_size == 1:
        return mine
    rows = all_gather_numbers([mine.get(name, math.nan) for name in _NAMES], where="memory_stats")
    found: dict[str, float] = {}
    for name, column in zip(_NAMES, zip(*rows, strict=True), strict=True):
        known = [(value, rank) for rank, value in enumerate(column) if not math.isnan(value)]
        if known:
            most, rank = max(known, key=lambda each: each[0])
            found |= {name: most, f"{name}/rank": float(rank)}
    return found


def memory_here(state: TrainState) -> dict[str, float]:
    """What this rank holds in memory, by the names of ``memory_stats``; a meter.

    Collective: none. Host sync: none; the allocator's counters are on the host.
    """
    found = _on_device(state.device)
    held = resident()
    if held is not None:
        found |= {"memory/rss_bytes": float(held[0]), "memory/peak_rss_bytes": float(held[1])}
    return found


def _on_device(device: torch.device) -> dict[str, float]:
    if device.type == "cuda":
        stats: dict[str, Any] = torch.cuda.memory_stats(device)
        found = {name: float(stats.get(key, 0)) for name, key in _ALLOCATOR.items()}
        reserved = found["memory/reserved_bytes"]
        found["memory/fragmentation"] = 1.0 - found["memory/allocated_bytes"] / reserved if reserved else 0.0
        return found
    gauge = gauge_for(device)
    if gauge is None:
        return {}
    reading = gauge.read()
    return {"memory/allocated_bytes": float(reading.live), "memory/peak_bytes": float(reading.peak)}
