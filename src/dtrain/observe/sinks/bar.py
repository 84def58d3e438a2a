"""``progress_bar``: one line at the bottom of the terminal."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.observe.sinks.guard import Guarded, nowhere
from dtrain.observe.sinks.packages import imported
from dtrain.observe.sinks.ranks import Chosen, writes
from dtrain.observe.sinks.sink import Sink
from dtrain.observe.sinks.text import told

_STRETCH = 20  # records that the speed is of


def progress_bar(
    total: Duration | int | str | None = None,
    *,
    names: Sequence[str] | None = ("loss", "lr"),
    lines_every_s: float | None = 10.0,
) -> Sink:
    """A sink that shows ``120/600 ━━━━━  loss 2.1034  lr 0.003  12 steps/s  0:40 left`` on one line of the terminal, on rank 0.

    It is drawn when something is logged, and costs nothing in between. What is printed meanwhile goes above it. If the
    standard error is no terminal, as under ``dtrain launch``, plain lines are printed instead, by default one in 10 seconds.

    Args:
        total: length of the run in steps, ``600`` or ``"600ba"``; None when it is not known.
        names: metrics that are shown, by name or pattern; None for all.
        lines_every_s: without a terminal, seconds between two lines at least; None prints no line.

    Raises:
        ConfigError: a length in another unit than steps; names that are no list of texts; seconds that are no number of at
            least 0.
    """
    length = None if total is None else Duration.parse(total)
    if length is not None and length.unit != "ba":
        raise ConfigError(f"progress_bar: total is counted in steps, as in 600 or '600ba', got {total!r}")
    bad = isinstance(lines_every_s, bool) or not isinstance(lines_every_s, int | float | None)
    if bad or (lines_every_s is not None and not lines_every_s >= 0):
        raise ConfigError(f"progress_bar: lines_every_s is a number of seconds of at least 0, or None, got {lines_every_s!r}")
    shown = _Shown(None if length is None else int(length.value), Chosen(names, "progress_bar"))
    if not writes(0, "progress_bar"):
        return nowhere
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return Guarded(_Bar(shown), "progress_bar")
    return nowhere if lines_every_s is None else Guarded(_Plain(shown, lines_every_s), "progress_bar")


class _Shown:
    """The words of the line; it sees every record."""

    def __init__(self, total: int | None, chosen: Callable[[str], bool]) -> None:
        self.total, self._chosen = total, chosen
        self._seen: deque[tuple[int, float]] = deque(maxlen=_STRETCH)

    def at(self, step: int) -> str:
        return str(step) if self.total is None else f"{step}/{self.total}"

    def words(self, step: int, numbers: Mapping[str, Any]) -> str:
        self._seen.append((step, time.monotonic()))
        first, began = self._seen[0]
        steps, seconds = step - first, self._seen[-1][1] - began
        parts = [told(numbers, self._chosen)]
        if steps > 0 and seconds > 0:
            parts.append(f"{steps / seconds:.3g} steps/s")
            if self.total is not None:
                left = max(0, round((self.total - step) * seconds / steps))
                minutes, hours = left // 60 % 60, left // 3600
                parts.append((f"{hours}:{minutes:02d}" if hours else f"{minutes}") + f":{left % 60:02d} left")
        return "  ".join(part for part in parts if part)


class _Plain:
    def __init__(self, shown: _Shown, every_s: float) -> None:
        self._shown, self._every_s = shown, every_s
        self._next: float | None = None

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        words, now = self._shown.words(step, numbers), time.monotonic()
        if self._next is None or now >= self._next or step == self._shown.total:
            self._next = now + self._every_s
            print(f"step {self._shown.at(step)}  {words}".rstrip(), file=sys.stderr, flush=True)


class _Bar:
    def __init__(self, shown: _Shown) -> None:
        self._shown = shown
        self._progress: Any = None
        self._task: Any = None

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        words = self._shown.words(step, numbers)
        if self._progress is None:
            self._start(step, words)
        else:
            self._progress.update(self._task, completed=step, at=self._shown.at(step), words=words, refresh=True)

    def _start(self, step: int, words: str) -> None:
        rich, tables = imported("rich.progress"), imported("rich.table")
        one_line = tables.Column(no_wrap=True, overflow="ellipsis")
        self._progress = rich.Progress(
            rich.TextColumn("{task.fields[at]}", markup=False, table_column=tables.Column(no_wrap=True)),
            rich.BarColumn(bar_width=20),
            rich.TextColumn("{task.fields[words]}", markup=False, table_column=one_line),
            console=imported("rich.console").Console(stderr=True),
            auto_refresh=False,  # no thread, and nothing is drawn in steps that do not log
            redirect_stdout=sys.stdout.isatty(),  # else what goes into a file would end on the terminal
        )
        self._task = self._progress.add_task("", total=self._shown.total, completed=step, at=self._shown.at(step), words=words)
        self._progress.start()
        self._progress.console.show_cursor(True)  # a kill would leave the terminal without one

    def close(self) -> None:
        """Leave the last line where it is, and the terminal as it was."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()
