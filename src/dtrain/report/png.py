"""Draw the charts of a report as PNG files with matplotlib, for papers and slides."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtrain.optional_dependencies import missing_extra_error
from dtrain.report.model import Report
from dtrain.report.page.build_charts import all_charts
from dtrain.report.page.charts import (
    AXES,
    CAUSE_STYLES,
    BarChart,
    Chart,
    ChartLine,
    LineChart,
    MarkerLine,
    TimeChart,
    known_causes,
)
from dtrain.report.page.html_parts import is_empty
from dtrain.report.page.scales import AxisKind, tick_labels, ticks
from dtrain.report.page.svg import default_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6100", "#56b4e9", "#3d444d", "#6a51b5")
DASHES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (8, 3)), (0, (4, 4)), (0, (6, 2, 1, 2, 1, 2)), (0, (1, 4)))
INK = "#16191d"
_STYLE_BY_CAUSE = {cause.name: cause for cause in CAUSE_STYLES}


def write_pngs(report: Report, folder: str | Path) -> list[Path]:
    """Write one PNG file for each non-empty chart of the page, named after the chart: ``loss.png``, ``time.png``, ...

    Args:
        report: report to draw.
        folder: output folder, created if missing.

    Returns:
        The files, in the order of the page.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    folder = Path(folder)
    figures = [(chart, _draw_chart(chart)) for chart in all_charts(report) if not is_empty(chart)]
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for chart, figure in figures:
        paths.append(folder / f"{chart.key}.png")
        figure.savefig(paths[-1], dpi=150, facecolor="white")
    return paths


def _draw_chart(chart: Chart) -> Figure:
    # pyplot would keep a reference to the figure and may look for a display.
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra_error("report: pictures need the package matplotlib", "report") from None
    with rc_context({"hatch.linewidth": 0.6}):
        high = 4.0 if not isinstance(chart, BarChart) else 1.2 + 0.3 * len(chart.rows)
        figure = Figure(figsize=(8.0, high), layout="constrained")
        axes = figure.subplots()
        if isinstance(chart, LineChart):
            _draw_lines(axes, chart)
        elif isinstance(chart, TimeChart):
            _draw_time_columns(axes, chart)
        else:
            _draw_bars(axes, chart)
    axes.set_title(_escape_dollars(chart.title), loc="left", color=INK, fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _escape_dollars(text: str) -> str:
    # A dollar sign would start a formula.
    return text.replace("$", r"\$")


def _draw_lines(axes: Axes, chart: LineChart) -> None:
    axis = default_axis(chart)
    for number, line in enumerate(chart.lines):
        finite = [value if math.isfinite(value) else math.nan for value in line.values]
        colour = COLORS[number % len(COLORS)]
        style = (
            {"linestyle": "", "marker": "o"} if chart.dots else {"linestyle": DASHES[number % len(DASHES)], "linewidth": 1.4}
        )
        axes.plot(list(line.over[axis]), finite, color=colour, label=_escape_dollars(line.name), **style)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.0) if chart.zero and low > -high else low, high)
    for line in chart.lines:
        _draw_marks(axes, line, list(line.over[axis]))
    _draw_markers(axes, chart.rules, axis)
    axes.set_xlabel(axis)
    axes.grid(visible=True, axis="y", alpha=0.3)
    _label_axes(axes, chart.kind, AXES[axis])
    if len(chart.lines) > 1:
        axes.legend(frameon=False, fontsize=8, loc="best")


def _draw_marks(axes: Axes, line: ChartLine, places: list[float]) -> None:
    transform = axes.get_xaxis_transform()
    kinds = {
        "x": (0.02, math.isnan),
        "^": (0.98, lambda value: value == math.inf),
        "v": (0.02, lambda value: value == -math.inf),
    }
    for marker, (height, matches) in kinds.items():
        xs = [x for x, value in zip(places, line.values, strict=True) if matches(value)]
        if xs:
            axes.plot(xs, [height] * len(xs), marker, color="#b3400a", transform=transform, clip_on=False)


def _draw_markers(axes: Axes, rules: Iterable[MarkerLine], axis: str) -> None:
    for rule in rules:
        for place, at in rule.at.items():
            if place == axis:
                axes.axvline(at, color="#b3400a" if rule.bad else "#565f6b", linestyle="-" if rule.bad else "--", linewidth=1)


def _draw_time_columns(axes: Axes, chart: TimeChart) -> None:
    names = [cause.name for cause in CAUSE_STYLES if any(cause.name in known_causes(column.causes) for column in chart.columns)]
    below = [0.0] * (len(chart.columns) + 1)
    starts, widths = [column.start for column in chart.columns], [column.end - column.start for column in chart.columns]
    for name in names:
        shares = [min(known_causes(column.causes).get(name, 0.0) / width, 1.0) if width > 0 else 0.0
                  for column, width in zip(chart.columns, widths, strict=True)]  # fmt: skip
        top = [low + share for low, share in zip(below, [*shares, shares[-1]], strict=True)]
        edges = [*starts, starts[-1] + widths[-1]]
        _fill_bars([axes.fill_between(edges, below, top, step="post", label=_STYLE_BY_CAUSE[name].label)], name)
        below = top
    _draw_markers(axes, chart.rules, "time")
    axes.set_ylim(0, 1)
    axes.set_xlim(starts[0], starts[-1] + widths[-1])
    axes.set_xlabel("time")
    _label_axes(axes, "percent", "seconds")
    axes.legend(frameon=False, fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def _draw_bars(axes: Axes, chart: BarChart) -> None:
    rows = list(range(len(chart.rows)))
    left = [0.0] * len(rows)
    for name in [cause.name for cause in CAUSE_STYLES if any(cause.name in known_causes(seconds) for _, seconds in chart.rows)]:
        spent = [known_causes(seconds).get(name, 0.0) for _, seconds in chart.rows]
        _fill_bars(axes.barh(rows, spent, 0.75, left=left, label=_STYLE_BY_CAUSE[name].label), name)
        left = [start + length for start, length in zip(left, spent, strict=True)]
    axes.set_yticks(rows, [_escape_dollars(name) for name, _ in chart.rows])
    axes.invert_yaxis()
    low, high = axes.get_xlim()
    positions = ticks(low, high, "seconds")
    axes.set_xticks(positions, tick_labels(positions, "seconds"))
    axes.figure.legend(*axes.get_legend_handles_labels(), frameon=False, fontsize=8, ncols=5, loc="outside lower center")


def _fill_bars(bars: Any, name: str) -> None:
    for bar in bars:
        bar.set(
            facecolor=_STYLE_BY_CAUSE[name].light, hatch=_STYLE_BY_CAUSE[name].hatch or None, edgecolor="#00000059", linewidth=0
        )


def _label_axes(axes: Axes, up: AxisKind, across: AxisKind) -> None:
    for limits, kind, set_ticks in ((axes.get_ylim(), up, axes.set_yticks), (axes.get_xlim(), across, axes.set_xticks)):
        low, high = sorted(limits)
        positions = [tick for tick in ticks(low, high, kind) if low <= tick <= high]
        set_ticks(positions, tick_labels(positions, kind))
