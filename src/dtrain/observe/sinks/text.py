"""``console`` and ``text_file``: metrics as lines for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import gmtime, strftime
from typing import Any, TextIO

from dtrain import storage
from dtrain.durations import Duration
from dtrain.errors import ConfigError
from dtrain.observe.sinks.guard import Guarded, nowhere
from dtrain.observe.sinks.ranks import Chosen, Ranks, path_here, writes
from dtrain.observe.sinks.sink import Sink
from dtrain.observe.sinks.values import plain

_WIDEST = 60  # characters of a value that is no number


def told(numbers: Mapping[str, Any], chosen: Callable[[str], bool]) -> str:
    """The metrics that are chosen on one line, ``loss 2.1034  lr 0.003``: for reading, so five digits."""
    return "  ".join(f"{name} {_shown(plain(value))}" for name, value in numbers.items() if chosen(str(name)))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, dict) and set(value) == {"unloggable"}:
        return f"<{value['unloggable']}>"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def console(
    *, every: Duration | int | str = 1, names: Sequence[str] | None = None, stream: TextIO | None = None, ranks: Ranks = 0
) -> Sink:
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
    printing = _Printing(int(interval.value), Chosen(names, "console"), stream)
    return Guarded(printing, "console") if writes(ranks, "console") else nowhere


class _Printing:
    def __init__(self, every: int, chosen: Callable[[str], bool], stream: TextIO | None) -> None:
        self._every, self._chosen, self._stream = every, chosen, stream
        self._last: int | None = None

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        if step // self._every != self._last:
            self._last = step // self._every
            print(f"step {step}  {told(numbers, self._chosen)}".rstrip(), file=self._stream or sys.stdout, flush=True)


def text_file(path: str | Path, *, flush_every: int = 1, names: Sequence[str] | None = None, ranks: Ranks = 0) -> Sink:
    """A sink that appends a line to a text file, ``2026-01-31T12:00:00Z  step 120  loss 2.1034``.

    Logging never stops training: what cannot be written is one warning, and then silence.

    Args:
        path: created where missing, with its folders; ``{rank}`` and ``{time}`` as in ``jsonl``.
        flush_every: how many lines are kept back and written together; a kill loses those.
        names: which metrics, by name or pattern; None for all.
        ranks: 0, or "all", which needs ``{rank}`` in the path.

    Raises:
        ConfigError: as ``jsonl`` has them; ``flush_every`` below 1; names that are no list of texts.
    """
    if type(flush_every) is not int or flush_every < 1:
        raise ConfigError(f"text_file: flush_every is a whole number of at least 1, got {flush_every!r}")
    chosen, here = Chosen(names, "text_file"), path_here(path, ranks, "text_file")
    return nowhere if here is None else Guarded(_Text(here, flush_every, chosen), f"text_file {here}")


class _Text:
    def __init__(self, path: Path, flush_every: int, chosen: Callable[[str], bool]) -> None:
        self._path, self._most, self._chosen = path, flush_every, chosen
        self._lines: list[str] = []

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        at = strftime("%Y-%m-%dT%H:%M:%SZ", gmtime())
        self._lines.append(f"{at}  step {step}  {told(numbers, self._chosen)}".rstrip())
        if len(self._lines) >= self._most:
            self.close()

    def close(self) -> None:
        """Write what is kept back."""
        lines, self._lines = self._lines, []
        if lines:
            storage.append_line(self._path, "\n".join(lines))
