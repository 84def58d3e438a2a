"""A sink must not stop training: ``guarded`` drops one that fails, with one warning, and ``dropped_sinks`` counts them."""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from dtrain import spans
from dtrain.dist.closing import before_closing, ended_by
from dtrain.errors import ConfigError

if TYPE_CHECKING:
    from dtrain.observe.sinks.sink import Sink


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedSink:
    """A sink of this process that failed or hung: its name, the step of the record that showed it, and what was wrong."""

    name: str
    step: int | None
    error: str


class _Closable(Protocol):
    def close(self) -> None: ...


_DROPPED: list[DroppedSink] = []
_OPEN: dict[int, _Closable] = {}  # what has something to do at the end, by identity


def dropped_sinks() -> tuple[DroppedSink, ...]:
    """The sinks that were dropped in this process so far, in order. Each was one warning, and an event in the run's ledger."""
    return tuple(_DROPPED)


def guarded(sink: Sink, *, name: str | None = None, patience_s: float | None = None) -> Sink:
    """The same sink, but one that fails is dropped: one warning, one event in the run's ledger, and then silence.

    What dtrain's own functions return is guarded already, and ``tee`` guards what it is given.

    Args:
        sink: a function of ``(step, numbers)``.
        name: for the warning; None for the function's own.
        patience_s: run it in a thread of its own, with plain copies of the numbers (see ``in_memory``), and drop it when one
            call takes longer than this: for what goes over a network. None: at once, in the thread that logs.

    Raises:
        ConfigError: something that cannot be called; a patience that is no number above 0.
    """
    if not callable(sink):
        raise ConfigError(f"guarded: needs a sink, a function of (step, numbers), got {sink!r}")
    name = name or str(getattr(sink, "__name__", type(sink).__name__))
    if patience_s is not None:
        from dtrain.observe.sinks.thread import in_thread  # it imports this module

        return in_thread(sink, name=name, patience_s=patience_s)
    return sink if getattr(sink, "drops_itself", False) else Guarded(sink, name)


class Guarded:
    """A sink that runs at once, and is let go of when it raises."""

    __slots__ = ("_name", "_sink")
    drops_itself = True

    def __init__(self, sink: Sink, name: str) -> None:
        self._sink: Sink | None = sink
        self._name = name
        if hasattr(sink, "close"):
            closes_at_end(self)

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        if self._sink is None:
            return
        try:
            self._sink(step, numbers)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            sink, self._sink = self._sink, None
            forget(self)
            with suppress(Exception):  # such as a terminal that is to be left clean
                getattr(sink, "close", _nothing)()
            drop(self._name, step, error)

    def close(self) -> None:
        """Let the sink end; what comes later is ignored."""
        forget(self)
        sink, self._sink = self._sink, None
        try:
            getattr(sink, "close", _nothing)()
        except Exception as error:  # noqa: BLE001 - as above
            drop(self._name, None, error)


def nowhere(step: int, numbers: Mapping[str, Any], /) -> None:
    """The sink of the ranks that write nothing."""


def drop(name: str, step: int | None, error: BaseException, *, stacklevel: int = 3) -> None:
    """Say once that a sink is not used any more. From the main thread, so that the warning is seen where the loop is."""
    text = " ".join(str(error).split()) or type(error).__name__
    _DROPPED.append(DroppedSink(name=name, step=step, error=text))
    spans.event("dropped", sink=name, error=text)
    warnings.warn(f"{name}: {text}; metrics are no longer logged there", stacklevel=stacklevel)


def closes_at_end(sink: _Closable) -> None:
    """Have ``sink`` closed when ``init_dist``'s block is left, or at the end of this process."""
    if not _OPEN:
        before_closing("sinks", _close_all)
        atexit.unregister(_close_at_exit)
        atexit.register(_close_at_exit, os.getpid())
    _OPEN[id(sink)] = sink


def forget(sink: _Closable) -> None:
    """It has been closed."""
    _OPEN.pop(id(sink), None)


def _close_all(error: BaseException | None) -> None:
    waiting = list(_OPEN.values())
    for sink in waiting:
        begin = getattr(sink, "begin_closing", None)  # those in threads end together
        if begin is not None:
            begin(failed=error is not None)
    for sink in waiting:
        with suppress(*(() if error is None else (Warning,))):  # a warning may be an error, and there is one already
            sink.close()


def _close_at_exit(pid: int) -> None:
    if pid == os.getpid():  # and in no fork of it
        _close_all(ended_by())


def _nothing() -> None:
    return None
