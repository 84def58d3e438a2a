"""``csv_file``: metrics into a table, for spreadsheets."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import time
from typing import Any

from dtrain import storage
from dtrain.observe.sinks.guard import Guarded, nowhere
from dtrain.observe.sinks.json_lines import OWN
from dtrain.observe.sinks.names import DistinctNames
from dtrain.observe.sinks.ranks import Ranks, path_here
from dtrain.observe.sinks.sink import Sink
from dtrain.observe.sinks.values import plain


def csv_file(path: str | Path, *, ranks: Ranks = 0) -> Sink:
    """A sink that appends a row to a table with the columns ``step``, ``time`` (seconds since 1970) and one for each metric.

    A metric that comes later gets a column at the end: the file is written again then, with empty cells in earlier rows.
    Numbers survive exactly; what is no number is written as JSON. A resumed run goes on below: the last row of a step is the
    true one. Logging never stops training: what cannot be written is one warning, and then silence.

    Args:
        path: created where missing, with its folders; ``{rank}`` and ``{time}`` as in ``jsonl``.
        ranks: 0, or "all", which needs ``{rank}`` in the path.

    Raises:
        ConfigError: as ``jsonl`` has them.
    """
    here = path_here(path, ranks, "csv_file")
    return nowhere if here is None else Guarded(_Rows(here), f"csv_file {here}")


class _Rows:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._names = DistinctNames(f"csv_file {path}", lambda name: " ".join(name.split()), reserved=OWN)
        self._columns: list[str] | None = None  # until the file was looked at

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        row: dict[str, Any] = {"step": int(step), "time": round(time(), 3)}
        row |= {self._names(str(name)): plain(value) for name, value in numbers.items()}
        known = self._columns or ()
        if not known or any(name not in known for name in row):
            self._widen(row)
        assert self._columns is not None
        storage.append_line(self._path, _line(_cell(row.get(name)) for name in self._columns))

    def _widen(self, row: Iterable[str]) -> None:
        """Write the file again with the columns that it has and those of ``row``, without a row that a kill cut short."""
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            storage.make_folders(self._path.parent)
            text = ""
        header, *rows = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))) or [[]]
        columns = list(dict.fromkeys([*header, *row]))
        if columns != header or not text.endswith("\n"):
            rows = [line + [""] * (len(columns) - len(line)) for line in rows]
            storage.replace_file(self._path, "".join(_line(line) + "\n" for line in [columns, *rows]).encode())
        self._columns = columns


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return repr(value) if isinstance(value, int | float) else json.dumps(value)


def _line(cells: Iterable[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(cells)
    return out.getvalue()
