"""Render parts of the page: charts with legend and table, tables, and data for the script. All texts are escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from html import escape
from typing import Any

from dtrain.report.page.charts import AXES, CAUSE_STYLES, BarChart, Chart, LineChart, TimeChart, known_causes
from dtrain.report.page.scales import format_axis_duration, format_value
from dtrain.report.page.svg import LINE_STYLES, default_axis, describe_chart, draw_bar_chart, draw_line_chart, draw_time_chart

_CAUSE_LABELS = {cause.name: cause.label for cause in CAUSE_STYLES}
_UNITS = {"seconds": "duration", "bytes": "size", "percent": "share", "number": "value"}


def render_chart(chart: Chart) -> str:
    """Render a chart with caption, legend and table, or the text of an empty chart."""
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note and not is_empty(chart) else ""
    caption = f"<figcaption><h3>{escape(chart.title)}</h3>{note}</figcaption>"
    if is_empty(chart):
        return (
            f'<figure class="chart empty" id="chart-{chart.key}">{caption}<p class="nothing">{escape(chart.empty)}</p></figure>'
        )
    words = describe_chart(chart)
    if isinstance(chart, LineChart):
        drawn, kind, legend = draw_line_chart(chart, words), "lines", _line_legend(chart)
    elif isinstance(chart, TimeChart):
        drawn, kind, legend = draw_time_chart(chart, words), "time", _rule_legend(chart)
    else:
        drawn, kind, legend = draw_bar_chart(chart, words), "bars", ""
    return (
        f'<figure class="chart" id="chart-{chart.key}" data-kind="{kind}">{caption}'
        f'<div class="plot">{drawn}</div>{legend}'
        f'<details><summary>Table<span class="hidden"> of {escape(chart.title)}</span></summary>{_chart_table(chart)}</details>'
        "</figure>"
    )


def is_empty(chart: Chart) -> bool:
    """Return True if the chart has no data."""
    if isinstance(chart, LineChart):
        return not any(line.values for line in chart.lines)
    return not (chart.columns if isinstance(chart, TimeChart) else any(known_causes(seconds) for _, seconds in chart.rows))


def _line_legend(chart: LineChart) -> str:
    dots, sample = (" dots", "M12 4h0.01") if chart.dots else ("", "M1 4H23")
    keys = "".join(
        f'<li><span class="series" data-line="{number}"><svg class="key" aria-hidden="true" viewBox="0 0 24 8">'
        f'<path class="line s{number % LINE_STYLES}{dots}" d="{sample}"/></svg>'
        f"{escape(line.name)}</span></li>"
        for number, line in enumerate(chart.lines)
    )
    odd = [number for line in chart.lines for number in line.values if not math.isfinite(number)]
    signs = {"\N{BLACK UP-POINTING TRIANGLE} +inf": math.inf in odd, "\N{BLACK DOWN-POINTING TRIANGLE} -inf": -math.inf in odd,
             "\N{MULTIPLICATION X} NaN": any(map(math.isnan, odd))}  # fmt: skip
    marks = "".join(f'<li class="sign odd">{sign}</li>' for sign, there in signs.items() if there)
    if len(chart.lines) == 1 and chart.lines[0].name in (chart.title, "lr"):
        # The key would repeat the title.
        keys = ""
    listed = f"{keys}{marks}{_rule_keys(chart)}"
    return f'<ul class="legend">{listed}</ul>' if listed else ""


def _rule_legend(chart: TimeChart) -> str:
    return f'<ul class="legend">{keys}</ul>' if (keys := _rule_keys(chart)) else ""


def _rule_keys(chart: LineChart | TimeChart) -> str:
    kinds = {rule.bad for rule in chart.rules}
    return "".join(
        f'<li class="sign{" bad" if bad else ""}">{text}</li>'
        for bad, text in (
            (False, "\N{ANTICLOCKWISE OPEN CIRCLE ARROW} restart"),
            (True, "\N{MULTIPLICATION X} killed or failed"),
        )
        if bad in kinds
    )


def cause_legend(names: Iterable[str]) -> str:
    """Render the legend of colors and patterns."""
    keys = "".join(f"<li>{_swatch(cause.name)}{cause.label}</li>" for cause in CAUSE_STYLES if cause.name in set(names))
    return f'<ul class="legend causes">{keys}</ul>'


def _swatch(name: str) -> str:
    return f'<svg class="swatch" aria-hidden="true"><rect width="100%" height="100%" fill="url(#fill-{name})"/></svg>'


def cause_table(by_cause: dict[str, float]) -> str:
    """Render the table of time by category, largest first, with shares and bars. The table is the key of all time charts."""
    causes = sorted(known_causes(by_cause).items(), key=lambda item: -item[1])
    total = sum(seconds for _, seconds in causes) or 1.0
    rows = "".join(
        f'<tr><th scope="row">{_swatch(name)}{_CAUSE_LABELS[name]}</th><td>{format_axis_duration(seconds)}</td>'
        f'<td>{format_value(seconds / total, "percent")}</td><td class="share" aria-hidden="true">'
        f'<svg><rect height="100%" width="{seconds / total * 100:.2f}%" fill="url(#fill-{name})"/></svg></td></tr>'
        for name, seconds in causes
    )
    return (
        '<table class="causes"><caption class="hidden">Wall time by cause</caption>'
        f'<thead class="hidden"><tr><th>Cause</th><th>Time</th><th>Share</th><th></th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _chart_table(chart: Chart) -> str:
    if isinstance(chart, LineChart):
        axes = [axis for axis in AXES if any(axis in line.over for line in chart.lines)]
        several = len(chart.lines) > 1
        head = [*(["line"] if several else []), *axes, _UNITS[chart.kind]]
        rows = [
            [
                *([line.name] if several else []),
                *(_format_x(line.over.get(axis), index, axis) for axis in axes),
                format_value(number, chart.kind),
            ]
            for line in chart.lines
            for index, number in enumerate(line.values)
        ]
        return render_table(head, rows, texts=range(int(several)))
    if isinstance(chart, TimeChart):
        names = [
            cause.name for cause in CAUSE_STYLES if any(cause.name in known_causes(column.causes) for column in chart.columns)
        ]
        rows = [
            [
                format_axis_duration(column.start),
                format_axis_duration(column.end),
                *(format_axis_duration(known_causes(column.causes).get(name, 0.0)) for name in names),
            ]
            for column in chart.columns
        ]
        return render_table(["from", "to", *(_CAUSE_LABELS[name] for name in names)], rows, texts=())
    names = [cause.name for cause in CAUSE_STYLES if any(cause.name in known_causes(seconds) for _, seconds in chart.rows)]
    rows = [
        [row, *(format_axis_duration(known_causes(seconds).get(name, 0.0)) for name in names)] for row, seconds in chart.rows
    ]
    return render_table(["", *(_CAUSE_LABELS[name] for name in names)], rows)


def _format_x(numbers: Sequence[float] | None, index: int, axis: str) -> str:
    if numbers is None:
        return ""
    return format_axis_duration(numbers[index]) if axis == "time" else f"{numbers[index]:.0f}"


def render_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, texts: Collection[int] = (0,), marked: frozenset[str] = frozenset()
) -> str:
    """Render a scrollable table.

    ``texts`` are the indices of text columns, other columns are numbers. ``marked`` cells stand out. Optional closing tags are
    omitted: with many numbers, they would be a third of the page.
    """
    top = "".join(f'<th scope="col"{_text_class(number, texts)}>{escape(text)}' for number, text in enumerate(head))
    body = "".join(
        "<tr>" + "".join(
            f"<td{_text_class(number, texts)}>" + (f"<mark>{escape(cell)}</mark>" if cell in marked and cell else escape(cell))
            for number, cell in enumerate(row)
        )
        for row in rows
    )  # fmt: skip
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="table"><table><thead><tr>{top}<tbody>{body}</table></div>'
    )


def _text_class(number: int, texts: Collection[int]) -> str:
    return " class=t" if number in texts else ""


def charts_json(charts: Sequence[Chart]) -> str:
    """Return the chart data for the script as JSON that is safe inside a script element."""
    plain = {
        f"chart-{chart.key}": _chart_data(chart) for chart in charts if not is_empty(chart) and not isinstance(chart, BarChart)
    }
    text = json.dumps(plain, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _chart_data(chart: LineChart | TimeChart) -> dict[str, Any]:
    rules = [{"at": rule.at, "text": rule.text, "bad": rule.bad} for rule in chart.rules]
    if isinstance(chart, TimeChart):
        columns = [
            [
                round_digits(each.start),
                round_digits(each.end),
                {name: round_digits(spent) for name, spent in known_causes(each.causes).items()},
            ]
            for each in chart.columns
        ]
        return {"columns": columns, "rules": rules}
    lines = [
        {
            "name": line.name,
            "over": {axis: [round_digits(x, 9) for x in numbers] for axis, numbers in line.over.items()},
            "y": [round_digits(number) if math.isfinite(number) else str(number) for number in line.values],
        }
        for line in chart.lines
    ]
    return {"kind": chart.kind, "axis": default_axis(chart), "zero": chart.zero, "smooth": chart.smooth, "dots": chart.dots,
            "lines": lines, "rules": rules}  # fmt: skip


def round_digits(number: float, digits: int = 6) -> float | int:
    """Round to the number of visible digits."""
    rounded = float(f"{number:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 2**53 else rounded
