"""Sinks that may hang: each writes in a thread of its own, out of a queue that has an end, against a clock."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dtrain.errors import ConfigError
from dtrain.loggers.logger import register_open_logger, report_failure, unregister_logger
from dtrain.loggers.sanitize import to_plain_value

if TYPE_CHECKING:
    from dtrain.loggers.logger import Logger

MAX_QUEUED = 1000  # records that wait; beyond, they are left out
CLOSE_TIMEOUT_S = 10.0  # what is still to be written is given so long at the end


def check_timeout(timeout_s: float, caller: str) -> None:
    """On all ranks, before one of them makes a sink.

    Raises:
        ConfigError: no number of seconds above 0.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ConfigError(f"{caller}: patience_s is a number of seconds above 0, got {timeout_s!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRecord:
    """What was logged: the loop's step, seconds since 1970, plain values by the names they are written under."""

    step: int
    time: float
    numbers: Mapping[str, Any]


class RecordWriter(Protocol):
    """What the thread calls. Anything it raises drops the sink."""

    def write(self, records: Sequence[MetricRecord]) -> None:
        """Write what has come since the call before, at least one record."""
        ...

    def close(self, *, failed: bool) -> None:
        """Nothing comes any more; ``failed`` when training ends with an exception."""
        ...


class BackgroundLogger:
    """A sink whose ``Writer`` is opened and called in a daemon thread. Training waits for it at the end only, and not for long.

    It is dropped when a call raises, or takes longer than ``timeout_s``: that is seen when something is logged, or at the end.
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
        self._call_started_at: float | None = None  # when the call that is under way began
        self._ended = False  # closed, or dropped
        self._closing, self._failed, self._skipped = False, False, 0
        self._thread = threading.Thread(target=self._run, args=(open_writer,), daemon=True, name=f"dtrain-{name}")
        self._thread.start()
        register_open_logger(self)

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        if self._ended:
            return
        try:
            record = MetricRecord(step=int(step), time=time.time(), numbers=self._convert(numbers))
        except Exception as error:  # noqa: BLE001 - training goes on
            self._fail(step, error)
            return
        with self._wake:
            trouble, full = self._find_failure(), len(self._records) >= self._max_queued
            if trouble is None and not full:
                self._records.append(record)
                self._wake.notify()
        if trouble is not None:
            self._fail(step, trouble)
        elif full:
            self._skip_record()

    def _skip_record(self) -> None:
        self._skipped += 1
        if self._skipped == 1:
            warnings.warn(
                f"{self._name}: is slower than the loop logs; {self._max_queued} records wait, and further ones are left out",
                stacklevel=3,
            )

    def _find_failure(self) -> BaseException | None:
        since = self._call_started_at
        if self._error is None and since is not None and time.monotonic() - since > self._timeout_s:
            return TimeoutError(f"no answer for {self._timeout_s:g} s")
        return self._error

    def begin_closing(self, *, failed: bool = False) -> None:
        """Have the thread end when it has written all."""
        with self._wake:
            self._closing, self._failed = True, failed
            self._wake.notify()

    def close(self) -> None:
        """Wait until all is written, for a few seconds; what comes later is ignored."""
        unregister_logger(self)
        if self._ended:
            return
        if not self._closing:
            self.begin_closing()
        self._thread.join(self._close_timeout_s)
        error = self._error
        if self._thread.is_alive():
            error = TimeoutError(
                f"was not done {self._close_timeout_s:g} s after the end; {len(self._records)} records still wait"
            )
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

    def _run(self, opening: Callable[[], RecordWriter]) -> None:
        try:
            writer = self._call_timed(opening)
            while records := self._next_records():
                self._call_timed(lambda: writer.write(records))
            self._call_timed(lambda: writer.close(failed=self._failed))
        except BaseException as error:  # noqa: BLE001 - told in the thread that logs
            self._error = error

    def _call_timed(self, call: Callable[[], Any]) -> Any:
        self._call_started_at = time.monotonic()
        result = call()
        self._call_started_at = None
        return result

    def _next_records(self) -> list[MetricRecord]:
        """All records that wait; none at the end."""
        with self._wake:
            while not self._records and not self._closing:
                self._wake.wait()
            records = list(self._records)
            self._records.clear()
        return records


class _LoggerWriter:
    """A plain sink as a writer."""

    def __init__(self, sink: Logger) -> None:
        self._sink = sink

    def write(self, records: Sequence[MetricRecord]) -> None:
        for record in records:
            self._sink(record.step, record.numbers)

    def close(self, *, failed: bool) -> None:
        close = getattr(self._sink, "close", None)
        if close is not None:
            close()


def run_in_background(sink: Logger, *, name: str, timeout_s: float) -> BackgroundLogger:
    """``sink`` in a thread of its own; see ``fault_tolerant``."""
    check_timeout(timeout_s, name)
    return BackgroundLogger(
        name,
        lambda: _LoggerWriter(sink),
        convert=lambda numbers: {str(key): to_plain_value(value) for key, value in numbers.items()},
        timeout_s=timeout_s,
    )
