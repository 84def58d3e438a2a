"""What a process keeps of what it has unpacked, for all its open shards together: what was used last, up to a bound."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

from dtrain.data.stream.fork_safety import FORK_REGISTRY


class LRUOwner(Protocol):
    """Has the values, so that they go when it does."""

    cached: dict[int, Any]


class ByteLRU:
    """Tells owners which of their values to drop. Any thread may use it; the child of a fork begins with an empty one."""

    def __init__(self) -> None:
        self._is_registered = False
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._sizes: OrderedDict[tuple[int, int], tuple[ref[LRUOwner], int]] = OrderedDict()  # what was used last comes last
        self.size = 0
        """Bytes of all values; those of an owner that has gone count until it is their turn."""

    def after_fork(self) -> None:
        """The lock may have been held, by a thread that is not here."""
        self._reset()

    def get(self, owner: LRUOwner, number: int, make: Callable[[], tuple[Any, int]], *, max_bytes: int) -> Any:
        """The owner's value, made by ``make``, with its bytes, if it is not there. Those used longest ago make room.

        Args:
            owner: of the value; one thread at a time asks for what is its.
            number: of the value.
            make: called without the lock.
            max_bytes: of all values of all owners; the one that is returned may be larger.
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
            self._drop(key)  # of one that had this address before
            self._sizes[key] = ref(owner), size
            self.size += size
            while self.size > max_bytes and len(self._sizes) > 1:
                first = next(iter(self._sizes))
                if (other := self._drop(first)) is not None:
                    other.cached.pop(first[1], None)
        return value

    def _drop(self, key: tuple[int, int]) -> LRUOwner | None:
        found = self._sizes.pop(key, None)
        if found is None:
            return None
        self.size -= found[1]
        return found[0]()

    def drop_owner(self, owner: LRUOwner) -> None:
        """Drop all values of one owner."""
        with self._lock:
            for number in list(owner.cached):
                self._drop((id(owner), number))
            owner.cached.clear()


BYTE_LRU = ByteLRU()
