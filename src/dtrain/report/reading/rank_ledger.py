"""Read the ledger of one rank and accumulate its lines by attempt."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

from dtrain.report.reading.cumulative_curve import COLUMN, WIDTH, CumulativeCurve
from dtrain.report.reading.jsonl_reader import Row
from dtrain.spans import OTHER, TIME_CATEGORIES, category_of

# largest count or time; larger values are damage
_MAX_VALUE = 1e15
# largest difference between the distance of two lines and their recorded seconds without a gap
_GAP_S = 1.0
# per rank and attempt
_MAX_EVENTS = 20_000
_MAX_GAUGES = 50
_MAX_NAME_LENGTH = 200  # characters
_NUMBER_TYPES = (int, float)
_OTHER_COLUMN = COLUMN[category_of(OTHER)]


class AttemptLedger:
    """Ledger of a rank in one attempt.

    Attributes:
        number: number of the attempt.
        opened: line ``open``; empty if lost.
        opened_at: time of ``opened``, or the start of the first line.
        closed: line ``close``; None if missing.
        curve: curve since the start of the process.
        cells: count, seconds and category by span.
        events: events in order of writing.
        dropped_events: number of events beyond the limit.
        resumed: True if the ledger records the resumed step.
        clock_back_s: seconds by which the clock was put back.
        last_line_at: time of the last line of a killed process; else None.
        open_count: number of lines ``open``; several mean several processes.
        unknown_causes: categories unknown to this version.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.opened: Row = {}
        self.opened_at = math.nan
        self.closed: Row | None = None
        self.curve = CumulativeCurve()
        self.cells: dict[str, list[Any]] = {}
        self.events: list[Row] = []
        self.dropped_events = 0
        self.resumed = False
        self.clock_back_s = 0.0
        self.last_line_at: float | None = None
        self.open_count = 0
        self.unknown_causes: set[str] = set()
        self._gauge_at = array("d")
        self._gauges: dict[str, array[float]] = {}
        # names of the gauges in the latest lines
        self._flat_names: tuple[str, ...] = ()
        self._flat_at, self._flat = array("d"), array("d")
        self._totals = [0.0] * WIDTH
        self._first_sum = True

    @property
    def ended_at(self) -> float:
        """Time of the last line."""
        return self.curve.at[-1]

    @property
    def first_step(self) -> int:
        """Number of completed steps at the start."""
        return int(self.curve.step[0])

    @property
    def last_step(self) -> int:
        """Number of completed steps at the end."""
        return int(self.curve.step[-1])

    @property
    def setup_s(self) -> float:
        """Seconds from process start to ``open_run``."""
        return self.opened_at - self.curve.at[0]

    def shift(self, by: float) -> None:
        """Shift all times."""
        self.opened_at += by
        self.curve.at = array("d", [at + by for at in self.curve.at])
        self._gauge_at = array("d", [at + by for at in self.gauge_at])
        for event in self.events:
            event["at"] += by

    def open(self, row: Row) -> None:
        """Add a line of kind ``open``."""
        at, setup, step = parse_number(row["at"]), parse_number(row.get("setup_s", 0.0)), parse_number(row.get("step", 0))
        self.open_count += 1
        # A second process has the same number, or the line is out of order.
        if self.curve.at:
            return
        self.opened, self.opened_at = row, at
        self.curve.add(at - setup, step, self._totals)
        self._totals[COLUMN["setup"]] += setup
        self.curve.add(at, step, self._totals)

    def sum(self, row: Row) -> None:
        """Add a line of kind ``sum``: the totals since the last line."""
        at, seconds, step, rows = row["at"], row["seconds"], row["step"], row["spans"]
        samples, tokens = row.get("samples", 0), row.get("tokens", 0)
        used = sum([each for _, each in rows.values()])
        # One comparison per number, false for NaN, and no call: a ledger may have a million lines.
        if not (0 <= at < _MAX_VALUE and 0 <= seconds < _MAX_VALUE and 0 <= step < _MAX_VALUE and 0 <= used < _MAX_VALUE
                and 0 <= samples < _MAX_VALUE and 0 <= tokens < _MAX_VALUE):  # fmt: skip
            raise ValueError(row)
        totals, curve = self._totals, self.curve
        # The line ``open`` is lost.
        if not curve.at:
            self.opened_at = at - seconds
            curve.add(at - seconds, 0.0, totals)
        before, done = curve.at[-1], curve.step[-1]
        at += self.clock_back_s
        if at < before:
            self.clock_back_s += before + seconds - at
            at = before + seconds
        elif at - before - seconds > _GAP_S:
            curve.add(at - seconds, done, totals)
        cells = self.cells
        for name, (count, spent) in rows.items():
            cell = cells.get(name) or self._cell(name, row.get("causes"))
            cell[0] += count
            cell[1] += spent
            totals[cell[2]] += spent
        if seconds > used:
            totals[_OTHER_COLUMN] += seconds - used
        totals[0], totals[1] = samples, tokens
        if self._first_sum and step > 0:
            self._backfill_start(step, rows["step"][0] if "step" in rows else 0)
        curve.add(at, step if step > done else done, totals)
        if gauges := row.get("gauges"):
            self._add_gauges(at, gauges)

    def _backfill_start(self, step: float, counted: float) -> None:
        """Fill in the totals before the first line with a step.

        ``open_run`` precedes loading the checkpoint, so the line ``open`` has step 0, and the first line of totals after a
        resume has a step but no counted steps. A checkpoint loaded without dtrain leaves no event; then the counted steps give
        the first step.
        """
        self._first_sum = False
        curve = self.curve
        if not self.resumed and (not self.opened or (curve.step[0] == 0 and counted < step)):
            self._start_from(max(0.0, step - counted))
        for index in range(len(curve.at)):
            share = min(1.0, curve.step[index] / step)
            for column in (0, 1):
                curve.rows[index * WIDTH + column] = self._totals[column] * share

    def _start_from(self, step: float) -> None:
        for index, known in enumerate(self.curve.step):
            self.curve.step[index] = max(known, step)

    def _cell(self, name: str, causes: object) -> list[Any]:
        cause: str = category_of(name)
        if isinstance(causes, dict) and name in causes:
            cause = str(causes[name])
            if cause not in TIME_CATEGORIES:
                self.unknown_causes.add(cause[:_MAX_NAME_LENGTH])
                cause = OTHER
        cell = self.cells[name] = [0, 0.0, COLUMN[cause]]
        return cell

    def _add_gauges(self, at: float, gauges: Mapping[str, Any]) -> None:
        # A value other than an object has no items, so nothing is added.
        values = gauges.values()
        before = len(self._flat)
        names = tuple(gauges)
        if names != self._flat_names:
            self.flush_gauges()
            self._flat_names, before = names, 0
        try:
            self._flat.extend(values)
        # A value is not a number.
        except (TypeError, OverflowError):
            del self._flat[before:]
            self._flat.extend(
                [value if type(value) in _NUMBER_TYPES and abs(value) < _MAX_VALUE else math.nan for value in values]
            )
        self._flat_at.append(at)

    def set_gauges(self, gauges: dict[str, array[float]]) -> None:
        """Replace the gauges."""
        self._gauges = gauges

    def flush_gauges(self) -> None:
        """Append the buffered gauges with equal names to the columns."""
        at, flat, names = self._flat_at, self._flat, self._flat_names
        for name in names[: _MAX_GAUGES - len(self._gauges)]:
            self._gauges.setdefault(name, array("d", [math.nan]) * len(self._gauge_at))
        for name, values in self._gauges.items():
            values.extend(flat[names.index(name) :: len(names)] if name in names else [math.nan] * len(at))
        self._gauge_at.extend(at)
        self._flat_at, self._flat = array("d"), array("d")

    @property
    def gauge_at(self) -> array[float]:
        """Times of the gauges."""
        self.flush_gauges()
        return self._gauge_at

    @property
    def gauges(self) -> dict[str, array[float]]:
        """Gauges by name at ``gauge_at``; NaN for a line without the gauge."""
        self.flush_gauges()
        return self._gauges

    def event(self, row: Row) -> None:
        """Add a line of kind ``event``."""
        if not isinstance(row["name"], str):
            raise TypeError("name")
        at = parse_number(row["at"]) + self.clock_back_s
        if row["name"] == "resumed" and self.curve.at and not self.cells.get("step", (0,))[0]:
            self._start_from(parse_number(row["step"]))
            self.resumed = True
        if len(self.events) < _MAX_EVENTS:
            self.events.append(row | {"at": at})
        else:
            self.dropped_events += 1

    def extend_to(self, at: float, step: float) -> None:
        """Extend the curve to a later time and step. The time without lines counts as other."""
        if at > self.ended_at:
            self.last_line_at = self.ended_at
            self._totals[_OTHER_COLUMN] += at - self.ended_at
            self.curve.add(at, max(step, self.curve.step[-1]), self._totals)

    def close(self, row: Row) -> None:
        """Add a line of kind ``close``."""
        at = parse_number(row["at"]) + self.clock_back_s
        if not isinstance(row["reason"], str):
            raise TypeError("reason")
        self.closed = row
        if self.curve.at and at > self.curve.at[-1]:
            self.curve.add(at, self.curve.step[-1], self._totals)


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
                if kind == "sum":
                    self._current.sum(row)
                elif kind in ("open", "event", "close"):
                    getattr(self._current, kind)(row)
                elif len(self.unknown_kinds) < _MAX_GAUGES:
                    self.unknown_kinds[str(kind)[:_MAX_NAME_LENGTH]] = (
                        self.unknown_kinds.get(str(kind)[:_MAX_NAME_LENGTH], 0) + 1
                    )
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                self.malformed += 1

    def _switch_attempt(self, attempt: Any) -> None:
        if type(attempt) is not int or not 0 < attempt < 10**9:
            raise ValueError("attempt")
        if attempt < self._current.number:
            self.interleaved.add(attempt)
        if attempt not in self.attempts:
            self.attempts[attempt] = AttemptLedger(attempt)
        self._current = self.attempts[attempt]


def parse_number(value: Any) -> float:
    """Convert a value of a line to a number.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is negative, not finite, or too large.
    """
    if not 0 <= value < _MAX_VALUE:
        raise ValueError(value)
    return float(value)
