"""``Logger``: what a place for metrics is, and ``multi``: several of them.

A sink must not stop training: ``fault_tolerant`` drops one that fails, with one warning, and ``failed_loggers`` counts them."""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dtrain import spans
from dtrain.dist.shutdown import exit_exception, register_shutdown_hook
from dtrain.errors import ConfigError


@runtime_checkable
class Logger(Protocol):
    """A function ``sink(step, numbers)``. It may have a ``close()``, for what it still holds back."""

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None: ...


def multi(*loggers: Logger) -> Logger:
    """A sink that gives each record to all ``loggers``, in their order; one that fails is dropped, and the others go on.

    Args:
        loggers: functions of ``(step, numbers)``, such as ``jsonl(...)`` or one of your own, which is made ``fault_tolerant``.

    Raises:
        ConfigError: something that cannot be called.

    Example:
        >>> from dtrain.observe.sinks import in_memory
        >>> kept = in_memory()
        >>> log = tee(kept, lambda step, numbers: print(step, sorted(numbers)))
        >>> log(10, {"loss": 0.5, "lr": 0.1})
        10 ['loss', 'lr']
        >>> kept.column("loss")
        {10: 0.5}
    """
    return _MultiLogger(tuple(fault_tolerant(sink) for sink in loggers))


class _MultiLogger:
    __slots__ = ("_sinks",)
    handles_failures = True  # each of them does

    def __init__(self, sinks: tuple[Logger, ...]) -> None:
        self._sinks = sinks

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        for sink in self._sinks:
            sink(step, numbers)

    def close(self) -> None:
        for sink in self._sinks:
            close(sink)


def close(logger: Logger) -> None:
    """Let a sink write what it holds back, and end; what it is given afterwards is ignored.

    Seldom needed: when ``init_dist``'s block is left, and at the end of the process, all sinks are closed.

    Args:
        logger: any; one without ``close`` has nothing to do.

    Raises:
        ConfigError: no sink.
    """
    if not callable(logger):
        raise ConfigError(f"close: needs a logger, a function of (step, numbers), got {logger!r}")
    close = getattr(logger, "close", None)
    if close is not None:
        close()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedLogger:
    """A sink of this process that failed or hung: its name, the step of the record that showed it, and what was wrong."""

    name: str
    step: int | None
    error: str


class _Closable(Protocol):
    def close(self) -> None: ...


_FAILED: list[FailedLogger] = []
_OPEN_LOGGERS: dict[int, _Closable] = {}  # what has something to do at the end, by identity


def failed_loggers() -> tuple[FailedLogger, ...]:
    """The sinks that were dropped in this process so far, in order. Each was one warning, and an event in the run's ledger."""
    return tuple(_FAILED)


def fault_tolerant(logger: Logger, *, name: str | None = None, timeout_s: float | None = None) -> Logger:
    """The same sink, but one that fails is dropped: one warning, one event in the run's ledger, and then silence.

    What dtrain's own functions return is guarded already, and ``multi`` guards what it is given.

    Args:
        logger: a function of ``(step, numbers)``.
        name: for the warning; None for the function's own.
        timeout_s: run it in a thread of its own, with plain copies of the numbers (see ``in_memory``), and drop it when one
            call takes longer than this: for what goes over a network. None: at once, in the thread that logs.

    Raises:
        ConfigError: something that cannot be called; a patience that is no number above 0.
    """
    if not callable(logger):
        raise ConfigError(f"guarded: needs a sink, a function of (step, numbers), got {logger!r}")
    name = name or str(getattr(logger, "__name__", type(logger).__name__))
    if timeout_s is not None:
        from dtrain.loggers.background import run_in_background  # it imports this module

        return run_in_background(logger, name=name, timeout_s=timeout_s)
    return logger if getattr(logger, "drops_itself", False) else FaultTolerantLogger(logger, name)


class FaultTolerantLogger:
    """A sink that runs at once, and is let go of when it raises."""

    __slots__ = ("_name", "_sink")
    handles_failures = True

    def __init__(self, sink: Logger, name: str) -> None:
        self._sink: Logger | None = sink
        self._name = name
        if hasattr(sink, "close"):
            register_open_logger(self)

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        if self._sink is None:
            return
        try:
            self._sink(step, numbers)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            sink, self._sink = self._sink, None
            unregister_logger(self)
            with suppress(Exception):  # such as a terminal that is to be left clean
                getattr(sink, "close", _noop)()
            report_failure(self._name, step, error)

    def close(self) -> None:
        """Let the sink end; what comes later is ignored."""
        unregister_logger(self)
        sink, self._sink = self._sink, None
        try:
            getattr(sink, "close", _noop)()
        except Exception as error:  # noqa: BLE001 - as above
            report_failure(self._name, None, error)


def null_logger(step: int, numbers: Mapping[str, Any], /) -> None:
    """The sink of the ranks that write nothing."""


def report_failure(name: str, step: int | None, error: BaseException, *, stacklevel: int = 3) -> None:
    """Say once that a sink is not used any more. From the main thread, so that the warning is seen where the loop is."""
    text = " ".join(str(error).split()) or type(error).__name__
    _FAILED.append(FailedLogger(name=name, step=step, error=text))
    spans.record_event("dropped", sink=name, error=text)
    warnings.warn(f"{name}: {text}; metrics are no longer logged there", stacklevel=stacklevel)


def register_open_logger(sink: _Closable) -> None:
    """Have ``sink`` closed when ``init_dist``'s block is left, or at the end of this process."""
    if not _OPEN_LOGGERS:
        register_shutdown_hook("sinks", _close_all)
        atexit.unregister(_close_at_exit)
        atexit.register(_close_at_exit, os.getpid())
    _OPEN_LOGGERS[id(sink)] = sink


def unregister_logger(sink: _Closable) -> None:
    """It has been closed."""
    _OPEN_LOGGERS.pop(id(sink), None)


def _close_all(error: BaseException | None) -> None:
    waiting = list(_OPEN_LOGGERS.values())
    for sink in waiting:
        begin = getattr(sink, "begin_closing", None)  # those in threads end together
        if begin is not None:
            begin(failed=error is not None)
    for sink in waiting:
        with suppress(*(() if error is None else (Warning,))):  # a warning may be an error, and there is one already
            sink.close()


def _close_at_exit(pid: int) -> None:
    if pid == os.getpid():  # and in no fork of it
        _close_all(exit_exception())


def _noop() -> None:
    return None
