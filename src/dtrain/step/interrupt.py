"""Hold Ctrl-C back while an update runs, so that an interrupt finds the state before it or the state after it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class HeldInterrupt:
    """A context that holds SIGINT back from ``begin`` on, and raises ``KeyboardInterrupt`` at its end if one came.

    A second SIGINT interrupts at once. A handler of the user's own is left alone, and so are threads, which get no signals.
    """

    __slots__ = ("_begun", "_came")

    def __init__(self) -> None:
        self._begun = False
        self._came = False

    def begin(self) -> None:
        """Hold SIGINT back from now on. Mutates: this process's handler of SIGINT, until the end of the context."""
        main = threading.get_ident() == threading.main_thread().ident
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._begun = True
            signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            signal.default_int_handler(number, frame)
        self._came = True

    def __enter__(self) -> HeldInterrupt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._begun:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._came and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt
