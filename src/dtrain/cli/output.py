"""Print tables, JSON and progress bars, and prefix errors with the name of the command."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import typer

from dtrain.errors import ConfigError, DtrainError, escape_unprintable

# Programs that read a table expect one line per row.
_UNLIMITED_COLUMNS = 100_000


def print_json(value: dict[str, Any]) -> None:
    """Print a JSON object to stdout."""
    typer.echo(json.dumps(value, indent=1))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Print a table to stdout: as wide as the terminal, or with one line per row.

    Args:
        head: names of the columns.
        rows: one text per column.
        right: indexes of right-aligned columns.
    """
    from io import StringIO

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, name in enumerate(head):
        table.add_column(Text(name), justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(escape_unprintable(cell)) for cell in row))
    # Standard output is None if it was closed before Python started.
    if sys.stdout is not None and sys.stdout.isatty():
        Console(file=sys.stdout).print(table)
        return
    text = StringIO()
    Console(file=text, width=_UNLIMITED_COLUMNS, color_system=None, force_terminal=False).print(table)
    typer.echo("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


class ByteProgressBar:
    """Progress bar on stderr, if stderr is a terminal and the work takes long. A context manager.

    Args:
        label: description of the work.
        total: total bytes; None if unknown.
        after_s: seconds before the bar appears.
        stream: stream of the bar; None uses stderr.
    """

    def __init__(self, label: str, total: int | None = None, *, after_s: float = 1.0, stream: TextIO | None = None) -> None:
        self.label, self.total, self.done = label, total, 0
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._draw_at = time.monotonic() + after_s
        self._progress: Any = None
        self._task: Any = None

    def set_total(self, total: int) -> None:
        """Set the total number of bytes."""
        self.total = total

    def advance(self, nbytes: int) -> None:
        """Add ``nbytes`` to the completed bytes."""
        self.done += nbytes
        if not self._is_terminal or time.monotonic() < self._draw_at:
            return
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=Console(file=self._stream), transient=True)
            self._task = self._progress.add_task(self.label, total=self.total)
            self._progress.start()
        self._progress.update(self._task, completed=self.done, total=self.total)

    def __enter__(self) -> ByteProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


@contextmanager
def prefix_errors(prefix: str, kind: type[DtrainError]) -> Iterator[None]:
    """Begin error messages with ``prefix``, unless they begin with it already.

    Args:
        prefix: group and command, such as ``"data: write"``.
        kind: class of errors whose messages change, besides ConfigError; an OSError becomes an error of the class.
    """
    group, command = prefix.split(": ")
    try:
        yield
    except (kind, ConfigError) as error:
        text = str(error).removeprefix(f"{command}: ")
        if text.startswith(f"{group}: "):
            raise
        raise type(error)(f"{prefix}: {text}") from error
    except OSError as error:
        raise kind(f"{prefix}: {error}") from error
