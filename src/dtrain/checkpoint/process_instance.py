"""Keep one object of a class per process, and start anew in a fork.

Only two objects of checkpoints belong to the process instead of a ``Checkpointer``. The locks: a lock file names a process. The
save thread: the collectives of saves need one order, because the process has one background process group. The end of
``init_dist``'s block closes the open Checkpointers, so their list belongs to the process as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")
_INSTANCES: dict[tuple[int, object], object] = {}


def process_instance(make: Callable[[], T]) -> T:
    """Return the object of this process that ``make()`` made on the first call. A fork makes an object of its own."""
    key = os.getpid(), make
    if key not in _INSTANCES:
        # Two threads may make the first call at once.
        _INSTANCES.setdefault(key, make())
    return cast(T, _INSTANCES[key])
