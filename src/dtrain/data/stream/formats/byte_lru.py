"""``ByteLRU``: bound the bytes of decoded data that a process caches, least recently used first, over all its open shards."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

from dtrain.data.stream.fork_safety import FORK_REGISTRY


class LRUOwner(Protocol):
    """Owner of cached values, which are freed with the owner."""

    cached: dict[int, Any]


class ByteLRU:
    """Bookkeeping of owners' cached values. Any thread may use it; a forked child starts with an empty one."""

    def __init__(self) -> None:
        self._is_registered = False
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        # The most recently used value is last.
        self._sizes: OrderedDict[tuple[int, int], tuple[ref[LRUOwner], int]] = OrderedDict()
        self.size = 0
        """Bytes of all values. The values of a deleted owner count until they are evicted."""

    def after_fork(self) -> None:
        """Replace the lock in a forked child, because a thread of the parent may have held it."""
        self._reset()

    def get(self, owner: LRUOwner, number: int, make: Callable[[], tuple[Any, int]], *, max_bytes: int) -> Any:
        """Return the owner's value. If it is missing, ``make`` makes the value and its size, and old values are evicted.

        Args:
            owner: owner of the value; one thread at a time uses an owner.
            number: number of the value.
            make: function that makes the value and its size; called without the lock.
            max_bytes: maximum of all values of all owners; the returned value may be larger.
        """
        key = (id(owner), number)
        with self._lock:
            if key in self._sizes:
                self._sizes.move_to_end(key)
            if number in owner.cached:
                return owner.cached[number]
        value, size = make()
        with self._lock:
            if not self._is_registered:
                self._is_registered = True
                FORK_REGISTRY.register(self)
            owner.cached[number] = value
            # A deleted owner may have had the same id.
            self._drop(key)
            self._sizes[key] = ref(owner), size
            self.size += size
            while self.size > max_bytes and len(self._sizes) > 1:
                first = next(iter(self._sizes))
                if (owner_of_first := self._drop(first)) is not None:
                    owner_of_first.cached.pop(first[1], None)
        return value

    def _drop(self, key: tuple[int, int]) -> LRUOwner | None:
        entry = self._sizes.pop(key, None)
        if entry is None:
            return None
        self.size -= entry[1]
        return entry[0]()

    def drop_owner(self, owner: LRUOwner) -> None:
        """Drop all values of an owner."""
        with self._lock:
            for number in list(owner.cached):
                self._drop((id(owner), number))
            owner.cached.clear()


BYTE_LRU = ByteLRU()
