"""What a page draws, before it is drawn: the same charts become SVG for the page and pictures for ``--png``.

How causes of time look: the same colour and pattern everywhere, told apart without seeing colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dtrain.report.page.scales import AxisKind

Axis = Literal["steps", "tokens", "time"]
"""What a series is drawn over. ``time`` is seconds since the run began."""

AXES: Mapping[Axis, AxisKind] = {"steps": "number", "tokens": "number", "time": "seconds"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """A series: ``values[i]`` at ``over[axis][i]``, in order of steps. An axis without numbers is left out of ``over``.

    A value that is no finite number stays in ``values`` as what it is, and is drawn as a mark at the edge.
    """

    name: str
    over: Mapping[Axis, Sequence[float]]
    values: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkerLine:
    """A vertical line across a chart where something happened."""

    at: Mapping[Axis, float]
    text: str
    bad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Lines over steps, tokens or time; ``empty`` is what is said if there are none."""

    key: str
    title: str
    lines: tuple[ChartLine, ...]
    empty: str
    kind: AxisKind = "number"
    note: str = ""
    rules: tuple[MarkerLine, ...] = ()
    zero: bool = False  # the axis begins at 0
    smooth: bool = False  # worth a smoothed line
    dots: bool = False  # single happenings, not joined


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeColumn:
    """A stretch of wall time and the seconds of each cause in it, which add up to at most its length."""

    start: float
    end: float
    causes: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeChart:
    """Shares of the wall time by cause, over the wall time."""

    key: str
    title: str
    columns: tuple[TimeColumn, ...]
    empty: str
    note: str = ""
    rules: tuple[MarkerLine, ...] = ()


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
class CauseStyle:
    """How a cause of time is shown everywhere."""

    name: str
    label: str
    light: str
    dark: str
    pattern: str = field(default="")  # an SVG path over a square of 8, "" for a plain area
    hatch: str = field(default="")  # what matplotlib calls about the same


# Colours of Okabe and Ito (2008), made lighter or darker where a theme asks for contrast, and greys for what is neither
# training nor a reason to worry.
CAUSE_STYLES: tuple[CauseStyle, ...] = (
    CauseStyle(name="compute", label="compute", light="#0072b2", dark="#3d9fdc"),
    CauseStyle(name="communication", label="communication", light="#56b4e9", dark="#8fd0f5", pattern="M2 2h2v2h-2z", hatch="..."),
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
"""In the order in which they are stacked, ``compute`` at the bottom."""

_NAMES = {cause.name for cause in CAUSE_STYLES}


def known_causes(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds of the causes above, in their order and without zeros; what a newer version may call otherwise is ``other``."""
    found = {cause.name: max(0.0, seconds.get(cause.name, 0.0)) for cause in CAUSE_STYLES}
    found["other"] += sum(max(0.0, number) for name, number in seconds.items() if name not in _NAMES)
    return {name: number for name, number in found.items() if number > 0}


def svg_patterns() -> str:
    """The fills of all causes, once for the page; colours come from its style sheet."""
    fills = []
    for cause in CAUSE_STYLES:
        strokes = f'<path class="hatch" d="{cause.pattern}"/>' if cause.pattern else ""
        fills.append(
            f'<pattern id="fill-{cause.name}" width="8" height="8" patternUnits="userSpaceOnUse">'
            f'<rect width="8" height="8" class="fill-{cause.name}"/>{strokes}</pattern>'
        )
    return f'<svg class="patterns" aria-hidden="true" focusable="false"><defs>{"".join(fills)}</defs></svg>'


def cause_css() -> str:
    """Style rules that give each cause its colour, light and dark."""
    light = "".join(f".fill-{cause.name}{{fill:{cause.light}}}" for cause in CAUSE_STYLES)
    dark = "".join(f".fill-{cause.name}{{fill:{cause.dark}}}" for cause in CAUSE_STYLES)
    return f"{light}@media (prefers-color-scheme:dark){{{dark}}}@media print{{{light}}}"
