"""Read the ledger of one rank into cumulative totals by attempt, linear between the lines of the ledger."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from dtrain.report.model import Column
from dtrain.run.run_files import Row
from dtrain.spans import OTHER, TIME_CATEGORIES, category_of

# Columns of a point: time, completed steps, samples, tokens, and seconds of each category.
AT, STEP, SAMPLES, TOKENS, CAUSES = 0, 1, 2, 3, 4
CAUSE_COLUMN: dict[str, int] = {cause: CAUSES + index for index, cause in enumerate(TIME_CATEGORIES)}
WIDTH = CAUSES + len(TIME_CATEGORIES)

# largest count or time; larger values are damage
_MAX_VALUE = 1e15
# largest difference between the distance of two lines and their recorded seconds without a gap
_GAP_S = 1.0
# per rank and attempt
_MAX_EVENTS = 20_000
_MAX_GAUGES = 50
_MAX_NAME_LENGTH = 200  # characters
_OTHER_COLUMN = CAUSE_COLUMN[category_of(OTHER)]


class AttemptLedger:
    """Ledger of a rank in one attempt.

    Attributes:
        number: number of the attempt.
        opened: line ``open``; empty if lost.
        opened_at: time of ``opened``, or the start of the first line.
        open_count: number of lines ``open``; several mean several processes.
        closed: line ``close``; None if missing.
        spans: count, seconds and column by span.
        gauges: times and values by gauge, alternating.
        events: events in order of writing.
        dropped_events: number of events beyond the limit.
        resumed: True if the ledger records the resumed step.
        clock_back_s: seconds by which the clock was put back.
        last_line_at: time of the last line of a killed process; else None.
        unknown_causes: categories unknown to this version.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.opened: Row = {}
        self.opened_at = math.nan
        self.open_count = 0
        self.closed: Row | None = None
        self.spans: dict[str, list[Any]] = {}
        self.gauges: dict[str, array[float]] = {}
        self.events: list[Row] = []
        self.dropped_events = 0
        self.resumed = False
        self.clock_back_s = 0.0
        self.last_line_at: float | None = None
        self.unknown_causes: set[str] = set()
        # points of the curve, row by row; times and steps never decrease
        self._rows = array("d")
        self._last = [0.0] * WIDTH
        self._counted = False

    @property
    def points(self) -> Column:
        """Points of the curve: one row of ``WIDTH`` columns for each."""
        return np.array(self._rows).reshape(-1, WIDTH)

    @property
    def totals(self) -> Column:
        """Totals at the end."""
        return np.array(self._rows[-WIDTH:])

    @property
    def has_lines(self) -> bool:
        """True if any line was read."""
        return len(self._rows) > 0

    @property
    def began_at(self) -> float:
        """Start of the process."""
        return self._rows[AT]

    @property
    def ended_at(self) -> float:
        """Time of the last line."""
        return self._rows[AT - WIDTH]

    @property
    def first_step(self) -> int:
        """Number of completed steps at the start."""
        return int(self._rows[STEP])

    @property
    def last_step(self) -> int:
        """Number of completed steps at the end."""
        return int(self._rows[STEP - WIDTH])

    @property
    def host(self) -> str:
        """Host of the rank; empty if unknown."""
        return str(self.opened.get("host", ""))[:_MAX_NAME_LENGTH]

    def totals_at(self, moments: Sequence[float] | Column) -> Column:
        """Return a row of totals for each moment, constant before the first and after the last point."""
        points = self.points
        return np.stack([np.interp(moments, points[:, AT], column) for column in points.T], axis=1)

    def at_steps(self, steps: Sequence[float] | Column, column: int = AT) -> Column:
        """Return a column, such as the time, at the completion of steps. Among points with equal steps, the first counts."""
        points = self.points[::-1]
        return np.asarray(np.interp(-np.asarray(steps, dtype=float), -points[:, STEP], points[:, column]))

    def shift(self, by: float) -> None:
        """Shift all times."""
        self.opened_at += by
        for times in (self._rows, *self.gauges.values()):
            stride = WIDTH if times is self._rows else 2
            times[::stride] = array("d", [at + by for at in times[::stride]])
        for event in self.events:
            event["at"] += by

    def extend_to(self, at: float, step: float) -> None:
        """Extend the curve to a later time and step. The time without lines counts as other."""
        if at > self.ended_at:
            self.last_line_at = self.ended_at
            self._last[_OTHER_COLUMN] += at - self.ended_at
            self._add_point(at, max(step, self.last_step))

    def _add_point(self, at: float, step: float) -> None:
        self._last[AT], self._last[STEP] = at, step
        self._rows.extend(self._last)

    def open(self, row: Row) -> None:
        """Add a line of kind ``open``."""
        at, setup, step = _to_number(row["at"]), _to_number(row.get("setup_s", 0.0)), _to_number(row.get("step", 0))
        # A rank that takes the place of a dead one goes on with its attempt.
        self.open_count += not (self.has_lines and row.get("joins") is True)
        # A second process has the same number, or the line is out of order.
        if self.has_lines:
            return
        self.opened, self.opened_at = row, at
        self._add_point(at - setup, step)
        self._last[CAUSE_COLUMN["setup"]] += setup
        self._add_point(at, step)

    def sum(self, row: Row) -> None:
        """Add a line of kind ``sum``: the totals since the last line."""
        at, seconds, step, spans = row["at"], row["seconds"], row["step"], row["spans"]
        samples, tokens = row.get("samples", 0), row.get("tokens", 0)
        used = sum([each for _, each in spans.values()])
        # NaN fails, too.
        if not all(0 <= number < _MAX_VALUE for number in (at, seconds, step, used, samples, tokens)):
            raise ValueError(row)
        last = self._last
        # The line ``open`` is lost.
        if not self.has_lines:
            self.opened_at = at - seconds
            self._add_point(at - seconds, 0.0)
        before, done = last[AT], last[STEP]
        at += self.clock_back_s
        if at < before:
            self.clock_back_s += before + seconds - at
            at = before + seconds
        elif at - before - seconds > _GAP_S:
            self._add_point(at - seconds, done)
        for name, (count, spent) in spans.items():
            span = self.spans.get(name) or self._add_span(name, row.get("causes"))
            span[0] += count
            span[1] += spent
            last[span[2]] += spent
        last[_OTHER_COLUMN] += max(0.0, seconds - used)
        last[SAMPLES], last[TOKENS] = samples, tokens
        if step > 0 and not self._counted:
            self._backfill_start(step, spans["step"][0] if "step" in spans else 0)
        self._add_point(at, max(step, done))
        for name, value in (row.get("gauges") or {}).items():
            if name in self.gauges or len(self.gauges) < _MAX_GAUGES:
                number = value if isinstance(value, int | float) and abs(value) < _MAX_VALUE else math.nan
                self.gauges.setdefault(name, array("d")).extend((at, number))

    def _backfill_start(self, step: float, counted: float) -> None:
        """Fill in the totals before the first line with a step.

        ``open_run`` precedes loading the checkpoint, so the line ``open`` has step 0, and the first line of totals after a
        resume has a step but no counted steps. A checkpoint loaded without dtrain leaves no event; then the counted steps give
        the first step.
        """
        self._counted = True
        if not self.resumed and (not self.opened or (self.first_step == 0 and counted < step)):
            self._start_from(max(0.0, step - counted))
        for start in range(0, len(self._rows), WIDTH):
            share = min(1.0, self._rows[start + STEP] / step)
            self._rows[start + SAMPLES], self._rows[start + TOKENS] = self._last[SAMPLES] * share, self._last[TOKENS] * share

    def _start_from(self, step: float) -> None:
        for index in range(STEP, len(self._rows), WIDTH):
            self._rows[index] = max(self._rows[index], step)
        self._last[STEP] = max(self._last[STEP], step)

    def _add_span(self, name: str, causes: object) -> list[Any]:
        cause: str = category_of(name)
        if isinstance(causes, dict) and name in causes:
            cause = str(causes[name])
            if cause not in CAUSE_COLUMN:
                self.unknown_causes.add(cause[:_MAX_NAME_LENGTH])
                cause = OTHER
        span = self.spans[name] = [0, 0.0, CAUSE_COLUMN[cause]]
        return span

    def event(self, row: Row) -> None:
        """Add a line of kind ``event``."""
        if not isinstance(row["name"], str):
            raise TypeError("name")
        at = _to_number(row["at"]) + self.clock_back_s
        if row["name"] == "resumed" and self.has_lines and not self.spans.get("step", (0,))[0]:
            self._start_from(_to_number(row["step"]))
            self.resumed = True
        if len(self.events) < _MAX_EVENTS:
            self.events.append(row | {"at": at})
        else:
            self.dropped_events += 1

    def close(self, row: Row) -> None:
        """Add a line of kind ``close``."""
        at = _to_number(row["at"]) + self.clock_back_s
        if not isinstance(row["reason"], str):
            raise TypeError("reason")
        self.closed = row
        if self.has_lines and at > self.ended_at:
            self._add_point(at, self._last[STEP])


class RankLedger:
    """Ledger of a rank over all attempts.

    Attributes:
        rank: number of the rank.
        attempts: attempts by number, in file order.
        malformed: number of objects that are not ledger lines.
        unknown_kinds: number of lines by unknown kind.
        interleaved: attempts with lines after a later attempt began, written by several runs in one folder.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.attempts: dict[int, AttemptLedger] = {}
        self.malformed = 0
        self.unknown_kinds: dict[str, int] = {}
        self.interleaved: set[int] = set()
        self._current = AttemptLedger(0)

    def add(self, rows: list[Row]) -> None:
        """Add lines."""
        for row in rows:
            try:
                if row["attempt"] != self._current.number:
                    self._switch_attempt(row["attempt"])
                kind = row["kind"]
                if kind in ("open", "sum", "event", "close"):
                    getattr(self._current, kind)(row)
                elif len(self.unknown_kinds) < _MAX_GAUGES:
                    name = str(kind)[:_MAX_NAME_LENGTH]
                    self.unknown_kinds[name] = self.unknown_kinds.get(name, 0) + 1
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                self.malformed += 1

    def _switch_attempt(self, attempt: Any) -> None:
        if type(attempt) is not int or not 0 < attempt < 10**9:
            raise ValueError("attempt")
        if attempt < self._current.number:
            self.interleaved.add(attempt)
        self._current = self.attempts.setdefault(attempt, AttemptLedger(attempt))


def causes_of(totals: Column) -> dict[str, float]:
    """Return the positive seconds of totals by category."""
    return {cause: seconds for cause, seconds in zip(TIME_CATEGORIES, totals[CAUSES:].tolist(), strict=True) if seconds > 0}


def _to_number(value: Any) -> float:
    """Convert a value of a line to a number.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is negative, not finite, or too large.
    """
    if not 0 <= value < _MAX_VALUE:
        raise ValueError(value)
    return float(value)
