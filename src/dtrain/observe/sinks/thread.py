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
from dtrain.observe.sinks.guard import closes_at_end, drop, forget
from dtrain.observe.sinks.values import plain

if TYPE_CHECKING:
    from dtrain.observe.sinks.sink import Sink

MOST = 1000  # records that wait; beyond, they are left out
CLOSE_S = 10.0  # what is still to be written is given so long at the end


def check_patience(patience_s: float, where: str) -> None:
    """On all ranks, before one of them makes a sink.

    Raises:
        ConfigError: no number of seconds above 0.
    """
    if isinstance(patience_s, bool) or not isinstance(patience_s, int | float) or not 0 < patience_s < math.inf:
        raise ConfigError(f"{where}: patience_s is a number of seconds above 0, got {patience_s!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What was logged: the loop's step, seconds since 1970, plain values by the names they are written under."""

    step: int
    time: float
    numbers: Mapping[str, Any]


class Writer(Protocol):
    """What the thread calls. Anything it raises drops the sink."""

    def write(self, records: Sequence[Record]) -> None:
        """Write what has come since the call before, at least one record."""
        ...

    def close(self, *, failed: bool) -> None:
        """Nothing comes any more; ``failed`` when training ends with an exception."""
        ...


class InThread:
    """A sink whose ``Writer`` is opened and called in a daemon thread. Training waits for it at the end only, and not for long.

    It is dropped when a call raises, or takes longer than ``patience_s``: that is seen when something is logged, or at the end.
    """

    drops_itself = True

    def __init__(
        self,
        name: str,
        opening: Callable[[], Writer],
        *,
        prepared: Callable[[Mapping[str, Any]], dict[str, Any]],
        patience_s: float,
        most: int = MOST,
        close_s: float = CLOSE_S,
    ) -> None:
        self._name, self._prepared, self._most = name, prepared, most
        self._patience_s, self._close_s = patience_s, min(close_s, patience_s)
        self._records: deque[Record] = deque()
        self._wake = threading.Condition()
        self._error: BaseException | None = None
        self._since: float | None = None  # when the call that is under way began
        self._ended = False  # closed, or dropped
        self._closing, self._failed, self._left_out = False, False, 0
        self._thread = threading.Thread(target=self._run, args=(opening,), daemon=True, name=f"dtrain-{name}")
        self._thread.start()
        closes_at_end(self)

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        if self._ended:
            return
        try:
            record = Record(step=int(step), time=time.time(), numbers=self._prepared(numbers))
        except Exception as error:  # noqa: BLE001 - training goes on
            self._drop(step, error)
            return
        with self._wake:
            trouble, full = self._trouble(), len(self._records) >= self._most
            if trouble is None and not full:
                self._records.append(record)
                self._wake.notify()
        if trouble is not None:
            self._drop(step, trouble)
        elif full:
            self._leave_out()

    def _leave_out(self) -> None:
        self._left_out += 1
        if self._left_out == 1:
            warnings.warn(
                f"{self._name}: is slower than the loop logs; {self._most} records wait, and further ones are left out",
                stacklevel=3,
            )

    def _trouble(self) -> BaseException | None:
        since = self._since
        if self._error is None and since is not None and time.monotonic() - since > self._patience_s:
            return TimeoutError(f"no answer for {self._patience_s:g} s")
        return self._error

    def begin_closing(self, *, failed: bool = False) -> None:
        """Have the thread end when it has written all."""
        with self._wake:
            self._closing, self._failed = True, failed
            self._wake.notify()

    def close(self) -> None:
        """Wait until all is written, for a few seconds; what comes later is ignored."""
        forget(self)
        if self._ended:
            return
        if not self._closing:
            self.begin_closing()
        self._thread.join(self._close_s)
        error = self._error
        if self._thread.is_alive():
            error = TimeoutError(f"was not done {self._close_s:g} s after the end; {len(self._records)} records still wait")
        self._ended = True
        if error is not None:
            self._drop(None, error)

    def _drop(self, step: int | None, error: BaseException) -> None:
        self._ended = True
        forget(self)
        with self._wake:
            self._closing, self._failed = True, True
            self._records.clear()
            self._wake.notify()
        drop(self._name, step, error, stacklevel=4)

    def _run(self, opening: Callable[[], Writer]) -> None:
        try:
            writer = self._timed(opening)
            while records := self._next():
                self._timed(lambda: writer.write(records))
            self._timed(lambda: writer.close(failed=self._failed))
        except BaseException as error:  # noqa: BLE001 - told in the thread that logs
            self._error = error

    def _timed(self, call: Callable[[], Any]) -> Any:
        self._since = time.monotonic()
        result = call()
        self._since = None
        return result

    def _next(self) -> list[Record]:
        """All records that wait; none at the end."""
        with self._wake:
            while not self._records and not self._closing:
                self._wake.wait()
            records = list(self._records)
            self._records.clear()
        return records


class _Calling:
    """A plain sink as a writer."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            self._sink(record.step, record.numbers)

    def close(self, *, failed: bool) -> None:
        close = getattr(self._sink, "close", None)
        if close is not None:
            close()


def in_thread(sink: Sink, *, name: str, patience_s: float) -> InThread:
    """``sink`` in a thread of its own; see ``guarded``."""
    check_patience(patience_s, name)
    return InThread(
        name,
        lambda: _Calling(sink),
        prepared=lambda numbers: {str(key): plain(value) for key, value in numbers.items()},
        patience_s=patience_s,
    )
