"""What the loop logged: records into columns, without the steps that were done again."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence

from dtrain.report.reading.lines import Row
from dtrain.runs import STEP, TIME, goes_back, step_of_record

_NAMES, _NAME = 2000, 200  # metrics, and characters of one
_SHAPES = 500
_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # as the JSONL sink writes them


class Block:
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

    def cut(self, step: float) -> int:
        """Forget the records after a step. Returns how many those are."""
        steps = self.column(STEP)
        keep = bisect_right(steps, step)
        del self.rows[keep * self.width :]
        del self.order[keep:]
        return len(steps) - keep


class Metrics:
    """The records of a file of metrics, or of several parts of it, oldest first.

    A resumed run goes back, and does some steps again: what it logged of them before no longer counts. That it went back is
    seen by a metric whose step is less than its last; where to, ``resumes`` may say more exactly than the next record does.

    Args:
        resumes: steps that attempts began with.

    Attributes:
        count: records.
        malformed: objects that are no record.
        texts: how many values are no numbers, by name.
        went_back: how often the steps went back.
        again: how many records that cost.
        ends: where it was before: moment and step of the last record, of those that have a moment.
        crowded: whether there were more names than are kept.
    """

    def __init__(self, resumes: Sequence[float] = ()) -> None:
        self.count = 0
        self.malformed = 0
        self.texts: dict[str, int] = {}
        self.went_back = 0
        self.again = 0
        self.ends: list[tuple[float, float]] = []
        self.crowded = False
        self._resumes = sorted(resumes)
        self._top = -1.0
        self._blocks: dict[tuple[str, ...], Block] = {}
        self._names: set[str] = {STEP, TIME}

    def add(self, rows: list[Row]) -> None:
        """Take further records."""
        blocks, top = self._blocks, self._top
        for row in rows:
            names = tuple(row)
            step = step_of_record(row)
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
        self._top = top

    def _goes_back(self, names: tuple[str, ...], step: int) -> bool:
        if not goes_back(step, names, ((block.names, block.last_step()) for block in self._blocks.values())):
            return False
        at = bisect_right(self._resumes, step - 1)
        to = self._resumes[at - 1] if at else step - 1
        newest = max((block for block in self._blocks.values() if block.order), key=lambda block: block.order[-1])
        if TIME in newest.names:
            self.ends.append((newest.column(TIME)[-1], newest.last_step()))
        self.went_back += 1
        self.again += sum(block.cut(to) for block in self._blocks.values())
        return True

    def _add_slowly(self, row: Row) -> None:
        """A record with other names than those before, or with something in it that is no number."""
        plain: dict[str, float] = {}
        for name, value in row.items():
            kept = name[:_NAME]
            number = number_of(value)
            if number is None:
                if len(self.texts) < _NAMES:
                    self.texts[kept] = self.texts.get(kept, 0) + 1
            elif kept in self._names or len(self._names) < _NAMES:
                self._names.add(kept)
                plain[kept] = number
            else:
                self.crowded = True
        shapes = [tuple(plain)]
        if shapes[0] not in self._blocks and len(self._blocks) >= _SHAPES:  # names that differ all the time: each for itself
            timed = (STEP, TIME) if TIME in plain else (STEP,)
            shapes = [(*timed, name) for name in plain if name not in timed]
        for shape in shapes:
            block = self._blocks.setdefault(shape, Block(shape))
            block.rows.extend([plain[name] for name in shape])
            block.order.append(self.count)

    def columns(self) -> dict[str, tuple[Sequence[float], Sequence[float], Sequence[float]]]:
        """Steps, moments (NaN where none was written) and values by name, in order of steps; of one step, the last record."""
        of: dict[str, list[Block]] = {}
        for block in self._blocks.values():
            for name in block.names:
                if name not in (STEP, TIME) and block.rows:
                    of.setdefault(name, []).append(block)
        orders: dict[tuple[int, ...], _Joined] = {}
        found = {}
        for name, blocks in of.items():
            key = tuple(map(id, blocks))
            joined = orders.get(key) or orders.setdefault(key, _Joined(blocks))
            found[name] = (joined.steps, joined.times, joined.of(name))
        return found


def number_of(value: object) -> float | None:
    """A value as a number: also one that is not finite, as the JSONL sink writes it; None for what is none."""
    if isinstance(value, str):
        return _NUMBERS.get(value)
    if not isinstance(value, int | float):
        return None
    if isinstance(value, float) or abs(value) < 1e308:
        return float(value)
    return math.inf if value > 0 else -math.inf


class _Joined:
    """Blocks as one, in order of steps."""

    def __init__(self, blocks: list[Block]) -> None:
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
                self._kept = _in_order(steps, order)
                break
            last = step
        self.steps: Sequence[float] = self._picked(steps)
        self.times: Sequence[float] = self._picked(times)

    def of(self, name: str) -> Sequence[float]:
        """The values of a name, at ``steps``."""
        values = array("d")
        for block in self._blocks:
            values.extend(block.column(name))
        return self._picked(values)

    def _picked(self, values: array[float]) -> Sequence[float]:
        return values if self._kept is None else [values[index] for index in self._kept]


def _in_order(steps: Sequence[float], order: Sequence[int]) -> list[int]:
    """Which records count, in order of steps: of those of one step, the last one written."""
    last: dict[float, int] = {}
    for index, step in enumerate(steps):
        other = last.get(step)
        if other is None or order[other] < order[index]:
            last[step] = index
    return [last[step] for step in sorted(last)]
