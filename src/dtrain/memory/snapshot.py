"""Write a file that lists the tensors in memory, to read after the process has ended."""

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


@runtime_checkable
class _ListsStorages(Protocol):
    """Device memory that lists its storages, such as the memory budget of a test."""

    def storages(self) -> list[LiveStorage]: ...


def write_snapshot(path: storage.AnyPath | str, *, max_storages: int = 1000) -> str:
    """Write the tensors in this rank's device memory to a file, and return its path.

    On CUDA the file is torch's own snapshot (a pickle) for https://docs.pytorch.org/memory_viz, with all segments and blocks,
    and their call stacks if ``torch.cuda.memory._record_memory_history()`` was called before. Inside ``testing.memory_budget``
    the file is JSON: ``live``, ``peak``, ``capacity``, and the largest storages with bytes, shape, dtype, the operation that
    allocated each, and the call stack if ``stack_depth`` is set.

    Args:
        path: path of the file, which is replaced; ``{rank}`` in the path becomes this rank. Each rank needs its own path.
        max_storages: number of storages in the JSON file.

    Example:
        if dt.memory.is_out_of_memory(error):
            path = dt.memory.write_snapshot("snapshots/oom-{rank}.pickle")
            print(f"memory snapshot in {path}")

    Raises:
        ConfigError: the memory cannot be measured: a CPU without a budget.
    """
    info = get_dist_info()
    memory = get_device_memory(info.device)
    rank_path = str(path).replace("{rank}", str(info.rank))
    target = storage.resolve_path(Path(rank_path) if isinstance(path, Path) else rank_path)
    if isinstance(memory, _ListsStorages):
        stats = memory.read()
        numbers = {"live": stats.live, "peak": stats.peak, "capacity": stats.capacity}
        rows = [asdict(row) for row in memory.storages()]
        text = json.dumps(
            {"rank": info.rank, **numbers, "storages": rows[:max_storages], "left_out": len(rows[max_storages:])}, indent=1
        )
        storage.replace_file(target, text.encode())
    elif info.device.type == "cuda":
        # torch writes to local folders only.
        torch.cuda.memory._dump_snapshot(str(target))
    else:
        raise ConfigError(
            f"write_snapshot: device must be a CUDA device, got {info.device}. On a CPU, use testing.memory_budget."
        )
    return str(target)


def snapshot_suffix() -> str | None:
    """Return the suffix of a snapshot of this rank's device, ``.json`` or ``.pickle``; None if no snapshot is possible."""
    info = get_dist_info()
    if isinstance(get_device_memory(info.device), _ListsStorages):
        return ".json"
    return ".pickle" if info.device.type == "cuda" else None
