"""``jsonl``: metrics into a file of one JSON object per line, and back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import time
from typing import Any

from dtrain import storage
from dtrain.errors import ConfigError
from dtrain.observe.sinks.guard import Guarded, nowhere
from dtrain.observe.sinks.names import DistinctNames
from dtrain.observe.sinks.ranks import Ranks, path_here
from dtrain.observe.sinks.sink import Sink
from dtrain.observe.sinks.values import decoded, encoded, plain
from dtrain.runs import STEP, TIME, goes_back, step_of_record

OWN = (STEP, TIME)
"""Keys of a record that are no metrics; a metric of such a name is written as ``metric/<name>``."""


def jsonl(path: str | Path, *, rotate_bytes: int | None = None, keep: int | None = None, ranks: Ranks = 0) -> Sink:
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
    here = path_here(path, ranks, "jsonl")
    return nowhere if here is None else Guarded(_Lines(here, rotate_bytes, keep), f"jsonl {here}")


class _Lines:
    def __init__(self, path: Path, rotate_bytes: int | None, keep: int | None) -> None:
        self._path, self._most, self._keep = path, rotate_bytes, keep
        self._names = DistinctNames(f"jsonl {path}", reserved=OWN)

    def __call__(self, step: int, numbers: Mapping[str, Any], /) -> None:
        record = {"step": int(step), "time": round(time(), 3)}
        record |= {self._names(str(name)): encoded(plain(value)) for name, value in numbers.items()}
        line = json.dumps(record, allow_nan=False)
        if self._most is not None:
            size = storage.file_size(self._path)
            if size and size + len(line) + 1 > self._most:
                _rotate(self._path, self._keep)
        storage.append_line(self._path, line)


def _rotate(path: Path, keep: int | None) -> None:
    """Give each part the next number, the highest first: a kill in between leaves a gap and loses nothing."""
    for number, part in sorted(_parts(path), reverse=True):
        if keep is not None and number >= keep:
            storage.remove_file(part)
        else:
            storage.rename(part, path.with_name(f"{path.name}.{number + 1}"))
    storage.rename(path, path.with_name(f"{path.name}.1"))


def _parts(path: Path) -> list[tuple[int, Path]]:
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
        ...     log = dt.jsonl(f"{folder}/metrics.jsonl")
        ...     log(10, {"loss": 2.5})
        ...     log(10, {"eval/loss": 2.75})
        ...     record = dt.read_jsonl(f"{folder}/metrics.jsonl")[10]
        >>> record["loss"], record["eval/loss"]
        (2.5, 2.75)

    Raises:
        FileNotFoundError: neither the file nor one renamed from it.
    """
    merged = _Merged()
    for record in _records(Path(path)):
        merged.add(record)
    return dict(sorted(merged.by_step.items()))


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in the lines of a file and of its older parts, in the order in which they were written."""
    parts = [part for _, part in sorted(_parts(path), reverse=True)]
    for part in [*parts, path] if path.exists() or not parts else parts:
        for line in part.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):  # a line that a kill cut short
                continue
            if isinstance(record, dict):
                yield record


class _Merged:
    """Records by step: those of one step as one, without those of steps that a resumed run has done again."""

    def __init__(self) -> None:
        self.by_step: dict[int, dict[str, Any]] = {}
        self._last: dict[str, int] = {}  # the last step of each metric
        self._top = -1  # the largest of them, or more

    def add(self, record: dict[str, Any]) -> None:
        """Take the record that was written next."""
        step = step_of_record(record)
        if step is None:
            return
        if step < self._top and goes_back(step, record, (((name,), last) for name, last in self._last.items())):
            self._forget_from(step)
        self._top = max(step, self._top)
        self.by_step.setdefault(step, {}).update(decoded(record))
        self._last |= {name: max(step, self._last.get(name, step)) for name in record if name not in OWN}

    def _forget_from(self, step: int) -> None:
        """Forget the records of ``step`` and later."""
        self._top = step
        self.by_step = {known: record for known, record in self.by_step.items() if known < step}
        self._last = {}
        for known, record in sorted(self.by_step.items()):
            self._last |= dict.fromkeys(record.keys() - set(OWN), known)
