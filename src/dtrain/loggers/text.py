"""``console`` and ``text_file``: metrics as lines for people.

``progress_bar``: one line at the bottom of the terminal.

``progress_line``: where a run is, on one line."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import gmtime, strftime
from typing import Any, TextIO

from dtrain import storage
from dtrain.clock import Clock
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.loggers.arguments import MetricFilter, Ranks, import_optional, is_writer, rank_path
from dtrain.loggers.logger import FaultTolerantLogger, Logger, null_logger
from dtrain.loggers.sanitize import to_plain_value
from dtrain.monitors.reduce_metrics import tokens_per_second
from dtrain.state import TrainState

_MAX_VALUE_WIDTH = 60  # characters of a value that is no number


def format_metrics(numbers: Mapping[str, Any], is_selected: Callable[[str], bool]) -> str:
    """The metrics that are chosen on one line, ``loss 2.1034  lr 0.003``: for reading, so five digits."""
    return "  ".join(
        f"{name} {_format_value(to_plain_value(value))}" for name, value in numbers.items() if is_selected(str(name))
    )


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, dict) and set(value) == {"unloggable"}:
        return f"<{value['unloggable']}>"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_VALUE_WIDTH else text[: _MAX_VALUE_WIDTH - 1] + "…"


def console(
    *, every: Duration | int | str = 1, names: Sequence[str] | None = None, stream: TextIO | None = None, ranks: Ranks = 0
) -> Logger:
    """A sink that prints a line, ``step 120  loss 2.1034  lr 0.003``.

    Args:
        every: how many steps apart, ``100`` or ``"100ba"``; a record that comes when fewer have passed is not printed.
        names: which metrics, by name or pattern (``"speed/*"``); None for all.
        stream: where to; None for what ``sys.stdout`` is then.
        ranks: 0, or "all".

    Raises:
        ConfigError: an interval in another unit than steps; names that are no list of texts; other ``ranks``.

    Example:
        >>> log = console(every="10ba", names=["loss"])
        >>> for step in (9, 10, 11):
        ...     log(step, {"loss": 1 / step, "lr": 0.1})
        step 9  loss 0.11111
        step 10  loss 0.1
    """
    interval = Duration.parse(every)
    if interval.unit != "ba":
        raise ConfigError(f"console: every is counted in steps, as in '100ba', got {every!r}")
    printing = _ConsoleWriter(int(interval.value), MetricFilter(names, "console"), stream)
    return FaultTolerantLogger(printing, "console") if is_writer(ranks, "console") else null_logger


class _ConsoleWriter:
    def __init__(self, every: int, chosen: Callable[[str], bool], stream: TextIO | None) -> None:
        self._every, self._chosen, self._stream = every, chosen, stream
        self._last: int | None = None

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        if step // self._every != self._last:
            self._last = step // self._every
            print(f"step {step}  {format_metrics(numbers, self._chosen)}".rstrip(), file=self._stream or sys.stdout, flush=True)


def text_file(path: str | Path, *, flush_interval: int = 1, names: Sequence[str] | None = None, ranks: Ranks = 0) -> Logger:
    """A sink that appends a line to a text file, ``2026-01-31T12:00:00Z  step 120  loss 2.1034``.

    Logging never stops training: what cannot be written is one warning, and then silence.

    Args:
        path: created where missing, with its folders; ``{rank}`` and ``{time}`` as in ``jsonl``.
        flush_interval: how many lines are kept back and written together; a kill loses those.
        names: which metrics, by name or pattern; None for all.
        ranks: 0, or "all", which needs ``{rank}`` in the path.

    Raises:
        ConfigError: as ``jsonl`` has them; ``flush_interval`` below 1; names that are no list of texts.
    """
    if type(flush_interval) is not int or flush_interval < 1:
        raise ConfigError(f"text_file: flush_every is a whole number of at least 1, got {flush_interval!r}")
    chosen, here = MetricFilter(names, "text_file"), rank_path(path, ranks, "text_file")
    return (
        null_logger if here is None else FaultTolerantLogger(_TextFileWriter(here, flush_interval, chosen), f"text_file {here}")
    )


class _TextFileWriter:
    def __init__(self, path: Path, flush_interval: int, chosen: Callable[[str], bool]) -> None:
        self._path, self._flush_interval, self._chosen = path, flush_interval, chosen
        self._lines: list[str] = []

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        at = strftime("%Y-%m-%dT%H:%M:%SZ", gmtime())
        self._lines.append(f"{at}  step {step}  {format_metrics(numbers, self._chosen)}".rstrip())
        if len(self._lines) >= self._flush_interval:
            self.close()

    def close(self) -> None:
        """Write what is kept back."""
        lines, self._lines = self._lines, []
        if lines:
            storage.append_line(self._path, "\n".join(lines))


_SPEED_WINDOW = 20  # records that the speed is of


def progress_bar(
    total: Duration | int | str | None = None,
    *,
    names: Sequence[str] | None = ("loss", "lr"),
    line_interval_s: float | None = 10.0,
) -> Logger:
    """A sink that shows ``120/600 ━━━━━  loss 2.1034  lr 0.003  12 steps/s  0:40 left`` on one line of the terminal, on rank 0.

    It is drawn when something is logged, and costs nothing in between. What is printed meanwhile goes above it. If the
    standard error is no terminal, as under ``dtrain launch``, plain lines are printed instead, by default one in 10 seconds.

    Args:
        total: length of the run in steps, ``600`` or ``"600ba"``; None when it is not known.
        names: metrics that are shown, by name or pattern; None for all.
        line_interval_s: without a terminal, seconds between two lines at least; None prints no line.

    Raises:
        ConfigError: a length in another unit than steps; names that are no list of texts; seconds that are no number of at
            least 0.
    """
    length = None if total is None else Duration.parse(total)
    if length is not None and length.unit != "ba":
        raise ConfigError(f"progress_bar: total is counted in steps, as in 600 or '600ba', got {total!r}")
    bad = isinstance(line_interval_s, bool) or not isinstance(line_interval_s, int | float | None)
    if bad or (line_interval_s is not None and not line_interval_s >= 0):
        raise ConfigError(f"progress_bar: lines_every_s is a number of seconds of at least 0, or None, got {line_interval_s!r}")
    shown = _ProgressText(None if length is None else int(length.value), MetricFilter(names, "progress_bar"))
    if not is_writer(0, "progress_bar"):
        return null_logger
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return FaultTolerantLogger(_RichProgressBar(shown), "progress_bar")
    return (
        null_logger if line_interval_s is None else FaultTolerantLogger(_PlainProgress(shown, line_interval_s), "progress_bar")
    )


class _ProgressText:
    """The words of the line; it sees every record."""

    def __init__(self, total: int | None, chosen: Callable[[str], bool]) -> None:
        self.total, self._chosen = total, chosen
        self._seen: deque[tuple[int, float]] = deque(maxlen=_SPEED_WINDOW)

    def position(self, step: int) -> str:
        return str(step) if self.total is None else f"{step}/{self.total}"

    def text(self, step: int, numbers: Mapping[str, Any]) -> str:
        self._seen.append((step, time.monotonic()))
        first, began = self._seen[0]
        steps, seconds = step - first, self._seen[-1][1] - began
        parts = [format_metrics(numbers, self._chosen)]
        if steps > 0 and seconds > 0:
            parts.append(f"{steps / seconds:.3g} steps/s")
            if self.total is not None:
                left = max(0, round((self.total - step) * seconds / steps))
                minutes, hours = left // 60 % 60, left // 3600
                parts.append((f"{hours}:{minutes:02d}" if hours else f"{minutes}") + f":{left % 60:02d} left")
        return "  ".join(part for part in parts if part)


class _PlainProgress:
    def __init__(self, shown: _ProgressText, every_s: float) -> None:
        self._shown, self._every_s = shown, every_s
        self._next: float | None = None

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        words, now = self._shown.text(step, numbers), time.monotonic()
        if self._next is None or now >= self._next or step == self._shown.total:
            self._next = now + self._every_s
            print(f"step {self._shown.position(step)}  {words}".rstrip(), file=sys.stderr, flush=True)


class _RichProgressBar:
    def __init__(self, shown: _ProgressText) -> None:
        self._shown = shown
        self._progress: Any = None
        self._task: Any = None

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        words = self._shown.text(step, numbers)
        if self._progress is None:
            self._start(step, words)
        else:
            self._progress.update(self._task, completed=step, at=self._shown.position(step), words=words, refresh=True)

    def _start(self, step: int, words: str) -> None:
        rich, tables = import_optional("rich.progress"), import_optional("rich.table")
        one_line = tables.Column(no_wrap=True, overflow="ellipsis")
        self._progress = rich.Progress(
            rich.TextColumn("{task.fields[at]}", markup=False, table_column=tables.Column(no_wrap=True)),
            rich.BarColumn(bar_width=20),
            rich.TextColumn("{task.fields[words]}", markup=False, table_column=one_line),
            console=import_optional("rich.console").Console(stderr=True),
            auto_refresh=False,  # no thread, and nothing is drawn in steps that do not log
            redirect_stdout=sys.stdout.isatty(),  # else what goes into a file would end on the terminal
        )
        self._task = self._progress.add_task(
            "", total=self._shown.total, completed=step, at=self._shown.position(step), words=words
        )
        self._progress.start()
        self._progress.console.show_cursor(True)  # a kill would leave the terminal without one

    def close(self) -> None:
        """Leave the last line where it is, and the terminal as it was."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()


def progress_line(state: TrainState, numbers: Mapping[str, float], *, total_steps: int, since: Clock) -> str:
    """A line such as ``step 120/600  loss 2.1034  lr 3.00e-03  51,200 tok/s  1:20 left``. Pure.

    Args:
        state: after the step to report.
        numbers: what ``reduce_metrics`` returned; ``loss`` and ``lr`` are shown where they are there.
        total_steps: length of the run.
        since: the clock at the last report: speed and time left are those of the stretch in between. Where no tokens are
            counted, the speed is in samples.
    """
    clock = state.clock
    steps, seconds = clock.step - since.step, clock.seconds - since.seconds
    parts = [f"step {clock.step}/{total_steps}"]
    parts += [f"{name} {numbers[name]:{how}}" for name, how in (("loss", ".4f"), ("lr", ".2e")) if name in numbers]
    if seconds > 0 and steps > 0:
        left = round((total_steps - clock.step) * seconds / steps)
        parts += [_format_speed(since, clock, seconds), f"{left // 60}:{left % 60:02d} left"]
    return "  ".join(parts)


def _format_speed(since: Clock, now: Clock, seconds: float) -> str:
    if now.tokens > since.tokens:
        return f"{tokens_per_second(since, now):,.0f} tok/s"
    rate = (now.samples - since.samples) / seconds
    return f"{rate:,.0f} samples/s" if rate >= 10 else f"{rate:.2g} samples/s"
