"""State of a dataset in one process: open shards (``OpenShardCache``), decoded data (``ByteLRU``) and the threads that fetch
shards (``ShardPrefetcher``). The dataset owns all three, and a forked child makes new ones."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dtrain.data.stream.formats.shard_format import Shard, one_line
from dtrain.errors import DataError, ShardError


class ByteLRU:
    """Values that a reader of shards caches, bounded in bytes over all of its open shards, least recently used first.

    The reader owns the cache and passes it to its shards. Any thread may use it. A forked child makes a new cache, because
    another thread of the parent may hold the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The most recently used value is last.
        self._values: OrderedDict[tuple[object, int], tuple[Any, int]] = OrderedDict()
        self.size = 0
        """Bytes of all values."""

    def get(self, owner: object, number: int, make: Callable[[], tuple[Any, int]], *, max_bytes: int) -> Any:
        """Return a value of an owner. If it is missing, ``make`` makes the value and its size, and old values are evicted.

        Args:
            owner: object that stands for a shard. The cache keeps it until its values are evicted.
            number: number of the value.
            make: function that makes the value and its size; called without the lock.
            max_bytes: maximum of all values of all owners; the returned value may be larger.
        """
        key = (owner, number)
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        value, size = make()
        with self._lock:
            self._drop(key)
            self._values[key] = value, size
            self.size += size
            while self.size > max_bytes and len(self._values) > 1:
                self._drop(next(iter(self._values)))
        return value

    def _drop(self, key: tuple[object, int]) -> None:
        self.size -= self._values.pop(key, (None, 0))[1]

    def drop_owner(self, owner: object) -> None:
        """Drop all values of an owner."""
        with self._lock:
            for key in [key for key in self._values if key[0] is owner]:
                self._drop(key)


ShardOpener = Callable[[int], tuple[Shard, int]]


class _OpenShard:
    """A shard, and the bytes of the cache that it uses. A thread holds the lock to open, read or close the shard."""

    __slots__ = ("lock", "shard", "size")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shard: Shard | None = None
        self.size = 0


class OpenShardCache:
    """Reader of samples that opens shards on first use.

    Args:
        open_shard: number of a shard -> the shard, and the bytes of the cache that it keeps in use.
        name_of: number of a shard -> name of the shard in errors.
        max_open: maximum of open shards.
        max_bytes: maximum of bytes that open shards keep in use; a single shard may have more.
    """

    def __init__(self, open_shard: ShardOpener, name_of: Callable[[int], str], *, max_open: int, max_bytes: int | None) -> None:
        self._open, self._name_of = open_shard, name_of
        self._max_open, self._max_bytes = max_open, max_bytes
        self._lock = threading.Lock()
        self._records: OrderedDict[int, _OpenShard] = OrderedDict()

    def __contains__(self, number: int) -> bool:
        return number in self._records

    def read(self, number: int, rows: Sequence[int]) -> list[Any]:
        """Read the samples in ``rows`` of a shard.

        Raises:
            ShardError: the shard cannot be opened, or its bytes cannot be read.
            DataError: a sample cannot be decoded.
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
            if not shard.thread_safe:
                return self._decode(shard, number, rows)
        return self._decode(shard, number, rows)

    def _decode(self, shard: Shard, number: int, rows: Sequence[int]) -> list[Any]:
        samples: list[Any] = []
        try:
            for row in rows:
                samples.append(shard[row])
        except DataError as error:
            # The bytes of the shard cannot be read.
            raise ShardError(str(error)) from error
        except Exception as error:
            first = next(iter(str(error).strip().splitlines()), "")
            reason = f"sample {rows[len(samples)]} cannot be decoded: {type(error).__name__}: {one_line(first)}"
            raise DataError(f"{self._name_of(number)}: {reason}") from error
        return samples

    def _record(self, number: int) -> _OpenShard:
        with self._lock:
            record = self._records.get(number)
            if record is not None:
                self._records.move_to_end(number)
                return record
            record = self._records[number] = _OpenShard()
            evicted = self._evict()
        _close_shards(evicted)
        return record

    def _evict(self) -> list[_OpenShard]:
        """Remove and return the least recently used shards beyond the limits, except the newest shard. Requires the lock."""
        removed = []
        used = sum(record.size for record in self._records.values())
        while len(self._records) > 1 and (
            len(self._records) > self._max_open or (self._max_bytes is not None and used > self._max_bytes)
        ):
            removed.append(self._records.popitem(last=False)[1])
            used -= removed[-1].size
        return removed

    def close(self) -> None:
        """Close all shards that no thread reads. A shard in use is closed when its last reader drops it."""
        with self._lock:
            removed = list(self._records.values())
            self._records.clear()
        _close_shards(removed)


def _close_shards(records: list[_OpenShard]) -> None:
    for record in records:
        if record.lock.acquire(blocking=False):
            try:
                # Another thread may still read a thread-safe shard, which is dropped.
                if record.shard is not None and not record.shard.thread_safe:
                    record.shard.close()
                record.shard = None
            finally:
                record.lock.release()


_MAX_QUEUED = 256
_JOIN_TIMEOUT_S = 10.0


class ShardPrefetcher:
    """Threads that fetch shards in the order of requests. The threads exist only while there are requests.

    Args:
        fetch: function of the number of a shard and a stop function. Its exceptions are dropped, because the reader of the
            shard raises the same exception.
        threads: maximum of threads.
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
        """Request shards, and return at once."""
        with self._lock:
            if self._stopped:
                return
            self._queue += [number for number in numbers if number not in self._working and number not in self._queue]
            # The readers have reached the oldest requests in the meantime.
            while len(self._queue) > _MAX_QUEUED:
                self._queue.popleft()
            new_threads = min(self._max_threads - self._running, len(self._queue))
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            for _ in range(new_threads):
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
            # The reader of the shard raises the same exception.
            except Exception:  # noqa: BLE001
                pass
            finally:
                with self._lock:
                    self._working.discard(number)

    def close(self) -> None:
        """Stop fetching. Wait for the threads to end, except for a thread that hangs on a server."""
        with self._lock:
            self._stopped = True
            self._queue.clear()
            threads = list(self._threads)
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        for thread in threads:
            # The current thread may drop the last reference to the dataset.
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
