"""Print metrics as text: ``console``, ``text_file`` and ``progress_bar``."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from time import gmtime, strftime
from typing import Any, TextIO

import torch

from dtrain import launch_protocol, spans, storage
from dtrain.arguments import check_int, check_number, format_bytes
from dtrain.device import counts_memory, started_accelerator
from dtrain.errors import ConfigError
from dtrain.loggers.logger import FaultTolerantLogger, Logger, Ranks, is_writer, null_logger, rank_path, to_plain_value
from dtrain.monitors.hardware import process_memory
from dtrain.schedules.durations import Duration

# characters of a value other than a number
_MAX_VALUE_WIDTH = 60


def format_metrics(numbers: Mapping[str, Any], is_selected: Callable[[str], bool], *, digits: int = 5) -> str:
    """Format the selected metrics on one line, with five digits ``loss 2.1034  lr 0.003``."""
    return "  ".join(
        f"{name} {_format_value(to_plain_value(value), digits)}" for name, value in numbers.items() if is_selected(str(name))
    )


def _format_value(value: Any, digits: int) -> str:
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, dict) and set(value) == {"unloggable"}:
        return f"<{value['unloggable']}>"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_VALUE_WIDTH else text[: _MAX_VALUE_WIDTH - 1] + "…"


def _metric_filter(select: Sequence[str] | None, caller: str) -> Callable[[str], bool]:
    """Return a function that selects metrics by name or pattern; None selects all metrics.

    Raises:
        ConfigError: ``select`` is not a list of texts.
    """
    if select is None:
        return lambda name: True
    patterns = tuple(select)
    if isinstance(select, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(
            f"{caller}: select must be a list of names or patterns, got {select!r}. Pass a list such as ['loss', 'speed/*']."
        )
    return cache(lambda name: any(fnmatchcase(name, pattern) for pattern in patterns))


def _parse_steps(caller: str, name: str, length: Duration | int | str, example: int) -> int:
    parsed = Duration.parse(length)
    if parsed.unit != "ba":
        raise ConfigError(f"{caller}: {name} must be a number of steps, got {length!r}. Pass {example} or '{example}ba'.")
    return int(parsed.value)


def console(
    *, every: Duration | int | str = 1, select: Sequence[str] | None = None, stream: TextIO | None = None, ranks: Ranks = 0
) -> Logger:
    """Print one line per record, ``step 120  loss 2.1034  lr 0.003``.

    Args:
        every: steps between two lines, ``100`` or ``"100ba"``.
        select: metrics to print, by name or pattern (``"speed/*"``); None prints all.
        stream: text stream; None uses ``sys.stdout`` at the time of the record.
        ranks: 0, or "all".

    Example:
        >>> import dtrain as dt
        >>> log = dt.loggers.console(every="10ba", select=["loss"])
        >>> for step in (9, 10, 11):
        ...     log(step, {"loss": 1 / step, "lr": 0.1})
        step 9  loss 0.11111
        step 10  loss 0.1

    Raises:
        ConfigError: ``every`` is not in steps, ``select`` is not a list of texts, or ``ranks`` is neither 0 nor "all".
    """
    interval = _parse_steps("console", "every", every, 100)
    is_selected, last_interval = _metric_filter(select, "console"), None

    def write(step: int, numbers: Mapping[str, Any], /) -> None:
        nonlocal last_interval
        if step // interval != last_interval:
            last_interval = step // interval
            line = f"step {step}  {format_metrics(numbers, is_selected)}".rstrip()
            print(line, file=stream or sys.stdout, flush=True)

    return FaultTolerantLogger(write, "console") if is_writer(ranks, "console") else null_logger


def text_file(path: str | Path, *, flush_every: int = 1, select: Sequence[str] | None = None, ranks: Ranks = 0) -> Logger:
    """Append one line per record to a text file, ``2026-01-31T12:00:00Z  step 120  loss 2.1034``.

    A failure to write causes one warning, and training continues.

    Args:
        path: file, created with its folders if missing; ``{rank}`` and ``{time}`` as in ``jsonl``.
        flush_every: lines to buffer and write together; a kill loses the buffered lines.
        select: metrics to write, by name or pattern; None writes all.
        ranks: 0, or "all" with ``{rank}`` in the path.

    Example:
        import dtrain as dt

        log = dt.loggers.text_file("runs/gpt/log.txt", select=["loss", "lr"])
        log(state.clock.step, dt.reduce_metrics(metrics))

    Raises:
        ConfigError: ``path`` is invalid (see ``jsonl``), ``flush_every`` is below 1, or ``select`` is not a list of texts.
    """
    check_int("text_file", "flush_every", flush_every)
    is_selected, file = _metric_filter(select, "text_file"), rank_path(path, ranks, "text_file")
    if file is None:
        return null_logger
    return FaultTolerantLogger(_TextFileWriter(file, flush_every, is_selected), f"text_file {file}")


class _TextFileWriter:
    def __init__(self, path: Path, flush_every: int, is_selected: Callable[[str], bool]) -> None:
        self._path, self._flush_every, self._is_selected = path, flush_every, is_selected
        self._lines: list[str] = []

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        now = strftime("%Y-%m-%dT%H:%M:%SZ", gmtime())
        self._lines.append(f"{now}  step {step}  {format_metrics(numbers, self._is_selected)}".rstrip())
        if len(self._lines) >= self._flush_every:
            self.close()

    def close(self) -> None:
        """Write the buffered lines."""
        lines, self._lines = self._lines, []
        if lines:
            storage.append_line(self._path, "\n".join(lines))


# records in the moving window of the speed
_SPEED_WINDOW = 20


def progress_bar(
    run_length: Duration | int | str | None = None,
    *,
    select: Sequence[str] | None = ("loss", "lr"),
    line_every_s: float | None = 10.0,
) -> Logger:
    """Show a progress bar on rank 0: ``120/600 ━━━━━  loss 2.103  lr 0.003  51,200 tok/s  0:40 left``.

    The speed is in tokens if the batches count tokens, else in samples.

    The bar is drawn when a record is logged and costs nothing in between. Other printed text appears above the bar. Under
    ``dtrain launch`` on a terminal, the launcher draws one live line. If standard error is not a terminal, plain lines are
    printed instead, by default one line in 10 seconds.

    Args:
        run_length: length of the run in steps, ``600`` or ``"600ba"``; None if unknown.
        select: metrics to show in this order, by name or pattern; None shows all.
        line_every_s: seconds between two plain lines without a terminal; None prints no lines.

    Example:
        import dtrain as dt

        log = dt.loggers.progress_bar(600, select=["loss", "lr"])
        for batch in loader:
            state, metrics = step(state, batch)
            log(state.clock.step, dt.reduce_metrics(metrics))

    Raises:
        ConfigError: ``run_length`` is not in steps, ``select`` is not a list of texts, or ``line_every_s`` is below 0.
    """
    total = None if run_length is None else _parse_steps("progress_bar", "run_length", run_length, 600)
    if line_every_s is not None:
        check_number("progress_bar", "line_every_s", line_every_s, minimum=0, advice="Pass None for no lines.")
    text = _ProgressText(total, _metric_filter(select, "progress_bar"), select or ())
    if not is_writer(0, "progress_bar"):
        return null_logger
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return FaultTolerantLogger(_RichProgressBar(text), "progress_bar")
    if os.environ.get(launch_protocol.LIVE_LINE) == "1":
        return FaultTolerantLogger(_LineProgress(text, _LIVE_INTERVAL_S, live=True), "progress_bar")
    if line_every_s is None:
        return null_logger
    return FaultTolerantLogger(_LineProgress(text, line_every_s, live=False), "progress_bar")


class _ProgressText:
    """Text of the progress line, computed from every record."""

    def __init__(self, total: int | None, is_selected: Callable[[str], bool], order: Sequence[str]) -> None:
        self.total, self._is_selected = total, is_selected
        self._order = {name: index for index, name in enumerate(order)}
        # step, samples, tokens and time of each record
        self._window: deque[tuple[int, int, int, float]] = deque(maxlen=_SPEED_WINDOW)

    def position(self, step: int) -> str:
        return str(step) if self.total is None else f"{step}/{self.total}"

    def text(self, step: int, numbers: Mapping[str, Any]) -> str:
        _, samples, tokens = spans.position()
        self._window.append((step, samples, tokens, now := time.monotonic()))
        first_step, first_samples, first_tokens, first_time = self._window[0]
        steps, seconds = step - first_step, now - first_time
        ordered = dict(sorted(numbers.items(), key=lambda item: self._order.get(item[0], len(self._order))))
        parts = [format_metrics(ordered, self._is_selected, digits=4)]
        if steps > 0 and seconds > 0:
            if tokens > first_tokens:
                parts.append(f"{(tokens - first_tokens) / seconds:,.0f} tok/s")
            elif samples > first_samples:
                rate = (samples - first_samples) / seconds
                parts.append((f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}") + " samples/s")
            else:
                parts.append(f"{steps / seconds:.3g} steps/s")
            if self.total is not None:
                remaining = max(0, round((self.total - step) * seconds / steps))
                minutes, hours = remaining // 60 % 60, remaining // 3600
                parts.append((f"{hours}:{minutes:02d}" if hours else f"{minutes}") + f":{remaining % 60:02d} left")
        return "  ".join(part for part in parts if part)


# The launcher draws at most so many live lines.
_LIVE_INTERVAL_S = 0.1


class _LineProgress:
    """Lines on standard error, at most one in ``interval_s``; if ``live``, the live line of the launcher's terminal.

    The last state is a line of the log in any case.
    """

    def __init__(self, text: _ProgressText, interval_s: float, *, live: bool) -> None:
        self._text, self._interval_s, self._live = text, interval_s, live
        self._next = -math.inf

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        # The text needs every record for its speed.
        words, now = self._text.text(step, numbers), time.monotonic()
        is_last = step == self._text.total
        if not is_last and now < self._next:
            return
        self._next = now + self._interval_s
        line = f"step {self._text.position(step)}  {words}".rstrip()
        if self._live and not is_last:
            print(launch_protocol.live_line(line + self._format_memory()), end="", file=sys.stderr, flush=True)
        else:
            print(f"{launch_protocol.live_line('') if self._live else ''}{line}", file=sys.stderr, flush=True)

    @staticmethod
    def _format_memory() -> str:
        """Format the memory of the tensors on this process's GPU, or of the process without a GPU."""
        accelerator = started_accelerator()
        if accelerator is not None and counts_memory(accelerator):
            return f"  {format_bytes(torch.accelerator.memory_allocated())} GPU memory"
        sizes = process_memory()
        return "" if sizes is None else f"  {format_bytes(sizes[0])} memory"


class _RichProgressBar:
    def __init__(self, text: _ProgressText) -> None:
        self._text = text
        self._progress: Any = None
        self._task: Any = None

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        words = self._text.text(step, numbers)
        if self._progress is None:
            self._start(step, words)
        else:
            self._progress.update(self._task, completed=step, at=self._text.position(step), words=words, refresh=True)

    def _start(self, step: int, words: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self._progress = Progress(
            TextColumn("{task.fields[at]}", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[words]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=Console(stderr=True),
            # No refresh thread: the bar is drawn only when a record is logged.
            auto_refresh=False,
            # Redirected output must stay in its file.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._progress.add_task(
            "", total=self._text.total, completed=step, at=self._text.position(step), words=words
        )
        self._progress.start()
        # A kill would leave the terminal without a cursor.
        self._progress.console.show_cursor(True)

    def close(self) -> None:
        """Keep the last line and restore the terminal."""
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()
