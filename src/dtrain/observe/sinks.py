"""``jsonl``: metrics into a file of one JSON object per line, and back."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dtrain import storage
from dtrain.dist.init import current

Log = Callable[[int, Mapping[str, float]], None]
"""``log(step, numbers)``."""


def jsonl(path: str | Path) -> Log:
    """A function ``log(step, numbers)`` that appends a line to ``path``, on rank 0; elsewhere it does nothing.

    A run that was killed and resumed repeats some steps: the last record of a step is the true one (``read_jsonl``).
    Logging never stops training: a file that cannot be written is warned about once, and then left alone.
    """
    if current().rank != 0:
        return lambda step, numbers: None
    return _Appender(Path(path))


class _Appender:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._broken = False

    def __call__(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._broken:
            return
        try:
            storage.append_line(self._path, json.dumps({"step": step, **numbers}))
        except OSError as error:
            self._broken = True
            warnings.warn(f"jsonl: cannot write {self._path} ({error}); metrics are no longer logged", stacklevel=2)
        except (TypeError, ValueError) as error:
            warnings.warn(f"jsonl: step {step} is not logged, only plain numbers are: {error}", stacklevel=2)


def read_jsonl(path: str | Path) -> dict[int, dict[str, Any]]:
    """The records of a ``jsonl`` file by step, in order of steps: of each step the last one, without half-written lines."""
    records: dict[int, dict[str, Any]] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # a line that a kill cut short
            continue
        records[record["step"]] = record
    return dict(sorted(records.items()))
