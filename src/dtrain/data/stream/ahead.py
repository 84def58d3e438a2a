"""Threads that fetch shards before they are needed. They are there only while there is something to fetch."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

_MOST_WAITING = 256
_ENDING_S = 10.0


class Ahead:
    """Fetches what was asked for, in that order, a few at a time.

    Args:
        fetch: number of a shard, and whether to stop -> nothing. What it raises is forgotten: whoever reads the shard will
            come upon the same.
        threads: at most so many.
    """

    def __init__(self, fetch: Callable[[int, Callable[[], bool]], None], threads: int) -> None:
        self._fetch, self._most = fetch, threads
        self._lock = threading.Lock()
        self._waiting: deque[int] = deque()
        self._working: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._stopped = False

    def want(self, numbers: Iterable[int]) -> None:
        """Fetch these, too. Returns at once."""
        with self._lock:
            if self._stopped:
                return
            self._waiting += [number for number in numbers if number not in self._working and number not in self._waiting]
            while len(self._waiting) > _MOST_WAITING:  # whoever reads has come to the first ones by now
                self._waiting.popleft()
            missing = min(self._most - self._running, len(self._waiting))
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            for _ in range(missing):
                thread = threading.Thread(target=self._work, name="dtrain-ahead", daemon=True)
                thread.start()
                self._threads.append(thread)
                self._running += 1

    def _take(self) -> int | None:
        with self._lock:
            if self._stopped or not self._waiting:
                self._running -= 1
                return None
            number = self._waiting.popleft()
            self._working.add(number)
            return number

    def _work(self) -> None:
        while (number := self._take()) is not None:
            try:
                self._fetch(number, lambda: self._stopped)
            except Exception:  # noqa: BLE001  # the reader says it, if there is one
                pass
            finally:
                with self._lock:
                    self._working.discard(number)

    def close(self) -> None:
        """Fetch no more. Returns when the threads have ended, or when one hangs on a server for too long."""
        with self._lock:
            self._stopped = True
            self._waiting.clear()
            threads = list(self._threads)
        deadline = time.monotonic() + _ENDING_S
        for thread in threads:
            if thread is not threading.current_thread():  # which drops the last mention of the dataset
                thread.join(max(0.0, deadline - time.monotonic()))
