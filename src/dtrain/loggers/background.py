"""Run a logger in a background thread with a bounded queue and a timeout, so that a slow server does not block training."""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dtrain.arguments import check_number, format_count
from dtrain.loggers.logger import register_open_logger, report_failure, unregister_logger
from dtrain.loggers.sanitize import to_plain_value

if TYPE_CHECKING:
    from dtrain.loggers.logger import Logger

# Further records are skipped while the queue is full.
MAX_QUEUED = 1000
# seconds to wait at the end for queued records
CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRecord:
    """Logged record: the step of the loop, seconds since 1970, and plain values by written name."""

    step: int
    time: float
    numbers: Mapping[str, Any]


class RecordWriter(Protocol):
    """Writer that the background thread calls. Any exception drops the logger."""

    def write(self, records: Sequence[MetricRecord]) -> None:
        """Write the records queued since the last call, at least one record."""
        ...

    def close(self, *, failed: bool) -> None:
        """End the writer. ``failed`` is True if training ends with an exception."""
        ...


class BackgroundLogger:
    """Logger that opens and calls a ``RecordWriter`` in a daemon thread. Training waits only in ``close``, for a few seconds.

    A call that raises or takes longer than ``timeout_s`` drops the logger. The next record or ``close`` reports the failure.
    """

    handles_failures = True

    def __init__(
        self,
        name: str,
        open_writer: Callable[[], RecordWriter],
        *,
        convert: Callable[[Mapping[str, Any]], dict[str, Any]],
        timeout_s: float,
        max_queued: int = MAX_QUEUED,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        self._name, self._convert, self._max_queued = name, convert, max_queued
        self._timeout_s, self._close_timeout_s = timeout_s, min(close_timeout_s, timeout_s)
        self._records: deque[MetricRecord] = deque()
        self._wake = threading.Condition()
        self._error: BaseException | None = None
        # ``time.monotonic()`` at the start of the running call
        self._call_started_at: float | None = None
        # True after close or failure
        self._ended = False
        self._closing, self._failed, self._skipped = False, False, 0
        self._thread = threading.Thread(target=self._run, args=(open_writer,), daemon=True, name=f"dtrain-{name}")
        self._thread.start()
        register_open_logger(self)

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        if self._ended:
            return
        try:
            record = MetricRecord(step=int(step), time=time.time(), numbers=self._convert(numbers))
        except Exception as error:  # noqa: BLE001 - training continues
            self._fail(step, error)
            return
        with self._wake:
            failure, full = self._find_failure(), len(self._records) >= self._max_queued
            if failure is None and not full:
                self._records.append(record)
                self._wake.notify()
        if failure is not None:
            self._fail(step, failure)
        elif full:
            self._skip_record()

    def _skip_record(self) -> None:
        self._skipped += 1
        if self._skipped == 1:
            warnings.warn(
                f"{self._name}: logger must be as fast as the loop, got {self._max_queued} queued records. "
                "Further records are skipped. Log less often.",
                stacklevel=3,
            )

    def _find_failure(self) -> BaseException | None:
        since = self._call_started_at
        if self._error is None and since is not None and time.monotonic() - since > self._timeout_s:
            return TimeoutError(f"no answer for {self._timeout_s:g} s")
        return self._error

    def begin_closing(self, *, failed: bool = False) -> None:
        """Ask the thread to end after writing all queued records."""
        with self._wake:
            self._closing, self._failed = True, failed
            self._wake.notify()

    def close(self) -> None:
        """Wait a few seconds until all records are written. Later records are ignored."""
        unregister_logger(self)
        if self._ended:
            return
        if not self._closing:
            self.begin_closing()
        self._thread.join(self._close_timeout_s)
        error = self._error
        if self._thread.is_alive():
            queued = format_count(len(self._records), "record")
            error = TimeoutError(f"not finished {self._close_timeout_s:g} s after the end. {queued} still queued")
        self._ended = True
        if error is not None:
            self._fail(None, error)

    def _fail(self, step: int | None, error: BaseException) -> None:
        self._ended = True
        unregister_logger(self)
        with self._wake:
            self._closing, self._failed = True, True
            self._records.clear()
            self._wake.notify()
        report_failure(self._name, step, error, stacklevel=4)

    def _run(self, open_writer: Callable[[], RecordWriter]) -> None:
        try:
            writer = self._call_timed(open_writer)
            while records := self._next_records():
                self._call_timed(lambda: writer.write(records))
            self._call_timed(lambda: writer.close(failed=self._failed))
        except BaseException as error:  # noqa: BLE001 - reported in the thread that logs
            self._error = error

    def _call_timed(self, call: Callable[[], Any]) -> Any:
        self._call_started_at = time.monotonic()
        result = call()
        self._call_started_at = None
        return result

    def _next_records(self) -> list[MetricRecord]:
        """Wait for records and return all queued records; empty at the end."""
        with self._wake:
            while not self._records and not self._closing:
                self._wake.wait()
            records = list(self._records)
            self._records.clear()
        return records


class _LoggerWriter:
    """Adapter from a plain logger to ``RecordWriter``."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    def write(self, records: Sequence[MetricRecord]) -> None:
        for record in records:
            self._logger(record.step, record.numbers)

    def close(self, *, failed: bool) -> None:
        close = getattr(self._logger, "close", None)
        if close is not None:
            close()


def run_in_background(logger: Logger, *, name: str, timeout_s: float) -> BackgroundLogger:
    """Run ``logger`` in a background thread. See ``fault_tolerant``."""
    check_number(name, "timeout_s", timeout_s, above=0)
    return BackgroundLogger(
        name,
        lambda: _LoggerWriter(logger),
        convert=lambda numbers: {str(key): to_plain_value(value) for key, value in numbers.items()},
        timeout_s=timeout_s,
    )
