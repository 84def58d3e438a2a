"""``jsonl``: metrics into a file of one JSON object per line, and back.

``csv_file``: metrics into a table, for spreadsheets.

``in_memory``: metrics that stay in the process, for notebooks and tests."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from time import time
from typing import Any

from dtrain import storage
from dtrain.errors import ConfigError
from dtrain.loggers.arguments import Ranks, is_writer, rank_path
from dtrain.loggers.logger import FaultTolerantLogger, Logger, null_logger
from dtrain.loggers.sanitize import UniqueNames, decode_nonfinite, encode_nonfinite, to_plain_value
from dtrain.run_layout import STEP, TIME, is_rewind, step_from_record

RESERVED_KEYS = (STEP, TIME)
"""Keys of a record that are no metrics; a metric of such a name is written as ``metric/<name>``."""


def jsonl(path: str | Path, *, rotate_bytes: int | None = None, keep: int | None = None, ranks: Ranks = 0) -> Logger:
    """A sink that appends a line to ``path``: ``{"step": 10, "time": 1700000000.5, "loss": 2.1}``; time is seconds since 1970.

    A step may be logged several times, with a loss and later with the metrics of an evaluation, say: ``read_jsonl`` merges its
    records. A run that was killed and resumed repeats some steps: the later records are the true ones. A line is written at
    once, so a kill leaves at most one half line, which the next one ends and the reader leaves out.

    Numbers survive exactly. Scalar tensors become numbers; ``nan`` and ``inf`` are those texts, so that every JSON reader takes
    the line; other values that JSON can hold stay as they are, and the rest becomes ``{"unloggable": "Tensor [2, 3]"}``.

    Logging never stops training: a folder that cannot be written, or a full disk, is one warning, and then silence.

    Args:
        path: created where missing, with its folders. With ``{rank}`` in it, every rank writes a file of its own; ``{time}`` is
            when the process came here, in UTC.
        rotate_bytes: before a file grows beyond it, it is renamed to ``<path>.1``, the one before to ``<path>.2``, and so on.
        keep: how many renamed files stay; None for all.
        ranks: 0, or "all", which needs ``{rank}`` in the path.

    Raises:
        ConfigError: a place on a server, another field in the path, sizes below 1, ``keep`` without ``rotate_bytes``.
    """
    for name, size in (("rotate_bytes", rotate_bytes), ("keep", keep)):
        if size is not None and (type(size) is not int or size < 1):
            raise ConfigError(f"jsonl: {name} is a whole number of at least 1, or None, got {size!r}")
    if keep is not None and rotate_bytes is None:
        raise ConfigError(f"jsonl: keep={keep} is of renamed files; give rotate_bytes, too")
    here = rank_path(path, ranks, "jsonl")
    return null_logger if here is None else FaultTolerantLogger(_JsonlWriter(here, rotate_bytes, keep), f"jsonl {here}")


class _JsonlWriter:
    def __init__(self, path: Path, rotate_bytes: int | None, keep: int | None) -> None:
        self._path, self._rotate_bytes, self._keep = path, rotate_bytes, keep
        self._names = UniqueNames(f"jsonl {path}", reserved=RESERVED_KEYS)

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        record = {"step": int(step), "time": round(time(), 3)}
        record |= {self._names(str(name)): encode_nonfinite(to_plain_value(value)) for name, value in numbers.items()}
        line = json.dumps(record, allow_nan=False)
        if self._rotate_bytes is not None:
            size = storage.file_size(self._path)
            if size and size + len(line) + 1 > self._rotate_bytes:
                _rotate(self._path, self._keep)
        storage.append_line(self._path, line)


def _rotate(path: Path, keep: int | None) -> None:
    """Give each part the next number, the highest first: a kill in between leaves a gap and loses nothing."""
    for number, part in sorted(_rotated_files(path), reverse=True):
        if keep is not None and number >= keep:
            storage.remove_file(part)
        else:
            storage.rename(part, path.with_name(f"{path.name}.{number + 1}"))
    storage.rename(path, path.with_name(f"{path.name}.1"))


def _rotated_files(path: Path) -> list[tuple[int, Path]]:
    pattern = re.compile(re.escape(path.name) + r"\.([1-9]\d*)")
    try:
        names = storage.list_names(path.parent)
    except FileNotFoundError:
        return []
    return [(int(found[1]), path.with_name(name)) for name in names if (found := pattern.fullmatch(name))]


def read_jsonl(path: str | Path) -> dict[int, dict[str, Any]]:
    """Read a ``jsonl`` file: the metrics of each step, in order of steps, as ``dtrain report`` reads them.

    The records of one step are merged; of a metric that was logged twice at a step, the last value counts. Where a resumed run
    goes back, the records of the steps that it does again no longer count. Half-written lines are left out. Files that were
    renamed from ``path`` are read first, the oldest first. Non-finite numbers are numbers again.

    Example:
        >>> import tempfile
        >>> import dtrain as dt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = dt.loggers.jsonl(f"{folder}/metrics.jsonl")
        ...     log(10, {"loss": 2.5})
        ...     log(10, {"eval/loss": 2.75})
        ...     record = dt.loggers.read_jsonl(f"{folder}/metrics.jsonl")[10]
        >>> record["loss"], record["eval/loss"]
        (2.5, 2.75)

    Raises:
        FileNotFoundError: neither the file nor one renamed from it.
    """
    merged = _RecordsByStep()
    for record in _iter_records(Path(path)):
        merged.add(record)
    return dict(sorted(merged.by_step.items()))


def _iter_records(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in the lines of a file and of its older parts, in the order in which they were written."""
    parts = [part for _, part in sorted(_rotated_files(path), reverse=True)]
    for part in [*parts, path] if path.exists() or not parts else parts:
        for line in part.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # a line that a kill cut short
                continue
            if isinstance(record, dict):
                yield record


class _RecordsByStep:
    """Records by step: those of one step as one, without those of steps that a resumed run has done again."""

    def __init__(self) -> None:
        self.by_step: dict[int, dict[str, Any]] = {}
        self._last_steps: dict[str, int] = {}  # the last step of each metric
        self._max_step = -1  # the largest of them, or more

    def add(self, record: dict[str, Any]) -> None:
        """Take the record that was written next."""
        step = step_from_record(record)
        if step is None:
            return
        if step < self._max_step and is_rewind(step, record, (((name,), last) for name, last in self._last_steps.items())):
            self._forget_from(step)
        self._max_step = max(step, self._max_step)
        self.by_step.setdefault(step, {}).update(decode_nonfinite(record))
        self._last_steps |= {name: max(step, self._last_steps.get(name, step)) for name in record if name not in RESERVED_KEYS}

    def _forget_from(self, step: int) -> None:
        """Forget the records of ``step`` and later."""
        self._max_step = step
        self.by_step = {known: record for known, record in self.by_step.items() if known < step}
        self._last_steps = {}
        for known, record in sorted(self.by_step.items()):
            self._last_steps |= dict.fromkeys(record.keys() - set(RESERVED_KEYS), known)


def csv_file(path: str | Path, *, ranks: Ranks = 0) -> Logger:
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
    here = rank_path(path, ranks, "csv_file")
    return null_logger if here is None else FaultTolerantLogger(_CsvWriter(here), f"csv_file {here}")


class _CsvWriter:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._names = UniqueNames(f"csv_file {path}", lambda name: " ".join(name.split()), reserved=RESERVED_KEYS)
        self._columns: list[str] | None = None  # until the file was looked at

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        row: dict[str, Any] = {"step": int(step), "time": round(time(), 3)}
        row |= {self._names(str(name)): to_plain_value(value) for name, value in numbers.items()}
        known = self._columns or ()
        if not known or any(name not in known for name in row):
            self._add_columns(row)
        assert self._columns is not None
        storage.append_line(self._path, _format_row(_format_cell(row.get(name)) for name in self._columns))

    def _add_columns(self, row: Iterable[str]) -> None:
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
            storage.replace_file(self._path, "".join(_format_row(line) + "\n" for line in [columns, *rows]).encode())
        self._columns = columns


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    return repr(value) if isinstance(value, int | float) else json.dumps(value)


def _format_row(cells: Iterable[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(cells)
    return out.getvalue()


class InMemoryLogger:
    """A sink that keeps its records, as plain data: see ``in_memory``."""

    __slots__ = ("_here", "records")

    def __init__(self, active: bool) -> None:
        self._here = active
        self.records: list[dict[str, Any]] = []
        """In order: ``{"step": 10, "time": 1700000000.5, "metrics": {"loss": 2.1}}``."""

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        if self._here:
            metrics = {str(name): to_plain_value(value) for name, value in numbers.items()}
            self.records.append({"step": int(step), "time": time(), "metrics": metrics})

    def column(self, name: str) -> dict[int, Any]:
        """One metric by step, of each step the last value; empty for a name that never came."""
        found = {record["step"]: record["metrics"][name] for record in self.records if name in record["metrics"]}
        return dict(sorted(found.items()))

    @property
    def names(self) -> list[str]:
        """Of all metrics so far, in the order in which they came."""
        return list(dict.fromkeys(name for record in self.records for name in record["metrics"]))


def in_memory(*, ranks: Ranks = 0) -> InMemoryLogger:
    """A sink that keeps what it is given: ``.records``, ``.names`` and ``.column(name)``.

    Values are plain data, as in ``jsonl``, but non-finite numbers stay numbers. It grows with every record.

    Args:
        ranks: 0, or "all"; on other ranks it stays empty.

    Raises:
        ConfigError: other ``ranks``.

    Example:
        >>> kept = in_memory()
        >>> kept(1, {"loss": torch.tensor(0.5)})
        >>> kept(2, {"loss": 0.25, "lr": 0.1})
        >>> kept.column("loss"), kept.names
        ({1: 0.5, 2: 0.25}, ['loss', 'lr'])
    """
    return InMemoryLogger(is_writer(ranks, "in_memory"))
