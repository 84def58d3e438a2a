"""What the loop logged: records into columns, without the steps that were done again.

A series with a million points as one with a thousand, in which no spike is lost."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Literal

from dtrain.report.model import MetricSeries, NonFiniteMark
from dtrain.report.reading.jsonl_reader import Row
from dtrain.run_layout import STEP, TIME, is_rewind, step_from_record

_MAX_NAMES, _MAX_NAME_LENGTH = 2000, 200  # metrics, and characters of one
_MAX_BLOCKS = 500
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # as the JSONL sink writes them


class RecordBlock:
    """Records with the same names: numbers in a row, one after another."""

    __slots__ = ("names", "order", "rows", "width")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.width = len(names)
        self.rows = array("d")
        self.order = array("q")  # the how manieth record of all

    def column(self, name: str) -> array[float]:
        """The numbers of one name."""
        return self.rows[self.names.index(name) :: self.width]

    def last_step(self) -> float:
        """Of the last record; less than any step if there is none."""
        return self.rows[self.names.index(STEP) - self.width] if self.rows else -1.0

    def truncate_after(self, step: float) -> int:
        """Forget the records after a step. Returns how many those are."""
        steps = self.column(STEP)
        keep = bisect_right(steps, step)
        del self.rows[keep * self.width :]
        del self.order[keep:]
        return len(steps) - keep


class MetricTable:
    """The records of a file of metrics, or of several parts of it, oldest first.

    A resumed run goes back, and does some steps again: what it logged of them before no longer counts. That it went back is
    seen by a metric whose step is less than its last; where to, ``resumes`` may say more exactly than the next record does.

    Args:
        resumes: steps that attempts began with.

    Attributes:
        count: records.
        malformed: objects that are no record.
        non_numeric: how many values are no numbers, by name.
        went_back: how often the steps went back.
        repeated: how many records that cost.
        ends_before_resume: where it was before: moment and step of the last record, of those that have a moment.
        has_too_many_names: whether there were more names than are kept.
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
        """Take further records."""
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
        """A record with other names than those before, or with something in it that is no number."""
        plain: dict[str, float] = {}
        for name, value in row.items():
            kept = name[:_MAX_NAME_LENGTH]
            number = to_number(value)
            if number is None:
                if len(self.non_numeric) < _MAX_NAMES:
                    self.non_numeric[kept] = self.non_numeric.get(kept, 0) + 1
            elif kept in self._names or len(self._names) < _MAX_NAMES:
                self._names.add(kept)
                plain[kept] = number
            else:
                self.has_too_many_names = True
        shapes = [tuple(plain)]
        if (
            shapes[0] not in self._blocks and len(self._blocks) >= _MAX_BLOCKS
        ):  # names that differ all the time: each for itself
            timed = (STEP, TIME) if TIME in plain else (STEP,)
            shapes = [(*timed, name) for name in plain if name not in timed]
        for shape in shapes:
            block = self._blocks.setdefault(shape, RecordBlock(shape))
            block.rows.extend([plain[name] for name in shape])
            block.order.append(self.count)

    def columns(self) -> dict[str, tuple[Sequence[float], Sequence[float], Sequence[float]]]:
        """Steps, moments (NaN where none was written) and values by name, in order of steps; of one step, the last record."""
        of: dict[str, list[RecordBlock]] = {}
        for block in self._blocks.values():
            for name in block.names:
                if name not in (STEP, TIME) and block.rows:
                    of.setdefault(name, []).append(block)
        orders: dict[tuple[int, ...], _JoinedBlocks] = {}
        found = {}
        for name, blocks in of.items():
            key = tuple(map(id, blocks))
            joined = orders.get(key) or orders.setdefault(key, _JoinedBlocks(blocks))
            found[name] = (joined.steps, joined.times, joined.values_of(name))
        return found


def to_number(value: object) -> float | None:
    """A value as a number: also one that is not finite, as the JSONL sink writes it; None for what is none."""
    if isinstance(value, str):
        return _NON_FINITE.get(value)
    if not isinstance(value, int | float):
        return None
    if isinstance(value, float) or abs(value) < 1e308:
        return float(value)
    return math.inf if value > 0 else -math.inf


class _JoinedBlocks:
    """Blocks as one, in order of steps."""

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
        """The values of a name, at ``steps``."""
        values = array("d")
        for block in self._blocks:
            values.extend(block.column(name))
        return self._in_step_order(values)

    def _in_step_order(self, values: array[float]) -> Sequence[float]:
        return values if self._kept is None else [values[index] for index in self._kept]


def _last_record_per_step(steps: Sequence[float], order: Sequence[int]) -> list[int]:
    """Which records count, in order of steps: of those of one step, the last one written."""
    last: dict[float, int] = {}
    for index, step in enumerate(steps):
        other = last.get(step)
        if other is None or order[other] < order[index]:
            last[step] = index
    return [last[step] for step in sorted(last)]


MAX_POINTS = 1000
MAX_MARKS = 200
_MAX_TOTAL_POINTS = 150_000  # of all series together: a page that holds more takes long to open

StepTime = Callable[[float], tuple[float, float | None]]
"""When a step was done, by the ledgers, and how many tokens there had been; raises LookupError if nobody knows."""


def make_series(
    steps: Sequence[float],
    times: Sequence[float],
    values: Sequence[float],
    *,
    started_at: float,
    moment: StepTime,
    points: int = MAX_POINTS,
) -> MetricSeries:
    """The series of a metric, out of its columns.

    Args:
        steps: in order.
        times: seconds since 1970, NaN where not known.
        values: at the steps.
        started_at: where times are counted from.
        moment: for what the records do not say.
        points: at most so many are kept, even.
    """
    last_step, count = int(steps[-1]), len(values)
    marks: list[NonFiniteMark] = []
    bad = 0
    if not math.isfinite(sum(values)):  # in C; looking at each takes a second for ten million. Large ones may overflow too
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
    """How many points each of so many series may have."""
    return max(20, min(MAX_POINTS, _MAX_TOTAL_POINTS // max(names, 1)) // 2 * 2)


def downsample(values: Sequence[float], points: int) -> list[int]:
    """Which points to keep, by number: the first and the last, and of each stretch the least and the greatest value."""
    count = len(values)
    if count <= points:
        return list(range(count))
    stretches = points // 2 - 1
    chosen = {0, count - 1}
    for stretch in range(stretches):
        begin, end = stretch * count // stretches, (stretch + 1) * count // stretches
        part = array("d", values[begin:end])
        chosen |= {begin + part.index(min(part)), begin + part.index(max(part))}
    return sorted(chosen)


def _non_finite_marks(
    steps: Sequence[float], times: Sequence[float], values: Sequence[float], started_at: float, moment: StepTime
) -> list[NonFiniteMark]:
    found = [index for index, value in enumerate(values) if not math.isfinite(value)]
    if len(found) > MAX_MARKS:
        found = [found[at * (len(found) - 1) // (MAX_MARKS - 1)] for at in range(MAX_MARKS)]
    at, tokens = _times_and_tokens([steps[index] for index in found], [times[index] for index in found], started_at, moment)
    return [
        NonFiniteMark(
            step=int(steps[index]),
            what=_non_finite_name(values[index]),
            tokens=tokens[number] if tokens else None,
            at=at[number] if at else None,
        )
        for number, index in enumerate(found)
    ]


def _non_finite_name(value: float) -> Literal["nan", "inf", "-inf"]:
    if math.isnan(value):
        return "nan"
    return "inf" if value > 0 else "-inf"


def _times_and_tokens(
    steps: Sequence[float], times: Sequence[float], started_at: float, moment: StepTime
) -> tuple[list[float], list[float]]:
    """Seconds since the start, and tokens, at each step; an empty list for what is not known of all of them."""
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
