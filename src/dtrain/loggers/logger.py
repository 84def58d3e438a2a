"""Define the ``Logger`` protocol and combine loggers: ``multi``, ``close``, ``fault_tolerant`` and ``failed_loggers``.

A failing logger never stops training. ``fault_tolerant`` drops the logger with one warning.
"""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dtrain import spans
from dtrain.dist.context import exit_exception, register_shutdown_hook
from dtrain.errors import ConfigError


@runtime_checkable
class Logger(Protocol):
    """Function ``logger(step, numbers)``. An optional method ``close()`` writes buffered records."""

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None: ...


def multi(*loggers: Logger) -> Logger:
    """Combine several loggers into one logger that calls all of them in order.

    A logger that raises is dropped with one warning. The remaining loggers continue.

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
            logger(step, numbers)

    def close(self) -> None:
        for logger in self._loggers:
            close(logger)


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
        # background.py imports this module.
        pass

        return run_in_background(logger, name=name, timeout_s=timeout_s)
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

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        if self._logger is None:
            return
        spans.begin("log")
        try:
            self._logger(step, numbers)
        except Exception as error:  # noqa: BLE001 - training continues after any error
            logger, self._logger = self._logger, None
            unregister_logger(self)
            # A progress bar must restore the terminal.
            with suppress(Exception):
                getattr(logger, "close", _noop)()
            report_failure(self._name, step, error)
        finally:
            spans.end("log")

    def close(self) -> None:
        """Close the logger. Later records are ignored."""
        unregister_logger(self)
        logger, self._logger = self._logger, None
        try:
            getattr(logger, "close", _noop)()
        except Exception as error:  # noqa: BLE001 - training continues after any error
            report_failure(self._name, None, error)


def null_logger(step: int, numbers: Mapping[str, Any], /) -> None:
    """Ignore the record. Ranks that write nothing use this logger."""


def report_failure(name: str, step: int | None, error: BaseException, *, stacklevel: int = 3) -> None:
    """Record and warn that a logger is no longer used. Call in the main thread, so that the warning points to the loop."""
    text = " ".join(str(error).split()) or type(error).__name__
    _FAILED.append(FailedLogger(name=name, step=step, error=text))
    spans.record_event("dropped", logger=name, error=text)
    warnings.warn(f"{name}: {text}. Metrics are no longer logged there.", stacklevel=stacklevel)


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


def _noop() -> None:
    return None
