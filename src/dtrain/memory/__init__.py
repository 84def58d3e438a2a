"""Recognize out-of-memory errors, and write snapshots of a device's memory.

    try:
        state, metrics = step(state, batch)
    except RuntimeError as error:
        if dt.memory.is_out_of_memory(error):
            dt.memory.write_snapshot("memory.pickle")
        raise

``dt.shard`` has activation checkpointing and offload, ``dt.step.find_microbatch_size`` a search for a microbatch size.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.memory.device_memory import MemoryStats as MemoryStats
    from dtrain.memory.device_memory import is_out_of_memory as is_out_of_memory
    from dtrain.memory.device_memory import write_snapshot as write_snapshot
    from dtrain.memory.live_tensors import LiveStorage as LiveStorage

__getattr__, __dir__ = attach(__name__, __file__)
