"""What a page draws, before it is drawn: the same charts become SVG for the page and pictures for ``--png``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dtrain.report.page.scales import Kind

Axis = Literal["steps", "tokens", "time"]
"""What a series is drawn over. ``time`` is seconds since the run began."""

AXES: Mapping[Axis, Kind] = {"steps": "number", "tokens": "number", "time": "seconds"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A series: ``values[i]`` at ``over[axis][i]``, in order of steps. An axis without numbers is left out of ``over``.

    A value that is no finite number stays in ``values`` as what it is, and is drawn as a mark at the edge.
    """

    name: str
    over: Mapping[Axis, Sequence[float]]
    values: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A vertical line across a chart where something happened."""

    at: Mapping[Axis, float]
    text: str
    bad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Lines over steps, tokens or time; ``empty`` is what is said if there are none."""

    key: str
    title: str
    lines: tuple[Line, ...]
    empty: str
    kind: Kind = "number"
    note: str = ""
    rules: tuple[Rule, ...] = ()
    zero: bool = False  # the axis begins at 0
    smooth: bool = False  # worth a smoothed line
    dots: bool = False  # single happenings, not joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A stretch of wall time and the seconds of each cause in it, which add up to at most its length."""

    start: float
    end: float
    causes: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeChart:
    """Shares of the wall time by cause, over the wall time."""

    key: str
    title: str
    columns: tuple[Column, ...]
    empty: str
    note: str = ""
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """A stacked bar of seconds by cause for each row."""

    key: str
    title: str
    rows: tuple[tuple[str, Mapping[str, float]], ...]
    empty: str
    note: str = ""


Chart = LineChart | TimeChart | BarChart


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """How a cause of time is shown everywhere."""

    name: str
    label: str
    light: str
    dark: str
    pattern: str = field(default="")  # an SVG path over a square of 8, "" for a plain area
    hatch: str = field(default="")  # what matplotlib calls about the same
