"""Interpolate the cumulative time and progress of a rank at any moment of an attempt, linear between ledger lines."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

from dtrain.spans import TIME_CATEGORIES, TimeCategory

SAMPLES, TOKENS = 0, 1
FIRST_CAUSE = 2
WIDTH = FIRST_CAUSE + len(TIME_CATEGORIES)
COLUMN: dict[str, int] = {cause: FIRST_CAUSE + index for index, cause in enumerate(TIME_CATEGORIES)}

Totals = Sequence[float]
"""Cumulative totals: samples, tokens, and seconds by category in the order of ``TIME_CATEGORIES``."""


class CumulativeCurve:
    """Curve of cumulative totals: times, completed steps and totals. ``at`` and ``step`` never decrease."""

    __slots__ = ("at", "rows", "step")

    def __init__(self) -> None:
        self.at, self.step, self.rows = array("d"), array("d"), array("d")

    def add(self, at: float, step: float, totals: Totals) -> None:
        """Append a point."""
        self.at.append(at)
        self.step.append(step)
        self.rows.extend(totals)

    def point(self, index: int) -> Totals:
        """Return the totals at a point by index; -1 is the last point."""
        index %= len(self.at)
        return self.rows[index * WIDTH : (index + 1) * WIDTH]

    def totals_at(self, moment: float) -> Totals:
        """Return the totals at a moment, constant before the first and after the last point."""
        index, part = self._locate(self.at, moment)
        return self._interpolate(index, part)

    def step_at(self, moment: float) -> float:
        """Return the number of completed steps at a moment, with a fraction."""
        index, part = self._locate(self.at, moment)
        before = self.step[index]
        return before + part * (self.step[index + 1] - before) if part else before

    def time_of_step(self, step: float) -> float:
        """Return the time at which a step was completed."""
        index, part = self._locate(self.step, step)
        before = self.at[index]
        return before + part * (self.at[index + 1] - before) if part else before

    def totals_at_step(self, step: float) -> Totals:
        """Return the totals at the completion of a step."""
        index, part = self._locate(self.step, step)
        return self._interpolate(index, part)

    def _locate(self, values: Sequence[float], value: float) -> tuple[int, float]:
        """Return the point before a value and the fraction to the next point. Among equal steps, the first point counts."""
        find = bisect_left if values is self.step else bisect_right
        after = find(values, value)
        if after == 0:
            return 0, 0.0
        if after == len(values):
            return after - 1, 0.0
        low, high = values[after - 1], values[after]
        return after - 1, (value - low) / (high - low) if high > low else 1.0

    def _interpolate(self, index: int, part: float) -> Totals:
        row = self.point(index)
        if not part:
            return row
        return [low + part * (high - low) for low, high in zip(row, self.point(index + 1), strict=True)]

    def totals_between(self, edges: Sequence[float]) -> list[list[float]]:
        """Return the totals between neighboring moments of ``edges``."""
        known = [self.totals_at(edge) for edge in edges]
        return [subtract(high, low) for low, high in pairwise(known)]


def subtract(after: Totals, before: Totals) -> list[float]:
    """Return the difference of two totals."""
    return [high - low for high, low in zip(after, before, strict=True)]


def mean_totals(several: Sequence[Totals]) -> list[float]:
    """Return the mean of at least one totals."""
    return [sum(column) / len(several) for column in zip(*several, strict=True)]


def seconds_by_cause(totals: Totals) -> dict[str, float]:
    """Return the positive seconds by category."""
    return {cause: seconds for cause, seconds in zip(TIME_CATEGORIES, totals[FIRST_CAUSE:], strict=True) if seconds > 0}


def cause_seconds(totals: Totals, cause: TimeCategory) -> float:
    """Return the seconds of a category."""
    return totals[COLUMN[cause]]
