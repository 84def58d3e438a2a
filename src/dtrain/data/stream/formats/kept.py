"""What a process keeps of what it has unpacked, for all its open shards together: what was used last, up to a bound."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol
from weakref import ref

from dtrain.data.stream.forks import FORKS


class Owner(Protocol):
    """Has the values, so that they go when it does."""

    kept: dict[int, Any]


class Kept:
    """Tells owners which of their values to drop. Any thread may use it; the child of a fork begins with an empty one."""

    def __init__(self) -> None:
        self._told = False
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._sizes: OrderedDict[tuple[int, int], tuple[ref[Owner], int]] = OrderedDict()  # what was used last comes last
        self.size = 0
        """Bytes of all values; those of an owner that has gone count until it is their turn."""

    def after_fork(self) -> None:
        """The lock may have been held, by a thread that is not here."""
        self._start()

    def get(self, owner: Owner, number: int, make: Callable[[], tuple[Any, int]], *, most_bytes: int) -> Any:
        """The owner's value, made by ``make``, with its bytes, if it is not there. Those used longest ago make room.

        Args:
            owner: of the value; one thread at a time asks for what is its.
            number: of the value.
            make: called without the lock.
            most_bytes: of all values of all owners; the one that is returned may be larger.
        """
        key = (id(owner), number)
        with self._lock:
            if key in self._sizes:
                self._sizes.move_to_end(key)
            if number in owner.kept:
                return owner.kept[number]
        value, size = make()
        with self._lock:
            if not self._told:
                self._told = True
                FORKS.tell(self)
            owner.kept[number] = value
            self._drop(key)  # of one that had this address before
            self._sizes[key] = ref(owner), size
            self.size += size
            while self.size > most_bytes and len(self._sizes) > 1:
                first = next(iter(self._sizes))
                if (other := self._drop(first)) is not None:
                    other.kept.pop(first[1], None)
        return value

    def _drop(self, key: tuple[int, int]) -> Owner | None:
        found = self._sizes.pop(key, None)
        if found is None:
            return None
        self.size -= found[1]
        return found[0]()

    def forget(self, owner: Owner) -> None:
        """Drop all values of one owner."""
        with self._lock:
            for number in list(owner.kept):
                self._drop((id(owner), number))
            owner.kept.clear()


KEPT = Kept()
