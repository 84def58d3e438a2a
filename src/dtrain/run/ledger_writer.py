"""The ledger of a rank, written: a line of sums from time to time, a line for each event, none for a step.

A line is one ``write`` at the end of the file, so a process that is killed leaves at most half a line, and no other after it.
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
from dtrain.durations import Duration
from dtrain.run.metadata import to_plain_data
from dtrain.typing import Plain

_FLUSH_BEFORE = frozenset({"resumed", "stop", "committed"})  # before these, what has passed is written down
_MAX_WAITING = 200  # events that could not be written
_NEVER_S = 1e9
_STATM = "/proc/self/statm"


class LedgerWriter:
    """Writes down what ``spans`` counts. Listens from ``open`` to ``close``; a fork of the process writes nothing.

    A file that cannot be written is one warning. What was to be written is kept, the sums whole and the last two hundred
    events, and written when it can be, after an event ``dropped``.

    Args:
        path: the file, which exists; lines are appended.
        attempt: in every line.
        interval: steps (``ba``) or seconds from a line of sums to the next.
        redact: plain data without secrets: the error of a sink may tell the address of its server.
    """

    def __init__(
        self, path: Path, *, attempt: int, interval: Duration, redact: Callable[[Plain], Plain] = lambda value: value
    ) -> None:
        self.path, self._redact = path, redact
        self._attempt, self._interval = attempt, interval
        self._pid, self._lock = os.getpid(), threading.RLock()
        self._partial_line = False
        with suppress(OSError):  # it is gone already, or nobody may read it
            self._partial_line = _has_partial_line(path)
        self._waiting: deque[str] = deque(maxlen=_MAX_WAITING)
        self._missed, self._warned, self._closed = 0, False, False
        self._last_totals = spans.totals()

    def open(self, **facts: Any) -> None:
        """The first line, and the events until now. Mutates: who ``spans`` tells."""
        with self._lock:
            self._write(self._line("open", **facts))
            for event in spans.set_listener(self):
                self._write(self._event_line(event))
            self._schedule_next_line()

    def on_step(self) -> None:
        """See ``spans.Listener``."""
        if self._pid == os.getpid():
            self.flush()
            self._schedule_next_line()

    def on_event(self, event: Mapping[str, object]) -> None:
        """See ``spans.Listener``."""
        if self._pid != os.getpid():
            return
        if event["name"] in _FLUSH_BEFORE:
            if threading.current_thread() is threading.main_thread():
                self.flush()
                self._schedule_next_line()  # a state that was loaded may be of an earlier step
            else:  # only the main thread knows up to when its time is counted
                spans.schedule_next_check(step=0, in_s=0.0)
        with self._lock:
            if not self._closed:
                self._write(self._event_line(event))

    def flush(self) -> None:
        """Write what has passed since the last line of sums."""
        with self._lock:
            now = spans.totals()
            passed = {name: total for name, total in now.items() if total != self._last_totals.get(name)}
            if not self._closed and passed and self._write(self._sum_line(passed)):
                self._last_totals = now

    def close(self, reason: str, error: str | None = None) -> None:
        """The last line; nothing is written after it. Mutates: who ``spans`` tells."""
        if self._pid != os.getpid() or self._closed:
            return
        spans.set_listener(None)
        self.flush()
        with self._lock:
            self._write(self._line("close", reason=reason, **({} if error is None else {"error": error})))
            self._closed = True

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
        """Also of fields that are no plain data, or would hide ours."""
        fields = self._redact({name: to_plain_data(value) for name, value in event.items() if name not in ("kind", "attempt")})
        assert isinstance(fields, dict), "as it was"
        return self._line("event", **fields)

    def _line(self, kind: str, /, **fields: Any) -> str:
        return json.dumps(
            {"kind": kind, "attempt": self._attempt, "at": round(time.time(), 3), **fields}, separators=(",", ":")
        )

    def _write(self, line: str) -> bool:
        """Whether the line was written. If not, one of sums is made again later, and others wait."""
        lines = [*self._waiting, line]
        if self._missed:
            error = f"{self._missed} lines came late or never"
            lines.insert(0, self._line("event", name="dropped", sink="ledger", error=error))
        data = ("\n" * self._partial_line + "".join(f"{each}\n" for each in lines)).encode()
        try:
            _append_bytes(self.path, data)
        except OSError as error:
            with suppress(OSError):  # of a file that is gone nothing new is known
                self._partial_line = _has_partial_line(self.path)
            self._missed += 1
            if not line.startswith('{"kind":"sum"'):
                self._waiting.append(line)
            self._warn(error)
            return False
        self._partial_line, self._missed = False, 0
        self._waiting.clear()
        return True

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"open_run: cannot write {self.path} ({error}); training goes on, and what can be written later will be",
                RuntimeWarning,
                stacklevel=2,
            )


def _append_bytes(path: Path, data: bytes) -> None:
    """One write at the end of a file that exists. Opened each time, so that a folder that was removed is noticed."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        if os.write(handle, data) != len(data):
            raise OSError("the disk took a part of a line only")
    finally:
        os.close(handle)


def _has_partial_line(path: Path) -> bool:
    """Whether the file ends in half a line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        return size > 0 and (file.seek(size - 1), file.read(1))[1] != b"\n"


def _read_gauges() -> dict[str, int]:
    found: dict[str, int] = {}
    try:
        with open(_STATM, "rb") as file:
            found["rss_bytes"] = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, ValueError, IndexError):  # not on Linux
        pass
    if torch.cuda.is_initialized():
        found["device_bytes"], found["device_peak_bytes"] = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    return found
