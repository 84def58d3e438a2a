"""The shards that a process has open: a few, those that were used last.

Threads that fetch shards before they are needed. They are there only while there is something to fetch."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dtrain.data.stream.formats.shard_format import Shard, one_line
from dtrain.errors import DataError, ShardError

ShardOpener = Callable[[int], tuple[Shard, int]]


class _OpenShard:
    """A shard and the bytes that it keeps in use. Its lock is held to open, read and close it: one thread at a time."""

    __slots__ = ("lock", "shard", "size")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shard: Shard | None = None
        self.size = 0


class OpenShardCache:
    """Reads samples from shards, and opens these when they are first needed.

    Args:
        open_shard: number of a shard -> the shard, and how many bytes it keeps others from removing.
        name_of: number of a shard -> what it is called in errors.
        max_open: shards that are open at a time.
        max_bytes: that they keep in use together; one shard may have more.
    """

    def __init__(self, open_shard: ShardOpener, name_of: Callable[[int], str], *, max_open: int, max_bytes: int | None) -> None:
        self._open, self._name_of = open_shard, name_of
        self._max_open, self._max_bytes = max_open, max_bytes
        self._lock = threading.Lock()
        self._records: OrderedDict[int, _OpenShard] = OrderedDict()

    def __contains__(self, number: int) -> bool:
        return number in self._records

    def read(self, number: int, rows: Sequence[int]) -> list[Any]:
        """The samples in these rows of a shard.

        Raises:
            ShardError: the shard cannot be opened, or its bytes do not come. DataError: a sample cannot be decoded.
        """
        record = self._record(number)
        with record.lock:
            shard = record.shard
            if shard is None:
                try:
                    shard, record.size = self._open(number)
                except DataError as error:
                    raise ShardError(one_line(error)) from error
                record.shard = shard
            if not _is_thread_safe(shard):
                return self._decode(shard, number, rows)
        return self._decode(shard, number, rows)

    def _decode(self, shard: Shard, number: int, rows: Sequence[int]) -> list[Any]:
        samples: list[Any] = []
        try:
            for row in rows:
                samples.append(shard[row])
        except DataError as error:  # its bytes do not come
            raise ShardError(str(error)) from error
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), "")
            what = f"sample {rows[len(samples)]} cannot be decoded: {type(error).__name__}: {one_line(first)}"
            raise DataError(f"{self._name_of(number)}: {what}") from error
        return samples

    def _record(self, number: int) -> _OpenShard:
        with self._lock:
            record = self._records.get(number)
            if record is not None:
                self._records.move_to_end(number)
                return record
            record = self._records[number] = _OpenShard()
            surplus = self._evict()
        _close_shards(surplus)
        return record

    def _evict(self) -> list[_OpenShard]:
        """Takes out what is too much, the newest one never. Only under the lock."""
        gone = []
        used = sum(record.size for record in self._records.values())
        while len(self._records) > 1 and (
            len(self._records) > self._max_open or (self._max_bytes is not None and used > self._max_bytes)
        ):
            gone.append(self._records.popitem(last=False)[1])
            used -= gone[-1].size
        return gone

    def close(self) -> None:
        """Let go of all shards that no thread reads at this moment; those are closed when nobody has them any more."""
        with self._lock:
            gone = list(self._records.values())
            self._records.clear()
        _close_shards(gone)


def _close_shards(records: list[_OpenShard]) -> None:
    for record in records:
        if record.lock.acquire(blocking=False):
            try:
                if record.shard is not None and not _is_thread_safe(record.shard):
                    record.shard.close()
                record.shard = None
            finally:
                record.lock.release()


def _is_thread_safe(shard: Shard) -> bool:
    """Whether several threads may read from it. It is not closed then, since one may be at it, but only left alone."""
    return getattr(shard, "thread_safe", False)


_MAX_QUEUED = 256
_JOIN_TIMEOUT_S = 10.0


class ShardPrefetcher:
    """Fetches what was asked for, in that order, a few at a time.

    Args:
        fetch: number of a shard, and whether to stop -> nothing. What it raises is forgotten: whoever reads the shard will
            come upon the same.
        threads: at most so many.
    """

    def __init__(self, fetch: Callable[[int, Callable[[], bool]], None], threads: int) -> None:
        self._fetch, self._max_threads = fetch, threads
        self._lock = threading.Lock()
        self._queue: deque[int] = deque()
        self._working: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._stopped = False

    def request(self, numbers: Iterable[int]) -> None:
        """Fetch these, too. Returns at once."""
        with self._lock:
            if self._stopped:
                return
            self._queue += [number for number in numbers if number not in self._working and number not in self._queue]
            while len(self._queue) > _MAX_QUEUED:  # whoever reads has come to the first ones by now
                self._queue.popleft()
            missing = min(self._max_threads - self._running, len(self._queue))
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            for _ in range(missing):
                thread = threading.Thread(target=self._work, name="dtrain-ahead", daemon=True)
                thread.start()
                self._threads.append(thread)
                self._running += 1

    def _next_shard(self) -> int | None:
        with self._lock:
            if self._stopped or not self._queue:
                self._running -= 1
                return None
            number = self._queue.popleft()
            self._working.add(number)
            return number

    def _work(self) -> None:
        while (number := self._next_shard()) is not None:
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
            self._queue.clear()
            threads = list(self._threads)
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in threads:
            if thread is not threading.current_thread():  # which drops the last mention of the dataset
                thread.join(max(0.0, deadline - time.monotonic()))
