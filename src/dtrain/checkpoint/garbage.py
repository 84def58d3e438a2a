"""Python's search for garbage, kept away from work that makes tens of thousands of objects and no cycles of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Let Python not look for garbage inside. For the index of a large model that would take longer than all else.

    Mutates: the collector of this process, until the block is left.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
