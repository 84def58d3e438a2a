"""Read metric records into columns, drop repeated steps, and downsample each series without losing spikes."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Literal

from dtrain.report.model import MetricSeries, NonFiniteMark
from dtrain.report.reading.jsonl_reader import Row
from dtrain.run_layout import STEP, TIME, is_rewind, step_from_record

# metrics, and characters of a name
_MAX_NAMES, _MAX_NAME_LENGTH = 2000, 200
_MAX_BLOCKS = 500
# texts of the JSONL logger
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class RecordBlock:
    """Records with the same names, stored row by row."""

    __slots__ = ("names", "order", "rows", "width")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.width = len(names)
        self.rows = array("d")
        # position of each record among all records
        self.order = array("q")

    def column(self, name: str) -> array[float]:
        """Return the values of a name."""
        return self.rows[self.names.index(name) :: self.width]

    def last_step(self) -> float:
        """Return the step of the last record; -1 without records."""
        return self.rows[self.names.index(STEP) - self.width] if self.rows else -1.0

    def truncate_after(self, step: float) -> int:
        """Remove the records after a step, and return their number."""
        steps = self.column(STEP)
        keep = bisect_right(steps, step)
        del self.rows[keep * self.width :]
        del self.order[keep:]
        return len(steps) - keep


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
        repeated: number of dropped records.
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
        self._max_step = -1.0
        self._blocks: dict[tuple[str, ...], RecordBlock] = {}
        self._names: set[str] = {STEP, TIME}

    def add(self, rows: list[Row]) -> None:
        """Add records."""
        blocks, top = self._blocks, self._max_step
        for row in rows:
            names = tuple(row)
            step = step_from_record(row)
            if step is None:
                self.malformed += 1
                continue
            self.count += 1
            if step < top and self._goes_back(names, step):
                top = -1.0
            block = blocks.get(names)
            if block is not None:
                before = len(block.rows)
                try:
                    block.rows.extend(row.values())
                except (TypeError, OverflowError):
                    del block.rows[before:]
                else:
                    block.order.append(self.count)
                    top = step if step > top else top
                    continue
            self._add_slowly(row)
            top = step if step > top else top
        self._max_step = top

    def _goes_back(self, names: tuple[str, ...], step: int) -> bool:
        if not is_rewind(step, names, ((block.names, block.last_step()) for block in self._blocks.values())):
            return False
        at = bisect_right(self._resumes, step - 1)
        to = self._resumes[at - 1] if at else step - 1
        newest = max((block for block in self._blocks.values() if block.order), key=lambda block: block.order[-1])
        if TIME in newest.names:
            self.ends_before_resume.append((newest.column(TIME)[-1], newest.last_step()))
        self.went_back += 1
        self.repeated += sum(block.truncate_after(to) for block in self._blocks.values())
        return True

    def _add_slowly(self, row: Row) -> None:
        """Add a record with new names or with values other than numbers."""
        plain: dict[str, float] = {}
        for name, value in row.items():
            short_name = name[:_MAX_NAME_LENGTH]
            number = to_number(value)
            if number is None:
                if len(self.non_numeric) < _MAX_NAMES:
                    self.non_numeric[short_name] = self.non_numeric.get(short_name, 0) + 1
            elif short_name in self._names or len(self._names) < _MAX_NAMES:
                self._names.add(short_name)
                plain[short_name] = number
            else:
                self.has_too_many_names = True
        shapes = [tuple(plain)]
        # Names that change all the time are stored separately.
        if shapes[0] not in self._blocks and len(self._blocks) >= _MAX_BLOCKS:
            timed = (STEP, TIME) if TIME in plain else (STEP,)
            shapes = [(*timed, name) for name in plain if name not in timed]
        for shape in shapes:
            block = self._blocks.setdefault(shape, RecordBlock(shape))
            block.rows.extend([plain[name] for name in shape])
            block.order.append(self.count)

    def columns(self) -> dict[str, tuple[Sequence[float], Sequence[float], Sequence[float]]]:
        """Return steps, times (NaN if unknown) and values by name, in order of steps, with the last record of each step."""
        of: dict[str, list[RecordBlock]] = {}
        for block in self._blocks.values():
            for name in block.names:
                if name not in (STEP, TIME) and block.rows:
                    of.setdefault(name, []).append(block)
        orders: dict[tuple[int, ...], _JoinedBlocks] = {}
        columns = {}
        for name, blocks in of.items():
            key = tuple(map(id, blocks))
            joined = orders.get(key) or orders.setdefault(key, _JoinedBlocks(blocks))
            columns[name] = (joined.steps, joined.times, joined.values_of(name))
        return columns


def to_number(value: object) -> float | None:
    """Convert a logged value to a number, including the texts of non-finite numbers; None for other values."""
    if isinstance(value, str):
        return _NON_FINITE.get(value)
    if not isinstance(value, int | float):
        return None
    if isinstance(value, float) or abs(value) < 1e308:
        return float(value)
    return math.inf if value > 0 else -math.inf


class _JoinedBlocks:
    """Several blocks in order of steps."""

    def __init__(self, blocks: list[RecordBlock]) -> None:
        self._blocks = blocks
        self._kept: list[int] | None = None
        steps, times, order = array("d"), array("d"), array("q")
        for block in blocks:
            steps.extend(block.column(STEP))
            times.extend(block.column(TIME) if TIME in block.names else array("d", [math.nan]) * len(block.order))
            order.extend(block.order)
        last = -1.0
        for step in steps:
            if step <= last:
                self._kept = _last_record_per_step(steps, order)
                break
            last = step
        self.steps: Sequence[float] = self._in_step_order(steps)
        self.times: Sequence[float] = self._in_step_order(times)

    def values_of(self, name: str) -> Sequence[float]:
        """Return the values of a name at ``steps``."""
        values = array("d")
        for block in self._blocks:
            values.extend(block.column(name))
        return self._in_step_order(values)

    def _in_step_order(self, values: array[float]) -> Sequence[float]:
        return values if self._kept is None else [values[index] for index in self._kept]


def _last_record_per_step(steps: Sequence[float], order: Sequence[int]) -> list[int]:
    """Return the indices of the records that count, in order of steps: the last record of each step."""
    last: dict[float, int] = {}
    for index, step in enumerate(steps):
        other = last.get(step)
        if other is None or order[other] < order[index]:
            last[step] = index
    return [last[step] for step in sorted(last)]


MAX_POINTS = 1000
MAX_MARKS = 200
# points of all series: a larger page opens slowly
_MAX_TOTAL_POINTS = 150_000

StepTime = Callable[[float], tuple[float, float | None]]
"""Function from a step to its time and token count in the ledgers. Raises LookupError if unknown."""


def make_series(
    steps: Sequence[float],
    times: Sequence[float],
    values: Sequence[float],
    *,
    started_at: float,
    moment: StepTime,
    points: int = MAX_POINTS,
) -> MetricSeries:
    """Build the series of a metric from its columns.

    Args:
        steps: steps in order.
        times: seconds since 1970, NaN if unknown.
        values: values at the steps.
        started_at: origin of times.
        moment: function for unknown times and tokens.
        points: largest number of points, even.
    """
    last_step, count = int(steps[-1]), len(values)
    marks: list[NonFiniteMark] = []
    bad = 0
    # The sum runs in C; a check of each value would take a second for ten million values. Large values may overflow, too.
    if not math.isfinite(sum(values)):
        finite = [index for index, value in enumerate(values) if math.isfinite(value)]
        bad = count - len(finite)
        marks = _non_finite_marks(steps, times, values, started_at, moment)
        steps, times, values = ([column[index] for index in finite] for column in (steps, times, values))
    chosen = downsample(values, points)
    at, tokens = _times_and_tokens([steps[index] for index in chosen], [times[index] for index in chosen], started_at, moment)
    low = min(range(len(chosen)), key=lambda index: values[chosen[index]], default=None)
    high = max(range(len(chosen)), key=lambda index: values[chosen[index]], default=None)
    return MetricSeries(
        steps=[int(steps[index]) for index in chosen],
        values=[values[index] for index in chosen],
        tokens=tokens,
        times=at,
        marks=marks,
        count=count,
        bad=bad,
        last=values[-1] if values else None,
        last_step=last_step,
        low=None if low is None else values[chosen[low]],
        high=None if high is None else values[chosen[high]],
        low_step=None if low is None else int(steps[chosen[low]]),
        high_step=None if high is None else int(steps[chosen[high]]),
    )


def points_per_series(names: int) -> int:
    """Return the largest number of points per series."""
    return max(20, min(MAX_POINTS, _MAX_TOTAL_POINTS // max(names, 1)) // 2 * 2)


def downsample(values: Sequence[float], points: int) -> list[int]:
    """Return the indices of the points to keep: the first, the last, and minimum and maximum of each interval."""
    count = len(values)
    if count <= points:
        return list(range(count))
    num_intervals = points // 2 - 1
    chosen = {0, count - 1}
    for interval in range(num_intervals):
        begin, end = interval * count // num_intervals, (interval + 1) * count // num_intervals
        part = array("d", values[begin:end])
        chosen |= {begin + part.index(min(part)), begin + part.index(max(part))}
    return sorted(chosen)


def _non_finite_marks(
    steps: Sequence[float], times: Sequence[float], values: Sequence[float], started_at: float, moment: StepTime
) -> list[NonFiniteMark]:
    indices = [index for index, value in enumerate(values) if not math.isfinite(value)]
    if len(indices) > MAX_MARKS:
        indices = [indices[mark * (len(indices) - 1) // (MAX_MARKS - 1)] for mark in range(MAX_MARKS)]
    at, tokens = _times_and_tokens([steps[i] for i in indices], [times[i] for i in indices], started_at, moment)
    return [
        NonFiniteMark(
            step=int(steps[index]),
            what=_non_finite_name(values[index]),
            tokens=tokens[number] if tokens else None,
            at=at[number] if at else None,
        )
        for number, index in enumerate(indices)
    ]


def _non_finite_name(value: float) -> Literal["nan", "inf", "-inf"]:
    if math.isnan(value):
        return "nan"
    return "inf" if value > 0 else "-inf"


def _times_and_tokens(
    steps: Sequence[float], times: Sequence[float], started_at: float, moment: StepTime
) -> tuple[list[float], list[float]]:
    """Return seconds since the start and tokens at each step; an empty list if any is unknown."""
    at, tokens = [], []
    for step, time in zip(steps, times, strict=True):
        try:
            when, many = moment(step)
        except LookupError:
            when, many = math.nan, None
        at.append((time if math.isfinite(time) else when) - started_at)
        tokens.append(math.nan if many is None else many)
    return _if_all_finite(at), _if_all_finite(tokens)


def _if_all_finite(values: list[float]) -> list[float]:
    return values if all(map(math.isfinite, values)) else []
