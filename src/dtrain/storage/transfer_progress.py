"""Show a progress bar for long transfers, on a terminal and after the first second."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

SHOW_AFTER_S = 1.0


class TransferProgress:
    """Progress bar on standard error. A context manager; any thread may call ``advance``. Without a terminal, do nothing.

    Args:
        label: text before the bar.
        total: total number of bytes; None if unknown.
        show_after_s: time without a bar in seconds.
    """

    def __init__(self, label: str, total: int | None, *, show_after_s: float = SHOW_AFTER_S) -> None:
        self._label, self._total, self._show_after_s = label, total, show_after_s
        self._lock = threading.Lock()
        self._started_at = time.monotonic()
        self._done = 0
        self._closed = not sys.stderr.isatty()
        self._bar: Any = None

    def advance(self, count: int) -> None:
        """Add ``count`` bytes to the progress."""
        if self._closed:
            return
        with self._lock:
            self._done += count
            if self._bar is None and time.monotonic() - self._started_at >= self._show_after_s:
                self._bar = _start_bar(self._label, self._total)
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=self._done)

    def __enter__(self) -> TransferProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._closed = True
            if self._bar is not None:
                self._bar.stop()
                self._bar = None


def _start_bar(label: str, total: int | None) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Bar(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(label, total=total)
    bar.start()
    return bar
