"""Draw charts as SVG that scales to any width without a script.

Positions in percent keep texts, marks and patterns at their size; only lines are stretched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from dtrain.report.page.charts import AXES, Axis, BarChart, ChartLine, LineChart, MarkerLine, TimeChart, known_causes
from dtrain.report.page.scales import AxisKind, format_axis_duration, format_value, tick_labels, ticks

# side of the square for lines; integers in the square are finer than pixels
VIEWBOX_SIZE = 10_000
# pixels of a bar and its gap
ROW_HEIGHT = 26
# percent; without an overlap, rounding to pixels would leave gaps between columns
COLUMN_OVERLAP = 0.05
# number of combinations of color and dash
LINE_STYLES = 8


def default_axis(chart: LineChart) -> Axis:
    """Return the first axis that all lines have."""
    return next((axis for axis in AXES if all(axis in line.over for line in chart.lines)), "steps")


def draw_line_chart(chart: LineChart, label: str) -> str:
    """Draw a chart with at least one line."""
    axis = default_axis(chart)
    low, high = _bounds(x for line in chart.lines for x in line.over[axis])
    bottom, top = value_range(chart)
    y_ticks = ticks(bottom, top, chart.kind)
    drawn = []
    for number, line in enumerate(chart.lines):
        path = svg_path(line.over[axis], line.values, (low, high), (bottom, top))
        if chart.dots or sum(map(math.isfinite, line.values)) == 1:
            path = _as_dots(path)
        dots = " dots" if chart.dots else ""
        drawn.append(f'<path class="line s{number % LINE_STYLES}{dots}" d="{path}"/>')
    kind = "lines dotted" if chart.dots else "lines"
    return _frame(
        label,
        _grid(y_ticks, tick_labels(y_ticks, chart.kind), bottom, top)
        + _x_axis(ticks(low, high, AXES[axis], 8), AXES[axis], low, high, axis)
        + f'<svg class="{kind}" viewBox="0 0 {VIEWBOX_SIZE} {VIEWBOX_SIZE}" preserveAspectRatio="none">{"".join(drawn)}</svg>'
        + _draw_markers(chart.rules, axis, low, high)
        + f'<g class="marks">{"".join(_draw_marks(line, axis, low, high) for line in chart.lines)}</g>',
    )


def value_range(chart: LineChart) -> tuple[float, float]:
    """Return the range of finite values with a margin, including 0 if the chart requires."""
    low, high = _bounds(v for line in chart.lines for v in line.values if math.isfinite(v))
    room = (high - low) * 0.05
    bottom = 0.0 if chart.zero and low >= 0 else low - room
    return (bottom, high + room) if high + room > bottom else (bottom, bottom + 1.0)


def _bounds(numbers: Iterable[float]) -> tuple[float, float]:
    values = list(numbers)
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if low == high:
        room = abs(low) * 0.5 or 0.5
        return low - room, high + room
    return low, high


def svg_path(xs: Sequence[float], ys: Sequence[float], across: tuple[float, float], up: tuple[float, float]) -> str:
    """Return the path through the points, interrupted at non-finite values and at repeated steps."""
    x_scale, y_scale = VIEWBOX_SIZE / (across[1] - across[0]), VIEWBOX_SIZE / (up[1] - up[0])
    parts, before = [], math.inf
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(y):
            parts.append(f"{'L' if before <= x else 'M'}{(x - across[0]) * x_scale:.0f} {(up[1] - y) * y_scale:.0f}")
        before = x if math.isfinite(y) else math.inf
    return "".join(parts)


def _as_dots(path: str) -> str:
    # A line of zero length with a round cap is a dot, which is not stretched.
    return "".join(f"M{point}h1" for point in path.replace("L", "M").split("M")[1:])


def _draw_marks(line: ChartLine, axis: Axis, low: float, high: float) -> str:
    """Draw triangles at the upper edge for +inf and at the lower edge for -inf, and crosses at the lower edge for NaN."""
    marks = []
    for x, number in zip(line.over[axis], line.values, strict=True):
        if not math.isfinite(number):
            sign, y, dy = ("\N{MULTIPLICATION X}", 100, -2) if math.isnan(number) else (
                ("\N{BLACK UP-POINTING TRIANGLE}", 0, 10) if number > 0 else ("\N{BLACK DOWN-POINTING TRIANGLE}", 100, -2)
            )  # fmt: skip
            marks.append(f'<text class="mark" x="{_percent(x, low, high)}" y="{y}%" dy="{dy}">{sign}</text>')
    return "".join(marks)


def draw_time_chart(chart: TimeChart, label: str) -> str:
    """Draw columns of wall time, stacked by category. The empty part of a column is time without a line in the ledger."""
    low, high = _bounds(edge for column in chart.columns for edge in (column.start, column.end))
    filled = []
    for column in chart.columns:
        below, width = 0.0, column.end - column.start
        at, end = ((edge - low) / (high - low) * 100 for edge in (column.start, column.end))
        for name, seconds in known_causes(column.causes).items():
            share = min(seconds / width if width > 0 else 0.0, 1 - below)
            if share > 0.0005:
                filled.append(
                    f'<rect x="{at:.3f}%" y="{(1 - below - share) * 100:.2f}%" '
                    f'width="{end - at + COLUMN_OVERLAP:.3f}%" height="{share * 100:.2f}%" fill="url(#fill-{name})"/>'
                )
            below += share
    shares = [0.0, 0.25, 0.5, 0.75, 1.0]
    return _frame(
        label,
        _grid(shares, tick_labels(shares, "percent"), 0.0, 1.0)
        + f'<g class="columns">{"".join(filled)}</g>'
        + _x_axis(ticks(low, high, "seconds", 8), "seconds", low, high, "time")
        + _draw_markers(chart.rules, "time", low, high),
    )


def draw_bar_chart(chart: BarChart, label: str) -> str:
    """Draw a bar for each row."""
    longest = max((sum(known_causes(seconds).values()) for _, seconds in chart.rows), default=0.0) or 1.0
    parts = []
    for number, (name, seconds) in enumerate(chart.rows):
        left = 0.0
        parts.append(f'<text class="row" x="0" dx="-8" y="{number * ROW_HEIGHT + ROW_HEIGHT // 2 + 3}">{escape(name)}</text>')
        for cause, spent in known_causes(seconds).items():
            title = f"<title>{escape(name)}: {cause} {format_axis_duration(spent)}</title>"
            parts.append(
                f'<rect x="{left / longest * 100:.3f}%" y="{number * ROW_HEIGHT + 2}" width="{spent / longest * 100:.3f}%" '
                f'height="{ROW_HEIGHT - 6}" fill="url(#fill-{cause})">{title}</rect>'
            )
            left += spent
    return _frame(label, "".join(parts) + _x_axis(ticks(0.0, longest, "seconds", 8), "seconds", 0.0, longest, ""),
                  height=len(chart.rows) * ROW_HEIGHT)  # fmt: skip


def describe_chart(chart: LineChart | TimeChart | BarChart) -> str:
    """Describe a chart in a sentence, for screen readers."""
    if isinstance(chart, LineChart):
        return f"{chart.title}. " + " ".join(_describe_line(line, chart.kind) for line in chart.lines[:LINE_STYLES])
    if isinstance(chart, TimeChart):
        total: dict[str, float] = {}
        for column in chart.columns:
            for name, seconds in known_causes(column.causes).items():
                total[name] = total.get(name, 0.0) + seconds
        return f"{chart.title}. {_describe_causes(total)}"
    return f"{chart.title}. {len(chart.rows)} rows; the first: {chart.rows[0][0]}, {_describe_causes(chart.rows[0][1])}"


def _describe_line(line: ChartLine, kind: AxisKind) -> str:
    finite = [number for number in line.values if math.isfinite(number)]
    if not finite:
        return f"{line.name}: no finite value."
    odd = len(line.values) - len(finite)
    first, last, low, high = (format_value(number, kind) for number in (finite[0], finite[-1], min(finite), max(finite)))
    return f"{line.name}: from {first} to {last}, between {low} and {high}{f', {odd} not finite' if odd else ''}."


def _describe_causes(seconds: dict[str, float] | object) -> str:
    causes = known_causes(seconds) if isinstance(seconds, dict) else {}
    return ", ".join(f"{name} {format_axis_duration(spent)}" for name, spent in causes.items()) + "."


def _frame(label: str, inside: str, height: int | None = None) -> str:
    kind = "area" if height is None else "area bars"
    tall = "" if height is None else f' height="{height}"'
    return f'<svg class="{kind}" role="img" aria-label="{escape(label)}"{tall}>{inside}</svg>'


def _percent(number: float, low: float, high: float) -> str:
    return f"{(number - low) / (high - low) * 100:.2f}%"


def _grid(positions: Sequence[float], labels: Sequence[str], low: float, high: float) -> str:
    parts = []
    for tick, text in zip(positions, labels, strict=True):
        y = f"{(high - tick) / (high - low) * 100:.2f}%"
        parts.append(f'<line x2="100%" y1="{y}" y2="{y}"/><text dx="-8" dy="4" y="{y}">{text}</text>')
    return f'<g class="grid">{"".join(parts)}</g>'


def _x_axis(positions: Sequence[float], kind: AxisKind, low: float, high: float, name: str) -> str:
    """Draw the horizontal axis. A narrow screen hides every second label."""
    parts = []
    for number, (tick, text) in enumerate(zip(positions, tick_labels(list(positions), kind), strict=True)):
        odd = " odd" if number % 2 else ""
        parts.append(
            f'<svg class="tick{odd}" x="{_percent(tick, low, high)}" y="100%"><path d="M0 0V5"/>'
            f'<text y="19">{text}</text></svg>'
        )
    title = f'<text class="axis" x="100%" y="100%" dy="36">{name}</text>'
    return f'<g class="across"><line x2="100%" y1="100%" y2="100%"/>{"".join(parts)}{title}</g>'


def _draw_markers(rules: Sequence[MarkerLine], axis: Axis, low: float, high: float) -> str:
    parts = []
    for rule in rules:
        at = rule.at.get(axis)
        if at is not None and low <= at <= high:
            kind, sign = ("bad", "\N{MULTIPLICATION X}") if rule.bad else ("restart", "\N{ANTICLOCKWISE OPEN CIRCLE ARROW}")
            x = _percent(at, low, high)
            parts.append(
                f'<g class="{kind}"><title>{escape(rule.text)}</title><line x1="{x}" x2="{x}" y1="0" y2="100%"/>'
                f'<text x="{x}" y="0" dy="-5">{sign}</text></g>'
            )
    return f'<g class="rules">{"".join(parts)}</g>'
