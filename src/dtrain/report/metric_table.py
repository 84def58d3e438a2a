"""Read metric records into columns, drop repeated steps, and downsample each series without losing spikes."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dtrain.report.model import Column, MetricSeries
from dtrain.run.run_files import NON_FINITE, STEP, TIME, Row, is_rewind, step_from_record

# metrics, and characters of a name
_MAX_NAMES, _MAX_NAME_LENGTH = 2000, 200

Ledger = Callable[[Column], tuple[Column, Column]]
"""Function from steps to their times since 1970 and token counts in the ledgers; NaN if unknown."""


class MetricTable:
    """Records of a metrics file and its rotated files, oldest first.

    A resumed run repeats steps; the earlier records of repeated steps are dropped. A metric whose step decreases reveals the
    restart. ``resumes`` may give the first repeated step more exactly than the next record.

    Args:
        resumes: first steps of attempts.

    Attributes:
        count: number of records.
        malformed: number of objects that are not records.
        non_numeric: number of values other than numbers, by name.
        went_back: number of restarts.
        repeated: number of dropped values.
        ends_before_resume: time and step of the last record before each restart, for records with a time.
        has_too_many_names: True if names were dropped.
    """

    def __init__(self, resumes: Sequence[float] = ()) -> None:
        self.count = 0
        self.malformed = 0
        self.non_numeric: dict[str, int] = {}
        self.went_back = 0
        self.repeated = 0
        self.ends_before_resume: list[tuple[float, float]] = []
        self.has_too_many_names = False
        self._resumes = sorted(resumes)
        # step, time and value of each record, in order of writing
        self._columns: dict[str, array[float]] = {}
        self._newest = (math.nan, -1)
        self._max_step = -1

    def add(self, rows: list[Row]) -> None:
        """Add records."""
        for row in rows:
            step = step_from_record(row)
            if step is None:
                self.malformed += 1
                continue
            self.count += 1
            if step < self._max_step:
                self._drop_repeated(step, row)
            number = to_number(row.get(TIME))
            time = math.nan if number is None else number
            for name, value in row.items():
                # The common case: a call for each value would double the time of reading.
                if type(value) is float and name in self._columns:
                    self._columns[name].extend((step, time, value))
                elif name not in (STEP, TIME):
                    self._add_value(name, step, time, to_number(value))
            self._newest, self._max_step = (time, step), max(step, self._max_step)

    def _add_value(self, name: str, step: int, time: float, number: float | None) -> None:
        column = self._columns.get(name)
        if column is None or number is None:
            name = name[:_MAX_NAME_LENGTH]
            if number is None:
                if len(self.non_numeric) < _MAX_NAMES:
                    self.non_numeric[name] = self.non_numeric.get(name, 0) + 1
                return
            if len(self._columns) >= _MAX_NAMES and name not in self._columns:
                self.has_too_many_names = True
                return
            column = self._columns.setdefault(name, array("d"))
        column.extend((step, time, number))

    def _drop_repeated(self, step: int, row: Row) -> None:
        if not is_rewind(step, row, {name: column[-3] for name in row if (column := self._columns.get(name))}):
            return
        at = bisect_right(self._resumes, step - 1)
        first_repeated = self._resumes[at - 1] if at else step - 1
        time, last_step = self._newest
        if not math.isnan(time):
            self.ends_before_resume.append((time, last_step))
        self.went_back += 1
        dropped: set[float] = set()
        for name, column in self._columns.items():
            records = np.array(column).reshape(-1, 3)
            kept = records[:, 0] <= first_repeated
            dropped.update(records[~kept, 0])
            self._columns[name] = array("d", records[kept].ravel().tolist())
        self.repeated += len(dropped)
        self._max_step = -1

    def columns(self) -> dict[str, Column]:
        """Return rows of step, time (NaN if unknown) and value by name, in order of steps, with the last record of each."""
        columns = {}
        for name, column in self._columns.items():
            if column:
                records = np.array(column).reshape(-1, 3)
                if (np.diff(records[:, 0]) <= 0).any():
                    _, chosen = np.unique(records[::-1, 0], return_index=True)
                    records = records[::-1][chosen]
                columns[name] = records
        return columns


def to_number(value: object) -> float | None:
    """Convert a logged value to a number, including the texts of non-finite numbers; None for other values."""
    if isinstance(value, float):
        return value
    if isinstance(value, str):
        return NON_FINITE.get(value)
    if not isinstance(value, int):
        return None
    return float(value) if abs(value) < 1e308 else math.copysign(math.inf, value)


MAX_POINTS = 1000
_MAXNON_FINITE = 200
# points of all series: a larger page opens slowly
_MAX_TOTAL_POINTS = 150_000


def make_series(rows: Column, *, started_at: float, ledger: Ledger, points: int = MAX_POINTS) -> MetricSeries:
    """Build the series of a metric.

    Args:
        rows: step, time since 1970 (NaN if unknown) and value of each record, in order of steps.
        started_at: origin of times.
        ledger: function for unknown times and tokens.
        points: largest number of finite points, even.
    """
    values = rows[:, 2]
    finite = np.flatnonzero(np.isfinite(values))
    other = np.flatnonzero(~np.isfinite(values))
    shown = other[np.linspace(0, len(other) - 1, min(len(other), _MAXNON_FINITE)).astype(int)]
    chosen = rows[np.union1d(finite[downsample(values[finite], points)], shown)]
    steps, times = chosen[:, 0], chosen[:, 1]
    ledger_times, tokens = ledger(steps)
    times = np.where(np.isfinite(times), times, ledger_times) - started_at
    return MetricSeries(
        steps=steps,
        values=chosen[:, 2],
        tokens=_if_all_finite(tokens),
        times=_if_all_finite(times),
        count=len(rows),
        non_finite=len(other),
        last=float(values[finite[-1]]) if len(finite) else None,
        last_step=int(rows[-1, 0]),
        low=float(values[finite].min()) if len(finite) else None,
        high=float(values[finite].max()) if len(finite) else None,
    )


def points_per_series(names: int) -> int:
    """Return the largest number of points per series."""
    return max(20, min(MAX_POINTS, _MAX_TOTAL_POINTS // max(names, 1)) // 2 * 2)


def downsample(values: Column, points: int) -> NDArray[np.int64]:
    """Return the indices of the points to keep: the first, the last, and minimum and maximum of each interval."""
    count = len(values)
    if count <= points:
        return np.arange(count)
    edges = np.linspace(0, count, points // 2).astype(int)
    chosen = {0, count - 1}
    for begin, end in pairwise(edges):
        chosen |= {begin + int(values[begin:end].argmin()), begin + int(values[begin:end].argmax())}
    return np.array(sorted(chosen))


def _if_all_finite(values: Column) -> Column:
    return values if np.isfinite(values).all() else values[:0]
