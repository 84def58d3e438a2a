"""What holds the memory, in a file: to look at after the process is gone."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from dtrain import storage
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.memory.device_memory import get_device_memory
from dtrain.memory.live_tensors import LiveStorage

__all__ = ["snapshot_suffix", "write_snapshot"]


@runtime_checkable
class _ListsStorages(Protocol):
    """A gauge that knows the storages behind its numbers, as a test's budget does."""

    def storages(self) -> list[LiveStorage]: ...


def write_snapshot(path: storage.AnyPath | str, *, max_storages: int = 1000) -> str:
    """Write what holds the memory of this rank's device to a file, and return its path.

    On CUDA it is torch's own snapshot (a pickle), which https://docs.pytorch.org/memory_viz shows: all segments and blocks,
    with the lines of code that made them if ``torch.cuda.memory._record_memory_history()`` was called before. Inside
    ``testing.memory_budget`` it is JSON: ``live``, ``peak``, ``capacity``, and the largest storages with bytes, shape, dtype,
    the operation that made each and, with ``stack_depth``, the lines of code.

    Args:
        path: of the file, replaced if it is there; ``{rank}`` in it stands for this rank. Ranks need paths of their own.
        max_storages: how many storages JSON has.

    Raises:
        ConfigError: nothing is known of the memory here: a CPU without a budget.
    """
    info = get_dist_info()
    gauge = get_device_memory(info.device)
    named = str(path).replace("{rank}", str(info.rank))
    target = storage.resolve_path(Path(named) if isinstance(path, Path) else named)
    if isinstance(gauge, _ListsStorages):
        reading = gauge.read()
        numbers = {"live": reading.live, "peak": reading.peak, "capacity": reading.capacity}
        rows = [asdict(held) for held in gauge.storages()]
        text = json.dumps(
            {"rank": info.rank, **numbers, "storages": rows[:max_storages], "left_out": len(rows[max_storages:])}, indent=1
        )
        storage.replace_file(target, text.encode())
    elif info.device.type == "cuda":
        torch.cuda.memory._dump_snapshot(str(target))  # writes to local folders only
    else:
        raise ConfigError(
            f"write_snapshot: nothing counts the tensors of device {info.device}; do it on CUDA or inside testing.memory_budget"
        )
    return str(target)


def snapshot_suffix() -> str | None:
    """What the name of a snapshot of this rank's device ends in, ``.json`` or ``.pickle``; None where there can be none."""
    info = get_dist_info()
    if isinstance(get_device_memory(info.device), _ListsStorages):
        return ".json"
    return ".pickle" if info.device.type == "cuda" else None
