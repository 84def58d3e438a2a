"""Find the folder in shared memory that belongs to a checkpoint root, where the newest step of a run outlives its ranks.

The launcher makes and removes the memory of a launch. Steps have the layout, the digests and the commit of steps on disk. So a
kill during a copy leaves the step before, and a damaged copy is refused by its digest.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from dtrain import launch_protocol, storage
from dtrain.arguments import format_bytes
from dtrain.checkpoint import layout
from dtrain.errors import CheckpointError, ConfigError
from dtrain.machine import read_memory
from dtrain.storage import AnyPath


def find_memory_root(root: AnyPath) -> Path | None:
    """Return the folder in memory that belongs to a root; None if no launcher keeps memory for this process.

    A process may have the variable of a launch that has ended, whose folder must not be made again, or of another user.
    """
    folder = os.environ.get(launch_protocol.MEMORY_FOLDER)
    try:
        if folder is None or os.stat(folder).st_uid != os.getuid():
            return None
    except OSError:
        return None
    return Path(folder, hashlib.sha256(str(root).encode()).hexdigest()[:16])


def memory_root(root: AnyPath, caller: str) -> Path:
    """Return the folder in memory that belongs to a root.

    Raises:
        ConfigError: no launcher keeps memory for this process.
    """
    found = find_memory_root(root)
    if found is None:
        raise ConfigError(
            f"{caller}: mode must be 'sync' or 'async' here, got 'memory': nothing keeps the memory of a rank that dies. Start "
            "the job with `dtrain launch`, which needs /dev/shm."
        )
    return found


def check_free_memory(root: AnyPath, needed_bytes: int) -> None:
    """Raise unless shared memory has room for a step, and for a second one until the first one is removed.

    Args:
        root: folder of steps in memory, which need not exist.
        needed_bytes: size of a step.

    Raises:
        CheckpointError: too little memory, with both figures.
        OSError: a failed query.
    """
    # The first step needs room for the next one, too.
    names = storage.list_names(root) if storage.exists(root) else []
    copies = 1 if any(layout.step_of(name) is not None for name in names) else 2
    free = free_memory(root)
    if free < copies * needed_bytes:
        raise CheckpointError(
            f"save_sharded: free shared memory must be at least {format_bytes(copies * needed_bytes)} with mode='memory', got "
            f"{format_bytes(free)}. Enlarge /dev/shm (containers: --shm-size), or save with mode='async'."
        )


def free_memory(root: AnyPath) -> int:
    """Return the bytes that can be written below a folder in shared memory."""
    available = read_memory(Path("/")).available_bytes
    in_folder = storage.free_bytes(root)
    return available if in_folder is None else min(in_folder, available)
