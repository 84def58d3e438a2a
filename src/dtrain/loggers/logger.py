"""Define the ``Logger`` protocol and combine loggers: ``multi``, ``close``, ``fault_tolerant`` and ``failed_loggers``.

A failing logger never stops training. ``FaultTolerantLogger`` calls a logger directly and drops the logger with one warning.
``BackgroundLogger`` calls a writer in a thread with a bounded queue and a timeout, so that a slow server blocks no training.
``to_plain_value`` and ``UniqueNames`` make the values and names that all loggers write.
"""

from __future__ import annotations

import atexit
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from dtrain import spans
from dtrain.arguments import check_number, format_count, format_error_line, warn
from dtrain.dist.context import exit_exception, register_shutdown_hook
from dtrain.dist.init import get_dist_info
from dtrain.errors import ConfigError
from dtrain.run.run_files import NON_FINITE

# Further records are skipped while the queue is full.
MAX_QUEUED = 1000
# seconds to wait at the end for queued records
CLOSE_TIMEOUT_S = 10.0

Ranks = Literal[0, "all"]
# limit for nested lists; a list that contains itself would recurse forever
_MAX_DEPTH = 8


@runtime_checkable
class Logger(Protocol):
    """Function ``logger(step, numbers)``. An optional method ``close()`` writes buffered records."""

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None: ...


def multi(*loggers: Logger) -> Logger:
    """Combine several loggers into one logger that calls all of them in order.

    A logger that raises is dropped with one warning. The remaining loggers continue. Each gets a dict of its own.

    Args:
        loggers: functions of ``(step, numbers)``, such as ``jsonl(...)``; your own functions are made ``fault_tolerant``.

    Example:
        >>> import dtrain as dt
        >>> memory = dt.loggers.in_memory()
        >>> log = dt.loggers.multi(memory, lambda step, numbers: print(step, sorted(numbers)))
        >>> log(10, {"loss": 0.5, "lr": 0.1})
        10 ['loss', 'lr']
        >>> memory.column("loss")
        {10: 0.5}

    Raises:
        ConfigError: a logger is not callable.
    """
    return _MultiLogger(tuple(fault_tolerant(logger) for logger in loggers))


class _MultiLogger:
    __slots__ = ("_loggers",)
    # Every logger in the tuple is fault tolerant.
    handles_failures = True

    def __init__(self, loggers: tuple[Logger, ...]) -> None:
        self._loggers = loggers

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        for logger in self._loggers:
            # A logger may change its numbers.
            logger(step, dict(numbers))

    @property
    def takes_media(self) -> bool:
        return any(map(takes_media, self._loggers))

    def log_media(self, step: int, media: Mapping[str, Any], /) -> None:
        for logger in self._loggers:
            if takes_media(logger):
                logger.log_media(step, dict(media))  # type: ignore[attr-defined]

    def close(self) -> None:
        for logger in self._loggers:
            close(logger)


def takes_media(logger: Logger) -> bool:
    """Return True if a logger, or one of several, has ``log_media``, for pictures, texts and tables."""
    return bool(getattr(logger, "takes_media", False))


def close(logger: Logger) -> None:
    """Write the buffered records of a logger and end the logger. Later records are ignored.

    dtrain closes all loggers at the end of the ``init_dist`` block and at process exit, so this call is seldom needed.

    Args:
        logger: any logger; without a ``close`` method, nothing happens.

    Example:
        >>> import io
        >>> import dtrain as dt
        >>> log = dt.loggers.console(stream=io.StringIO())
        >>> dt.loggers.close(log)
        >>> log(1, {"loss": 0.5})  # ignored

    Raises:
        ConfigError: ``logger`` is not callable.
    """
    if not callable(logger):
        raise ConfigError(
            f"close: logger must be a function of (step, numbers), got {logger!r}. Pass a logger, such as dt.loggers.console()."
        )
    close_method = getattr(logger, "close", None)
    if close_method is not None:
        close_method()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedLogger:
    """Logger of this process that failed or hung: name, step of the record that revealed the failure, and error text."""

    name: str
    step: int | None
    error: str


class _Closable(Protocol):
    def close(self) -> None: ...


# Both are facts of the process, like ``atexit``: a logger is a plain function without an owner, its warning may be shown once
# only, and the end of the ``init_dist`` block and of the process must close all loggers that are still open, by identity.
_FAILED: list[FailedLogger] = []
_OPEN_LOGGERS: dict[int, _Closable] = {}


def failed_loggers() -> tuple[FailedLogger, ...]:
    """Return the loggers dropped in this process so far, in order.

    Each dropped logger caused one warning and one event in the run's ledger.

    Example:
        >>> import dtrain as dt
        >>> [failed.name for failed in dt.loggers.failed_loggers()]  # doctest: +SKIP
        ['wandb']
    """
    return tuple(_FAILED)


def fault_tolerant(logger: Logger, *, name: str | None = None, timeout_s: float | None = None) -> Logger:
    """Wrap a logger so that a failure does not stop training: one warning, one event in the run's ledger, then no more calls.

    The loggers of dtrain are wrapped already. ``multi`` wraps its arguments.

    Args:
        logger: function of ``(step, numbers)``.
        name: name in the warning; None uses the name of the function.
        timeout_s: seconds per call; if given, the logger runs in a background thread with plain copies of the numbers (see
            ``in_memory``), and a longer call drops the logger. Use a timeout for network calls. None calls directly.

    Example:
        >>> import dtrain as dt
        >>> def send(step, numbers):
        ...     print(step, numbers)
        >>> log = dt.loggers.fault_tolerant(send)
        >>> log(10, {"loss": 0.5})
        10 {'loss': 0.5}

    Raises:
        ConfigError: ``logger`` is not callable, or ``timeout_s`` is not a number above 0.
    """
    if not callable(logger):
        raise ConfigError(
            f"fault_tolerant: logger must be a function of (step, numbers), got {logger!r}. "
            "Pass a logger, such as dt.loggers.console()."
        )
    name = name or str(getattr(logger, "__name__", type(logger).__name__))
    if timeout_s is not None:
        check_number(name, "timeout_s", timeout_s, above=0)
        return BackgroundLogger(
            name,
            lambda: _LoggerWriter(logger),
            convert=lambda numbers: {str(key): to_plain_value(value) for key, value in numbers.items()},
            timeout_s=timeout_s,
            takes_media=takes_media(logger),
        )
    return logger if getattr(logger, "handles_failures", False) else FaultTolerantLogger(logger, name)


class FaultTolerantLogger:
    """Wrapper that calls a logger directly and drops the logger after the first exception."""

    __slots__ = ("_logger", "_name")
    handles_failures = True

    def __init__(self, logger: Logger, name: str) -> None:
        self._logger: Logger | None = logger
        self._name = name
        if hasattr(logger, "close"):
            register_open_logger(self)

    @property
    def takes_media(self) -> bool:
        """True if the logger takes pictures, texts and tables, or has failed."""
        return self._logger is None or takes_media(self._logger)

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        if self._logger is not None:
            self._call(step, self._logger, numbers)

    def log_media(self, step: int, media: Mapping[str, Any], /) -> None:
        """Log pictures, texts and tables as ``loggers.media`` converts them."""
        if self._logger is not None:
            self._call(step, self._logger.log_media, media)  # type: ignore[attr-defined]

    def _call(self, step: int, log: Callable[[int, Mapping[str, Any]], None], values: Mapping[str, Any]) -> None:
        spans.begin("log")
        try:
            log(step, values)
        except Exception as error:  # noqa: BLE001 - training continues after any error
            logger, self._logger = self._logger, None
            unregister_logger(self)
            # A progress bar must restore the terminal.
            with suppress(Exception):
                if logger is not None:
                    close(logger)
            report_failure(self._name, step, error)
        finally:
            spans.end("log")

    def close(self) -> None:
        """Close the logger. Later records are ignored."""
        unregister_logger(self)
        logger, self._logger = self._logger, None
        try:
            if logger is not None:
                close(logger)
        except Exception as error:  # noqa: BLE001 - training continues after any error
            report_failure(self._name, None, error)


def null_logger(step: int, numbers: Mapping[str, Any], /) -> None:
    """Ignore the record. Ranks that write nothing use this logger."""


def report_failure(name: str, step: int | None, error: BaseException) -> None:
    """Record and warn that a logger is no longer used. Call in the main thread, so that the warning points to the loop."""
    text = format_error_line(error).removesuffix(": ")
    _FAILED.append(FailedLogger(name=name, step=step, error=text))
    spans.record_event("dropped", logger=name, error=text)
    warn(f"{name}: {text}. Metrics are no longer logged there.")


def register_open_logger(logger: _Closable) -> None:
    """Close ``logger`` at the end of the ``init_dist`` block or of this process."""
    if not _OPEN_LOGGERS:
        register_shutdown_hook("loggers", _close_all)
        atexit.unregister(_close_at_exit)
        atexit.register(_close_at_exit, os.getpid())
    _OPEN_LOGGERS[id(logger)] = logger


def unregister_logger(logger: _Closable) -> None:
    """Remove a closed logger from the loggers to close at the end."""
    _OPEN_LOGGERS.pop(id(logger), None)


def _close_all(error: BaseException | None) -> None:
    open_loggers = list(_OPEN_LOGGERS.values())
    for logger in open_loggers:
        # All background threads finish concurrently.
        begin = getattr(logger, "begin_closing", None)
        if begin is not None:
            begin(failed=error is not None)
    for logger in open_loggers:
        # A warning filter may turn a warning into an error. An earlier error has priority.
        with suppress(*(() if error is None else (Warning,))):
            logger.close()


def _close_at_exit(pid: int) -> None:
    # A fork must not close the loggers of the parent.
    if pid == os.getpid():
        _close_all(exit_exception())


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRecord:
    """Logged record: the step of the loop, seconds since 1970, plain values by written name, and pictures, texts and tables."""

    step: int
    time: float
    numbers: Mapping[str, Any]
    media: Mapping[str, Any] = field(default_factory=dict)


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
        takes_media: bool = False,
    ) -> None:
        self.takes_media = takes_media
        self._name, self._convert, self._max_queued = name, convert, max_queued
        self._timeout_s, self._close_timeout_s = timeout_s, min(close_timeout_s, timeout_s)
        self._records: deque[MetricRecord] = deque()
        self._wake = threading.Condition()
        self._error: BaseException | None = None
        # ``time.monotonic()`` at the start of the running call
        self._call_started_at: float | None = None
        # True after close or failure
        self._ended = False
        self._closing = self._failed = self._skipped = False
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
        self._queue(record)

    def log_media(self, step: int, media: Mapping[str, Any], /) -> None:
        """Log pictures, texts and tables as ``loggers.media`` converts them."""
        if not self._ended:
            self._queue(MetricRecord(step=step, time=time.time(), numbers={}, media=media))

    def _queue(self, record: MetricRecord) -> None:
        with self._wake:
            failure, full = self._find_failure(), len(self._records) >= self._max_queued
            if failure is None and not full:
                self._records.append(record)
                self._wake.notify()
        if failure is not None:
            self._fail(record.step, failure)
        elif full and not self._skipped:
            self._skipped = True
            warn(
                f"{self._name}: logger must be as fast as the loop, got {self._max_queued} queued records. "
                "Further records are skipped. Log less often."
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
        report_failure(self._name, step, error)

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
            if record.media:
                self._logger.log_media(record.step, record.media)  # type: ignore[attr-defined]
            else:
                self._logger(record.step, record.numbers)

    def close(self, *, failed: bool) -> None:
        close(self._logger)


def is_writer(ranks: Ranks, caller: str) -> bool:
    """Return True if this rank writes.

    Raises:
        ConfigError: ``ranks`` is neither 0 nor "all".
    """
    if ranks not in (0, "all") or isinstance(ranks, bool):
        raise ConfigError(f"{caller}: ranks must be 0 or 'all', got {ranks!r}. Pass ranks=0 to log on rank 0 alone.")
    return ranks == "all" or get_dist_info().rank == 0


def rank_path(path: str | Path, ranks: Ranks, caller: str) -> Path | None:
    """Return the file or folder that this rank writes; None if this rank writes nothing.

    ``{rank}`` in the path makes every rank write. ``{time}`` becomes the current time in UTC.

    Raises:
        ConfigError: the path is on a server, has a field other than rank and time, or is one file for all ranks.
    """
    text = os.fspath(path)
    if "://" in text:
        raise ConfigError(
            f"{caller}: path must be local, got {text!r}. Write to a local path and upload the folder of the run."
        )
    unknown = sorted(set(re.findall(r"\{(\w+)\}", text)) - {"rank", "time"})
    if unknown:
        raise ConfigError(
            f"{caller}: path may have only {{rank}} and {{time}} as fields, got {{{unknown[0]}}} in {text!r}. "
            "Remove the other fields."
        )
    if ranks == "all" and "{rank}" not in text:
        raise ConfigError(f"{caller}: path must contain {{rank}} if ranks='all', got {text!r}. Each rank needs its own file.")
    if not is_writer(ranks, caller) and "{rank}" not in text:
        return None
    now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return Path(text.replace("{rank}", str(get_dist_info().rank)).replace("{time}", now))


def to_plain_value(value: Any, _depth: int = 0) -> Any:
    """Convert a value to plain JSON data: scalar tensors and NumPy scalars become numbers.

    Values without a JSON form become ``{"unloggable": "Tensor [2, 3]"}``. Non-finite numbers stay floats.

    Host sync: for a tensor on a device.
    """
    if value is None or type(value) in (float, int, bool, str):
        return value
    scalar = value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item") and not hasattr(value, "placements"):
        # A tensor without data raises. Reading a DTensor would need a collective, so DTensors are excluded above.
        with suppress(RuntimeError):
            scalar = value.item()
    # Subclasses such as enum members become plain values.
    for kind in (bool, int, float, str):
        if isinstance(scalar, kind):
            return kind(scalar)
    if _depth < _MAX_DEPTH and isinstance(value, list | tuple):
        return [to_plain_value(each, _depth + 1) for each in value]
    if _depth < _MAX_DEPTH and isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: to_plain_value(each, _depth + 1) for name, each in value.items()}
    shape = getattr(value, "shape", None)
    return {"unloggable": type(value).__name__ + (f" {list(shape)}" if isinstance(shape, tuple) and shape else "")}


def encode_nonfinite(value: Any) -> Any:
    """Replace non-finite numbers by the texts ``nan``, ``inf`` and ``-inf``, so that every JSON reader accepts the value."""
    return _map_leaves(value, lambda leaf: str(leaf) if type(leaf) is float and not math.isfinite(leaf) else leaf)


def decode_nonfinite(value: Any) -> Any:
    """Replace the texts of ``encode_nonfinite`` by non-finite numbers."""
    return _map_leaves(value, lambda leaf: NON_FINITE.get(leaf, leaf) if type(leaf) is str else leaf)


def _map_leaves(value: Any, convert: Callable[[Any], Any]) -> Any:
    if type(value) is list:
        return [_map_leaves(item, convert) for item in value]
    if type(value) is dict:
        return {name: _map_leaves(item, convert) for name, item in value.items()}
    return convert(value)


class UniqueNames:
    """Function from the name of a metric to its written name, always the same for one name.

    If two names become equal, the later name gets a number, ``a_b`` and ``a_b_2``, with one warning.

    Args:
        caller: prefix of the warning.
        clean: function that replaces invalid characters.
        reserved: names with another meaning; a metric with a reserved name is written as ``metric/<name>``.
    """

    __slots__ = ("_caller", "_clean", "_known", "_reserved", "_used")

    def __init__(self, caller: str, clean: Callable[[str], str] = str, reserved: Collection[str] = ()) -> None:
        self._caller, self._clean, self._reserved = caller, clean, reserved
        self._known: dict[str, str] = {}
        self._used: set[str] = set()

    def __call__(self, name: str) -> str:
        known = self._known.get(name)
        return known if known is not None else self._assign(name)

    def _assign(self, name: str) -> str:
        wanted = self._clean(name)
        wanted = f"metric/{wanted}" if wanted in self._reserved else wanted
        unique, count = wanted, 2
        while unique in self._used:
            unique, count = f"{wanted}_{count}", count + 1
        self._known[name] = unique
        self._used.add(unique)
        if unique != wanted:
            warn(f"{self._caller}: metric {name!r} is written as {unique!r}. Another metric is written as {wanted!r}.")
        return unique
