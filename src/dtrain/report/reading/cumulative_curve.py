"""What a rank had spent and done by any moment of an attempt: a line between each two lines of its ledger."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

from dtrain.spans import TIME_CATEGORIES, TimeCategory

SAMPLES, TOKENS = 0, 1
FIRST_CAUSE = 2
WIDTH = FIRST_CAUSE + len(TIME_CATEGORIES)
COLUMN: dict[str, int] = {cause: FIRST_CAUSE + at for at, cause in enumerate(TIME_CATEGORIES)}

Totals = Sequence[float]
"""Samples, tokens, and seconds by cause, in the order of ``CAUSES``: so many until a moment, or between two."""


class CumulativeCurve:
    """Moments, the steps done by then, and the totals. ``at`` and ``step`` never go back."""

    __slots__ = ("at", "rows", "step")

    def __init__(self) -> None:
        self.at, self.step, self.rows = array("d"), array("d"), array("d")

    def add(self, at: float, step: float, totals: Totals) -> None:
        """The next point."""
        self.at.append(at)
        self.step.append(step)
        self.rows.extend(totals)

    def point(self, index: int) -> Totals:
        """Totals at a point, by its number; -1 for the last."""
        index %= len(self.at)
        return self.rows[index * WIDTH : (index + 1) * WIDTH]

    def totals_at(self, moment: float) -> Totals:
        """Totals until a moment; before the first point as there, after the last as there."""
        index, part = self._locate(self.at, moment)
        return self._interpolate(index, part)

    def step_at(self, moment: float) -> float:
        """Steps until a moment, with a fraction."""
        index, part = self._locate(self.at, moment)
        before = self.step[index]
        return before + part * (self.step[index + 1] - before) if part else before

    def time_of_step(self, step: float) -> float:
        """When a step was done."""
        index, part = self._locate(self.step, step)
        before = self.at[index]
        return before + part * (self.at[index + 1] - before) if part else before

    def totals_at_step(self, step: float) -> Totals:
        """Totals until a step was done."""
        index, part = self._locate(self.step, step)
        return self._interpolate(index, part)

    def _locate(self, found: Sequence[float], value: float) -> tuple[int, float]:
        """The point before, and how far from it to the next: of several points with one value, the first for steps."""
        find = bisect_left if found is self.step else bisect_right
        after = find(found, value)
        if after == 0:
            return 0, 0.0
        if after == len(found):
            return after - 1, 0.0
        low, high = found[after - 1], found[after]
        return after - 1, (value - low) / (high - low) if high > low else 1.0

    def _interpolate(self, index: int, part: float) -> Totals:
        row = self.point(index)
        if not part:
            return row
        return [low + part * (high - low) for low, high in zip(row, self.point(index + 1), strict=True)]

    def totals_between(self, edges: Sequence[float]) -> list[list[float]]:
        """Totals between each two neighbouring moments of ``edges``."""
        known = [self.totals_at(edge) for edge in edges]
        return [subtract(high, low) for low, high in pairwise(known)]


def subtract(after: Totals, before: Totals) -> list[float]:
    """What came between."""
    return [high - low for high, low in zip(after, before, strict=True)]


def mean_totals(several: Sequence[Totals]) -> list[float]:
    """The mean of totals, of at least one."""
    return [sum(column) / len(several) for column in zip(*several, strict=True)]


def seconds_by_cause(totals: Totals) -> dict[str, float]:
    """Seconds by cause, of those that have any."""
    return {cause: seconds for cause, seconds in zip(TIME_CATEGORIES, totals[FIRST_CAUSE:], strict=True) if seconds > 0}


def cause_seconds(totals: Totals, cause: TimeCategory) -> float:
    """Seconds of one cause."""
    return totals[COLUMN[cause]]
