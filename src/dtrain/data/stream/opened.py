"""The shards that a process has open: a few, those that were used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from dtrain.data.stream.formats.base import Shard, one_line
from dtrain.errors import DataError, ShardError

Opener = Callable[[int], tuple[Shard, int]]


class _Opened:
    """A shard and the bytes that it keeps in use. Its lock is held to open, read and close it: one thread at a time."""

    __slots__ = ("lock", "shard", "size")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shard: Shard | None = None
        self.size = 0


class OpenShards:
    """Reads samples from shards, and opens these when they are first needed.

    Args:
        open_shard: number of a shard -> the shard, and how many bytes it keeps others from removing.
        name_of: number of a shard -> what it is called in errors.
        most: shards that are open at a time.
        most_bytes: that they keep in use together; one shard may have more.
    """

    def __init__(self, open_shard: Opener, name_of: Callable[[int], str], *, most: int, most_bytes: int | None) -> None:
        self._open, self._name_of = open_shard, name_of
        self._most, self._most_bytes = most, most_bytes
        self._lock = threading.Lock()
        self._records: OrderedDict[int, _Opened] = OrderedDict()

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
            if not _is_for_threads(shard):
                return self._decoded(shard, number, rows)
        return self._decoded(shard, number, rows)

    def _decoded(self, shard: Shard, number: int, rows: Sequence[int]) -> list[Any]:
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

    def _record(self, number: int) -> _Opened:
        with self._lock:
            record = self._records.get(number)
            if record is not None:
                self._records.move_to_end(number)
                return record
            record = self._records[number] = _Opened()
            surplus = self._surplus()
        _close(surplus)
        return record

    def _surplus(self) -> list[_Opened]:
        """Takes out what is too much, the newest one never. Only under the lock."""
        gone = []
        used = sum(record.size for record in self._records.values())
        while len(self._records) > 1 and (
            len(self._records) > self._most or (self._most_bytes is not None and used > self._most_bytes)
        ):
            gone.append(self._records.popitem(last=False)[1])
            used -= gone[-1].size
        return gone

    def close(self) -> None:
        """Let go of all shards that no thread reads at this moment; those are closed when nobody has them any more."""
        with self._lock:
            gone = list(self._records.values())
            self._records.clear()
        _close(gone)


def _close(records: list[_Opened]) -> None:
    for record in records:
        if record.lock.acquire(blocking=False):
            try:
                if record.shard is not None and not _is_for_threads(record.shard):
                    record.shard.close()
                record.shard = None
            finally:
                record.lock.release()


def _is_for_threads(shard: Shard) -> bool:
    """Whether several threads may read from it. It is not closed then, since one may be at it, but only left alone."""
    return getattr(shard, "any_thread", False)
