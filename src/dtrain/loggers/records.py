"""Store metrics as records: ``jsonl`` and ``csv_file`` write files, ``read_jsonl`` reads them, ``in_memory`` keeps a list."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import time
from typing import Any

from dtrain import storage
from dtrain.arguments import check_int
from dtrain.errors import ConfigError
from dtrain.loggers.logger import (
    FaultTolerantLogger,
    Logger,
    Ranks,
    UniqueNames,
    decode_nonfinite,
    encode_nonfinite,
    is_writer,
    null_logger,
    rank_path,
    to_plain_value,
)
from dtrain.run.run_files import STEP, TIME, JsonlReader, is_rewind, rotated_files, step_from_record

RESERVED_KEYS = (STEP, TIME)
"""Reserved keys of a record. A metric with a reserved name is written as ``metric/<name>``."""


def jsonl(path: str | Path, *, rotate_bytes: int | None = None, keep_last: int | None = None, ranks: Ranks = 0) -> Logger:
    """Append one JSON object per record to ``path``: ``{"step": 10, "time": 1700000000.5, "loss": 2.1}``.

    ``time`` is in seconds since 1970. Several records may have the same step, for example a loss and later the metrics of an
    evaluation: ``read_jsonl`` merges the records of a step. A resumed run repeats some steps; the later records count. Each
    line is written immediately. A kill leaves at most one partial line, which ``read_jsonl`` skips.

    Numbers are written exactly. Scalar tensors become numbers. ``nan`` and ``inf`` become texts, so that every JSON reader
    accepts the line. Values without a JSON form become ``{"unloggable": "Tensor [2, 3]"}``.

    A failure such as a full disk causes one warning and ends the logger. Training continues.

    Args:
        path: file, created with its folders if missing. ``{rank}`` makes every rank write its own file. ``{time}`` becomes the
            time of this call in UTC.
        rotate_bytes: largest size of a file in bytes; a full file is renamed to ``<path>.1``, the file before to ``<path>.2``.
        keep_last: number of renamed files to keep; None keeps all.
        ranks: 0, or "all" with ``{rank}`` in the path.

    Example:
        import dtrain as dt

        log = dt.loggers.jsonl("runs/gpt/metrics.jsonl")
        for batch in loader:
            state, metrics = step(state, batch)
            log(state.clock.step, dt.reduce_metrics(metrics))

    Raises:
        ConfigError: ``path`` is on a server or has another field, a size is below 1, or ``keep_last`` is given without
            ``rotate_bytes``.
    """
    for name, size in (("rotate_bytes", rotate_bytes), ("keep_last", keep_last)):
        if size is not None:
            check_int("jsonl", name, size, advice="Pass None for no limit.")
    if keep_last is not None and rotate_bytes is None:
        raise ConfigError(
            f"jsonl: rotate_bytes must be given with keep_last, got keep_last={keep_last} and None. Pass rotate_bytes."
        )
    file = rank_path(path, ranks, "jsonl")
    return null_logger if file is None else FaultTolerantLogger(_JsonlWriter(file, rotate_bytes, keep_last), f"jsonl {file}")


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
                self._rotate()
        storage.append_line(self._path, line)

    def _rotate(self) -> None:
        """Increment the number of each rotated file, the highest number first, so that a kill loses no file."""
        for number, part in rotated_files(self._path):
            if number and self._keep is not None and number >= self._keep:
                storage.remove_file(part)
            else:
                storage.rename(part, self._path.with_name(f"{self._path.name}.{number + 1}"))


def read_jsonl(path: str | Path) -> dict[int, dict[str, Any]]:
    """Read a ``jsonl`` file into the metrics of each step, in order of steps, with the same rules as ``dtrain report``.

    The records of a step are merged; the last value of a metric counts. If a resumed run repeats steps, the earlier records of
    the repeated steps are dropped. Partial lines are skipped. Rotated files are read first, the oldest first. Non-finite
    numbers become floats again.

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
        FileNotFoundError: neither the file nor a rotated file exists.
    """
    file, by_step, last_steps = Path(path), dict[int, dict[str, Any]](), dict[str, int]()
    for part in [part for _, part in rotated_files(file)] or [file]:
        for record in (record for records in JsonlReader(part).read_batches(whole_file=True) for record in records):
            step = step_from_record(record)
            if step is None:
                continue
            if is_rewind(step, record, last_steps):
                by_step = {before: numbers for before, numbers in by_step.items() if before < step}
                last_steps = {name: before for before, numbers in sorted(by_step.items()) for name in numbers}
            by_step.setdefault(step, {}).update(decode_nonfinite(record))
            last_steps |= {name: max(step, last_steps.get(name, step)) for name in record}
    return dict(sorted(by_step.items()))


def csv_file(path: str | Path, *, ranks: Ranks = 0) -> Logger:
    """Append one row per record to a CSV table with columns ``step``, ``time`` (seconds since 1970) and one column per metric.

    A new metric adds a column at the end: the file is rewritten, with empty cells in earlier rows. Numbers are written
    exactly, other values as JSON. A resumed run appends rows; the last row of a step counts. A failure causes one warning, and
    training continues.

    Args:
        path: file, created with its folders if missing; ``{rank}`` and ``{time}`` as in ``jsonl``.
        ranks: 0, or "all" with ``{rank}`` in the path.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import dtrain as dt
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = dt.loggers.csv_file(f"{folder}/metrics.csv")
        ...     log(10, {"loss": 2.5})
        ...     print(Path(f"{folder}/metrics.csv").read_text().splitlines()[0])
        step,time,loss

    Raises:
        ConfigError: see ``jsonl``.
    """
    file = rank_path(path, ranks, "csv_file")
    return null_logger if file is None else FaultTolerantLogger(_CsvWriter(file), f"csv_file {file}")


class _CsvWriter:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._names = UniqueNames(f"csv_file {path}", lambda name: " ".join(name.split()), reserved=RESERVED_KEYS)
        # None until the existing file is read
        self._columns: list[str] | None = None

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        row: dict[str, Any] = {"step": int(step), "time": round(time(), 3)}
        row |= {self._names(str(name)): to_plain_value(value) for name, value in numbers.items()}
        known = self._columns or ()
        if not known or any(name not in known for name in row):
            self._add_columns(row)
        assert self._columns is not None
        cells = (row.get(name) for name in self._columns)
        texts = ("" if cell is None else repr(cell) if isinstance(cell, int | float) else json.dumps(cell) for cell in cells)
        storage.append_line(self._path, _format_row(texts))

    def _add_columns(self, row: Iterable[str]) -> None:
        """Rewrite the file with the existing columns and the columns of ``row``, without a partial last row."""
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


def _format_row(cells: Iterable[str]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="").writerow(cells)
    return out.getvalue()


class InMemoryLogger:
    """Logger that keeps records as plain data. See ``in_memory``."""

    __slots__ = ("_active", "records")

    def __init__(self, active: bool) -> None:
        self._active = active
        self.records: list[dict[str, Any]] = []
        """Records in order: ``{"step": 10, "time": 1700000000.5, "metrics": {"loss": 2.1}}``."""

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        if self._active:
            metrics = {str(name): to_plain_value(value) for name, value in numbers.items()}
            self.records.append({"step": int(step), "time": time(), "metrics": metrics})

    def column(self, name: str) -> dict[int, Any]:
        """Return the last value of a metric at each step; empty for an unknown name."""
        values = {record["step"]: record["metrics"][name] for record in self.records if name in record["metrics"]}
        return dict(sorted(values.items()))

    @property
    def names(self) -> list[str]:
        """Names of all metrics so far, in order of appearance."""
        return list(dict.fromkeys(name for record in self.records for name in record["metrics"]))


def in_memory(*, ranks: Ranks = 0) -> InMemoryLogger:
    """Keep records in the memory of the process, for notebooks and tests: ``.records``, ``.names`` and ``.column(name)``.

    Values are plain data as in ``jsonl``, except that non-finite numbers stay floats. Memory grows with every record.

    Args:
        ranks: 0, or "all"; the logger stays empty on the remaining ranks.

    Example:
        >>> import dtrain as dt
        >>> log = dt.loggers.in_memory()
        >>> log(1, {"loss": torch.tensor(0.5)})
        >>> log(2, {"loss": 0.25, "lr": 0.1})
        >>> log.column("loss"), log.names
        ({1: 0.5, 2: 0.25}, ['loss', 'lr'])

    Raises:
        ConfigError: ``ranks`` is neither 0 nor "all".
    """
    return InMemoryLogger(is_writer(ranks, "in_memory"))
