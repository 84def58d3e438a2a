"""Define charts before drawing, for SVG on the page and PNG files, and the colors and patterns of time categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dtrain.report.page.scales import AxisKind

Axis = Literal["steps", "tokens", "time"]
"""Horizontal axis of a series. ``time`` is seconds since the start of the run."""

AXES: Mapping[Axis, AxisKind] = {"steps": "number", "tokens": "number", "time": "seconds"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """Line of a chart: ``values[i]`` at ``over[axis][i]``, in order of steps. ``over`` lacks an axis without numbers.

    A non-finite value stays in ``values`` and is drawn as a mark at the edge.
    """

    name: str
    over: Mapping[Axis, Sequence[float]]
    values: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkerLine:
    """Vertical line of a chart at an event."""

    at: Mapping[Axis, float]
    text: str
    bad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Line chart over steps, tokens or time; ``empty`` is the text without lines."""

    key: str
    title: str
    lines: tuple[ChartLine, ...]
    empty: str
    kind: AxisKind = "number"
    note: str = ""
    rules: tuple[MarkerLine, ...] = ()
    # if True, the vertical axis starts at 0
    zero: bool = False
    # if True, offer a smoothed line
    smooth: bool = False
    # if True, draw points without a line
    dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeColumn:
    """Slice of wall time with seconds by category; the sum is at most the length."""

    start: float
    end: float
    causes: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeChart:
    """Chart of wall time by category, over time."""

    key: str
    title: str
    columns: tuple[TimeColumn, ...]
    empty: str
    note: str = ""
    rules: tuple[MarkerLine, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """Chart with a stacked bar of seconds by category for each row."""

    key: str
    title: str
    rows: tuple[tuple[str, Mapping[str, float]], ...]
    empty: str
    note: str = ""


Chart = LineChart | TimeChart | BarChart


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseStyle:
    """Label, colors and pattern of a time category."""

    name: str
    label: str
    light: str
    dark: str
    # SVG path in a square of size 8; "" for a plain area
    pattern: str = field(default="")
    # similar hatch of matplotlib
    hatch: str = field(default="")


# Colors of Okabe and Ito (2008), lighter or darker for contrast in a theme, and greys for categories that are neither training
# nor a problem.
CAUSE_STYLES: tuple[CauseStyle, ...] = (
    CauseStyle(name="compute", label="compute", light="#0072b2", dark="#3d9fdc"),
    CauseStyle(name="communication", label="communication", light="#56b4e9", dark="#8fd0f5", pattern="M2 2h2v2h-2z",
               hatch="..."),
    CauseStyle(name="data", label="waiting for data", light="#e69f00", dark="#e69f00",
               pattern="M-2 10L10 -2M-2 2L2 -2M6 10L10 6", hatch="///"),
    CauseStyle(name="stall", label="stall", light="#4d5560", dark="#aab2bd",
               pattern="M-2 -2L10 10M6 -2L10 2M-2 6L2 10", hatch="\\\\\\"),
    CauseStyle(name="checkpoint", label="checkpoint", light="#009e73", dark="#2bc69a", pattern="M2 0V8M6 0V8", hatch="|||"),
    CauseStyle(name="evaluation", label="evaluation", light="#cc79a7", dark="#d98fba", pattern="M0 2H8M0 6H8", hatch="---"),
    CauseStyle(name="compile", label="compile", light="#f0e442", dark="#f0e442", pattern="M0 4H8M4 0V8", hatch="+++"),
    CauseStyle(name="restart", label="restart and lost work", light="#d55e00", dark="#f0793a",
               pattern="M-2 10L10 -2M-2 -2L10 10", hatch="xxx"),
    CauseStyle(name="setup", label="set-up", light="#a7b4c2", dark="#74818f", pattern="M1 1h1v1h-1zM5 5h1v1h-1z", hatch=".."),
    CauseStyle(name="other", label="other", light="#d9dde2", dark="#4a5159"),
)  # fmt: skip
"""Order of the stack, ``compute`` at the bottom."""

_NAMES = {cause.name for cause in CAUSE_STYLES}


def known_causes(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the positive seconds of known categories, in order. Unknown categories of newer versions count as ``other``."""
    known = {cause.name: max(0.0, seconds.get(cause.name, 0.0)) for cause in CAUSE_STYLES}
    known["other"] += sum(max(0.0, number) for name, number in seconds.items() if name not in _NAMES)
    return {name: number for name, number in known.items() if number > 0}


def svg_patterns() -> str:
    """Return the SVG fill patterns of all categories. The style sheet of the page sets the colors."""
    fills = []
    for cause in CAUSE_STYLES:
        strokes = f'<path class="hatch" d="{cause.pattern}"/>' if cause.pattern else ""
        fills.append(
            f'<pattern id="fill-{cause.name}" width="8" height="8" patternUnits="userSpaceOnUse">'
            f'<rect width="8" height="8" class="fill-{cause.name}"/>{strokes}</pattern>'
        )
    return f'<svg class="patterns" aria-hidden="true" focusable="false"><defs>{"".join(fills)}</defs></svg>'


def cause_css() -> str:
    """Return the CSS rules for the colors of the categories, light and dark."""
    light = "".join(f".fill-{cause.name}{{fill:{cause.light}}}" for cause in CAUSE_STYLES)
    dark = "".join(f".fill-{cause.name}{{fill:{cause.dark}}}" for cause in CAUSE_STYLES)
    return f"{light}@media (prefers-color-scheme:dark){{{dark}}}@media print{{{light}}}"
