"""Write the ledger of a rank: periodic lines of time totals and a line per event, no line per step.

Each line is one ``write`` at the end of the file, so a kill leaves at most one partial line, the last one.
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dtrain import spans
from dtrain.device import counts_memory, started_accelerator
from dtrain.run.metadata import to_plain_data
from dtrain.schedules.durations import Duration
from dtrain.typing import Plain

# Totals are written before these events.
_FLUSH_BEFORE = frozenset({"resumed", "stop", "committed"})
# largest number of unwritten events
_MAX_WAITING = 200
_NEVER_S = 1e9
_STATM = "/proc/self/statm"


class LedgerWriter:
    """Writer of the totals and events of ``spans``. Listens from ``open`` to ``close``; a fork of the process writes nothing.

    A failed write causes one warning. The totals and the last two hundred events are kept and written later, after an event
    ``dropped``.

    Args:
        path: existing file; lines are appended.
        attempt: number of the attempt, written in every line.
        interval: steps (``ba``) or seconds between two lines of totals.
        redact: function that removes secrets from plain data, such as a server address in the error of a logger.
    """

    def __init__(
        self, path: Path, *, attempt: int, interval: Duration, redact: Callable[[Plain], Plain] = lambda value: value
    ) -> None:
        self.path, self._redact = path, redact
        self._attempt, self._interval = attempt, interval
        self._pid, self._lock = os.getpid(), threading.RLock()
        self._partial_line = False
        # The file may be missing or unreadable.
        with suppress(OSError):
            self._partial_line = _has_partial_line(path)
        self._waiting: deque[str] = deque(maxlen=_MAX_WAITING)
        self._missed, self._warned, self._closed = 0, False, False
        self._last_totals = spans.totals()

    def open(self, **facts: Any) -> None:
        """Write the first line and the events so far. Mutates: the listener of ``spans``."""
        with self._lock:
            self._write(self._line("open", **facts))
            for event in spans.set_listener(self):
                self._write(self._event_line(event))
            self._schedule_next_line()

    def on_step(self) -> None:
        """See ``spans.SpanListener``."""
        if self._pid == os.getpid():
            self.flush()
            self._schedule_next_line()

    def on_event(self, event: Mapping[str, object]) -> None:
        """See ``spans.SpanListener``."""
        if self._pid != os.getpid():
            return
        if event["name"] in _FLUSH_BEFORE:
            if threading.current_thread() is threading.main_thread():
                self.flush()
                # A loaded state may have an earlier step.
                self._schedule_next_line()
            # Only the main thread knows the time of the open spans.
            else:
                spans.schedule_next_check(step=0, in_s=0.0)
        with self._lock:
            if not self._closed:
                self._write(self._event_line(event))

    def flush(self) -> None:
        """Write the totals since the last line of totals."""
        with self._lock:
            now = spans.totals()
            passed = {name: total for name, total in now.items() if total != self._last_totals.get(name)}
            if not self._closed and passed and self._write(self._sum_line(passed)):
                self._last_totals = now

    def close(self, reason: str, error: str | None = None) -> None:
        """Write the last line. Mutates: the listener and the position of ``spans``."""
        if self._pid != os.getpid() or self._closed:
            return
        spans.set_listener(None)
        self.flush()
        with self._lock:
            self._write(self._line("close", reason=reason, **({} if error is None else {"error": error})))
            self._closed = True
        # Another run of this process begins at step 0.
        spans.set_position(0, samples=0, tokens=0)

    def _schedule_next_line(self) -> None:
        step = spans.position()[0]
        if self._interval.unit == "sec":
            spans.schedule_next_check(step=step + 10**15, in_s=float(self._interval.value))
        else:
            steps = int(self._interval.value)
            spans.schedule_next_check(step=(step // steps + 1) * steps, in_s=_NEVER_S)

    def _sum_line(self, passed: Mapping[str, spans.SpanTime]) -> str:
        rows: dict[str, tuple[int, float]] = {}
        for name, (count, seconds) in passed.items():
            counted, spent = self._last_totals.get(name, spans.SpanTime(0, 0.0))
            rows[name] = (count - counted, round(seconds - spent, 6))
        step, samples, tokens = spans.position()
        facts: dict[str, Any] = {
            "seconds": round(sum(seconds for _, seconds in rows.values()), 6),
            "step": step,
            "samples": samples,
            "tokens": tokens,
            "spans": rows,
        }
        if causes := {name: spans.category_of(name) for name in rows if not spans.is_library_span(name)}:
            facts["causes"] = causes
        return self._line("sum", **facts, gauges=_read_gauges())

    def _event_line(self, event: Mapping[str, object]) -> str:
        """Format an event. Fields without plain data become text, and the keys of the ledger win over equal names."""
        fields = self._redact({name: to_plain_data(value) for name, value in event.items() if name not in ("kind", "attempt")})
        assert isinstance(fields, dict), "redaction keeps the type"
        return self._line("event", **fields)

    def _line(self, kind: str, /, **fields: Any) -> str:
        return json.dumps(
            {"kind": kind, "attempt": self._attempt, "at": round(time.time(), 3), **fields}, separators=(",", ":")
        )

    def _write(self, line: str) -> bool:
        """Write a line and return True on success. After a failure, totals are computed again later and events wait."""
        lines = [*self._waiting, line]
        if self._missed:
            error = f"{self._missed} lines came late or never"
            lines.insert(0, self._line("event", name="dropped", logger="ledger", error=error))
        data = ("\n" * self._partial_line + "".join(f"{each}\n" for each in lines)).encode()
        try:
            # The file is opened each time, so that a removed folder is noticed.
            handle = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            try:
                if os.write(handle, data) != len(data):
                    raise OSError("the disk took only a part of a line")
            finally:
                os.close(handle)
        except OSError as error:
            # The state of a missing file is unknown.
            with suppress(OSError):
                self._partial_line = _has_partial_line(self.path)
            self._missed += 1
            if not line.startswith('{"kind":"sum"'):
                self._waiting.append(line)
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"open_run: cannot write {self.path}: {error}. Training continues, and the ledger is written later.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return False
        self._partial_line, self._missed = False, 0
        self._waiting.clear()
        return True


def _has_partial_line(path: Path) -> bool:
    """Return True if the file ends in a partial line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        return size > 0 and (file.seek(size - 1), file.read(1))[1] != b"\n"


def _read_gauges() -> dict[str, int]:
    gauges: dict[str, int] = {}
    # /proc exists only on Linux.
    with suppress(OSError, ValueError, IndexError), open(_STATM, "rb") as file:
        gauges["rss_bytes"] = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    accelerator = started_accelerator()
    if accelerator is not None and counts_memory(accelerator):
        gauges["device_bytes"] = torch.accelerator.memory_allocated()
        gauges["device_peak_bytes"] = torch.accelerator.max_memory_allocated()
    return gauges
