"""Build the charts of a report as plain data, which ``page.js`` draws.

A chart is a dict of ``title``, ``unit``, ``data`` (a list of traces), and ``text``, which a page shows in place of a chart
without data. The ``kind`` of a trace is ``line``, ``points``, ``area`` (stacked), ``bar`` (stacked, with one value for each of
the chart's ``rows``), ``edge`` (marks at the upper or the lower edge) or ``rule`` (vertical lines). ``over`` has the horizontal
coordinates by axis: steps, tokens or time. A color is the name of a color in ``page.css``, so that light and dark themes have
their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dtrain.arguments import format_count
from dtrain.report.metric_table import downsample
from dtrain.report.model import Column, MetricSeries, Report, RunReport
from dtrain.report.results import metric_label

Chart = dict[str, Any]
Trace = dict[str, Any]

# Patterns of the time categories, which differ without colors, too: the strokes in a tile of 8 by 8 pixels.
CAUSE_PATTERNS: dict[str, str] = {
    "compute": "", "communication": "M4 4h1", "data": "M0 8L8 0", "stall": "M0 0L8 8", "checkpoint": "M4 0V8",
    "evaluation": "M0 4H8", "logging": "M0 4L4 0M4 8L8 4", "compile": "M4 0V8M0 4H8", "restart": "M0 0L8 8M0 8L8 0",
    "setup": "M2 2h1M6 6h1", "other": "",
}  # fmt: skip
# horizontal axes of a chart of lines
AXES = ("steps", "tokens", "time")
# Each metric has its own chart up to this number. Beyond, metrics of a group share charts.
MAX_SINGLE_CHARTS = 24
# lines in a shared chart
MAX_LINES = 8
# Further metrics appear only in ``--json``.
MAX_METRIC_CHARTS = 60
# ranks with a bar
MAX_BARS = 32
_MAX_ROWS = 400
# points of all lines: more would be a slow page of more than a megabyte
_MAX_POINTS = 20_000
# symbol and name of the mark of a non-finite value
_NON_FINITE_MARKS = (("\u00d7", "NaN", np.isnan), ("▲", "+inf", np.isposinf), ("▼", "-inf", np.isneginf))
# strokes and gaps of the lines of a chart, in pixels
_DASHES = ("", "6 3", "2 3", "6 3 2 3", "10 4", "10 4 2 4", "5 2", "2 6")
_GRADIENT_NORMS = ("grad_norm", "norm/grad")
_SPEED_AND_MEMORY = ("speed/", "throughput/", "memory/", "mem/")
_OUTCOMES = {"done": "was done", "stopped": "was stopped", "failed": "failed", "killed": "was killed", "running": "ran"}


def chart_key(title: str, used: Iterable[str]) -> str:
    """Create the id of a chart's element."""
    base = "chart-" + ("-".join(re.findall("[a-z0-9]+", title.lower()))[:60] or "metric")
    key, number = base, 2
    while key in used:
        key, number = f"{base}-{number}", number + 1
    return key


def metric_charts(report: Report) -> tuple[dict[str, Chart], int]:
    """Build the charts of metrics, losses first, one line per run. Return also the number of metrics without a chart."""
    names = [name for name in metric_names(report) if not name.startswith(_SPEED_AND_MEMORY)]
    groups = {name: [name] for name in names} if len(names) <= MAX_SINGLE_CHARTS else dict(group_metrics(names))
    # The norm that a clip logs and the norm that a monitor logs share a chart.
    if all(groups.get(name) == [name] for name in _GRADIENT_NORMS):
        groups[_GRADIENT_NORMS[0]] += groups.pop(_GRADIENT_NORMS[1])
    titled = list(groups.items())
    charts: dict[str, Chart] = {}
    for title, group in titled[:MAX_METRIC_CHARTS]:
        smooth = any("loss" in name.lower() or "perplexity" in name.lower() for name in group)
        charts[chart_key(title, charts)] = _line_chart(report, title, group, smooth=smooth)
    if not charts:
        charts["chart-loss"] = _line_chart(report, "Loss", [], text="no metric was logged")
    return charts, sum(len(group) for _, group in titled[MAX_METRIC_CHARTS:])


def metric_names(report: Report) -> list[str]:
    """Return the metrics of all runs: ``loss`` first, then names ending in ``loss``, then by name."""
    names = {name for run in report.runs for name in run.series}
    return sorted(names, key=lambda name: (name != "loss", not name.endswith("loss"), name))


def metric_unit(name: str) -> str:
    """Return the unit of a metric from its name: ``"B"``, ``"%"``, ``"s"`` or ``""``."""
    last = name.rsplit("/", 1)[-1]
    if last.endswith("bytes"):
        return "B"
    if "mfu" in name.lower().replace("/", "_").split("_"):
        return "%"
    return "s" if last.endswith(("_s", "seconds")) and not last.endswith("per_s") else ""


def group_metrics(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Group names with a common prefix, a few at a time, with a title for each group."""
    by_group: dict[str, list[str]] = {}
    for name in names:
        by_group.setdefault(name.rsplit("/", 1)[0] if "/" in name else name, []).append(name)
    titled = []
    for group, members in by_group.items():
        for start in range(0, len(members), MAX_LINES):
            part = members[start : start + MAX_LINES]
            count = f" ({start + 1} to {start + len(part)} of {len(members)})" if len(members) > MAX_LINES else ""
            titled.append((members[0] if len(members) == 1 else f"{group}/…{count}", part))
    return titled


def run_label(report: Report, run: RunReport, label: str = "") -> str:
    """Return the label of a line: ``label`` for a single run, else the name of the run, or its folder if names are equal."""
    if len(report.runs) == 1 and label:
        return label
    name = run.name if sum(other.name == run.name for other in report.runs) == 1 else run.folder
    return f"{name}: {label}" if label else name


def speed_charts(report: Report) -> dict[str, Chart]:
    """Build the charts of throughput over wall time and compute time, of further speeds, and of memory."""
    unit, lines = _throughput(report)
    charts = {"chart-throughput": _chart(report, f"Throughput, {unit}/s" if unit else "Throughput", lines, zero=True,
                                         text="no throughput is known: there is no ledger, or no step in it")}  # fmt: skip
    # The ledger has the throughput at any time, so metrics of the throughput meter are not repeated.
    names = [name for name in metric_names(report) if name.startswith(("speed/", "throughput/"))]
    for name in names:
        base = name.removesuffix("/compute").removesuffix("_per_device")
        if not unit or base not in {f"speed/{each}_per_s" for each in ("tokens", "samples", "steps")}:
            charts[chart_key(name, charts)] = _line_chart(report, name, [name], zero=True)
    charts["chart-memory"] = _memory_chart(report)
    return charts


def _throughput(report: Report) -> tuple[str, list[Trace]]:
    for unit in ("tokens", "samples", "steps"):
        timelines = [(run, run.timeline, getattr(run.timeline, unit)) for run in report.runs if run.timeline is not None]
        if any(np.nansum(done) > 0 for _, _, done in timelines):
            lines: list[Trace] = []
            for run, slices, done in timelines:
                over = {"steps": slices.step, "time": slices.at + slices.seconds / 2}
                for label, seconds in (("all time", slices.seconds), ("compute alone", slices.compute_s)):
                    rate = np.divide(done, seconds, out=np.full(len(done), np.nan), where=seconds > 0)
                    lines.append(_line(report, run_label(report, run, label), over, rate, len(lines)))
            return unit, lines
    return "", []


def _memory_chart(report: Report) -> Chart:
    lines: list[tuple[str, Mapping[str, Column], Column]] = []
    for run in report.runs:
        for name, series in run.series.items():
            if name.startswith(("memory/", "mem/")) and metric_unit(name) == "B":
                lines.append((run_label(report, run, metric_label(name)), _coordinates(series), series.values))
        for name, gauge in sorted(run.gauges.items()):
            if metric_unit(name) == "B":
                label = f"{metric_label(f'memory/{name}')}, largest of all ranks (now rank {gauge.ranks[-1]})"
                lines.append((run_label(report, run, label), {"time": gauge.times}, gauge.values))
    scale, unit = _scale("B", (values for _, _, values in lines))
    traces = [_line(report, name, over, values / scale, index) for index, (name, over, values) in enumerate(lines)]
    return _chart(report, "Memory", traces, text="no memory was measured: neither the ledger nor the metrics have it",
                  zero=True, unit=unit)  # fmt: skip


def run_charts(run: RunReport, suffix: str) -> dict[str, Chart]:
    """Build the charts of one run: wall time by category over time, per attempt and per rank, and checkpoints."""
    report = Report(version="", title="", written_at=0.0, runs=[run], problems=[])
    ranks = run.ranks
    if len(ranks) > MAX_BARS:
        slow = {slow.rank for slow in run.slowest}
        ranks = sorted(ranks, key=lambda rank: (rank.rank not in slow, rank.rank))[:MAX_BARS]
        ranks.sort(key=lambda rank: rank.rank)
    some = f", {len(ranks)} of {len(run.ranks)} with the slowest among them" if len(ranks) < len(run.ranks) else ""
    attempts = {f"attempt {each.number}": each.by_cause for each in run.attempts[:_MAX_ROWS]}
    return {
        f"chart-time{suffix}": _time_chart(report, run),
        f"chart-attempts{suffix}": _bar_chart("Time of each attempt", attempts),
        f"chart-ranks{suffix}": _bar_chart(f"Time of each rank{some}", {f"rank {each.rank}": each.by_cause for each in ranks}),
        f"chart-checkpoints{suffix}": _checkpoint_chart(report, run, "Time of checkpoints", "s", {
            "blocked_s": "training was blocked", "duration_s": "until it was durable"}),
        f"chart-checkpoint-size{suffix}": _checkpoint_chart(report, run, "Size of checkpoints", "B", {"bytes": "size"}),
    }  # fmt: skip


def _time_chart(report: Report, run: RunReport) -> Chart:
    slices = run.timeline
    traces: list[Trace] = []
    edges: list[float | int | None] = []
    if slices is not None:
        edges = _over(report, {"time": np.append(slices.at, slices.at[-1] + slices.seconds[-1])})["time"]
        for cause in [cause for cause in CAUSE_PATTERNS if cause in slices.by_cause]:
            shares = np.divide(slices.by_cause[cause], slices.seconds, out=np.zeros(len(slices.at)), where=slices.seconds > 0)
            traces.append({"kind": "area", "name": cause, "color": cause, "y": [_round(100 * x, 4) for x in shares.tolist()]})
    text = "no ledger: it is not known where the time went"
    chart = _chart(report, "Wall time by cause, mean over ranks", traces, unit="%", text=text) | {
        "edges": edges,
        "axes": ["time"],
    }
    ends = [each for each in run.attempts if each.outcome in ("failed", "killed")]
    texts = [f"attempt {each.number} {_OUTCOMES[each.outcome]}: {each.error or 'no error was recorded'}" for each in ends]
    return _with_rules(report, chart, "killed or failed", "alarm", [{"time": each.ended_at} for each in ends], texts)


def _bar_chart(title: str, rows: Mapping[str, Mapping[str, float]]) -> Chart:
    """Build a chart with a stacked bar of seconds by category for each row. A single bar is left to the table of causes."""
    scale, unit = _scale("s", [np.array([sum(by_cause.values()) for by_cause in rows.values()])])
    data = [
        {"kind": "bar", "name": cause, "color": cause,
         "x": [_round(by_cause.get(cause, 0.0) / scale) for by_cause in rows.values()]}
        for cause in CAUSE_PATTERNS
        if any(by_cause.get(cause, 0.0) > 0 for by_cause in rows.values())
    ]  # fmt: skip
    text = f"{next(iter(rows))} was the only one" if rows else "no ledger of any rank"
    return {"title": title, "text": text, "unit": unit, "rows": list(rows), "data": data if len(rows) > 1 else []}


def _checkpoint_chart(report: Report, run: RunReport, title: str, unit: str, fields: Mapping[str, str]) -> Chart:
    rows = {name: [row for row in run.checkpoints if row[name] is not None] for name in fields}
    values = {name: np.array([row[name] for row in rows[name]]) for name in fields}
    scale, unit = _scale(unit, values.values())
    traces: list[Trace] = []
    for name, label in fields.items():
        over = {axis: np.array([row[key] for row in rows[name]]) for axis, key in (("steps", "step"), ("time", "at"))}
        if rows[name]:
            traces.append(_line(report, label, over, values[name] / scale, len(traces)) | {"kind": "points"})
    known = f"no {title.split()[0].lower()} of a checkpoint is known" if run.checkpoints else "no checkpoint was written"
    return _chart(report, title, traces, unit=unit, zero=True, text=known)


def _line_chart(report: Report, title: str, names: Sequence[str], *, text: str = "", **options: bool) -> Chart:
    """Build a chart of metrics, one line per metric and run. Non-finite values are marks at the edge."""
    points = max(20, _MAX_POINTS // max(1, sum(len(run.series) for run in report.runs)))
    has_names = len(names) > 1 or len(report.runs) == 1
    lines = [
        (run_label(report, run, name if has_names else ""), run.series[name])
        for name in names
        for run in report.runs
        if name in run.series
    ]
    scale, unit = _scale(metric_unit(names[0]) if names else "", (series.values for _, series in lines))
    traces: list[Trace] = []
    marks: list[Trace] = []
    title = metric_label(title)
    for index, (name, series) in enumerate(lines):
        values, over = _drawable(series.values), _coordinates(series)
        chosen = thin_points(values, points)
        if np.isfinite(values).any():
            own = {axis: column[chosen] for axis, column in over.items()}
            traces.append(_line(report, name, own, values[chosen] / scale, index))
        for symbol, label, matches in _NON_FINITE_MARKS:
            if (found := matches(values)).any():
                mark = {"kind": "edge", "name": label if len(lines) == 1 else f"{name}: {label}", "symbol": symbol}
                own = {axis: column[found] for axis, column in over.items()}
                marks.append(mark | {"color": "alarm", "over": _over(report, own)})
    text = text or f"no finite value of {title} was logged"
    return _chart(report, title, traces, marks, unit=unit, text=text, **options)


def _coordinates(series: MetricSeries) -> dict[str, Column]:
    over = {"steps": series.steps, "tokens": series.tokens, "time": series.times}
    return {axis: values for axis, values in over.items() if len(values)}


def thin_points(values: Column, points: int) -> list[int]:
    """Return the indices of the points to draw: all non-finite values, and the extremes of each interval."""
    finite = np.flatnonzero(np.isfinite(values))
    return sorted({*finite[downsample(values[finite], points)].tolist(), *np.flatnonzero(~np.isfinite(values)).tolist()})


def _line(report: Report, name: str, over: Mapping[str, Column], values: Column, index: int) -> Trace:
    """Build a trace: a line over each axis of ``over``."""
    y = [_round(value) for value in _drawable(values).tolist()]
    style = {"color": f"line{index % MAX_LINES}", "dash": _DASHES[index % len(_DASHES)]}
    return {"kind": "line", "name": name, **style, "over": _over(report, over), "y": y}


def _over(report: Report, over: Mapping[str, Column]) -> dict[str, list[float | int | None]]:
    return {
        axis: [_round(x, 7) for x in (xs / _time_scale(report)[0]).tolist()]
        if axis == "time"
        else [_round(x, 9) for x in xs.tolist()]
        for axis, xs in over.items()
    }


def _chart(
    report: Report,
    title: str,
    lines: list[Trace],
    marks: Sequence[Trace] = (),
    *,
    text: str,
    unit: str = "",
    zero: bool = False,
    smooth: bool = False,
) -> Chart:
    """Build a chart of lines with rules at restarts. Lines of one point each are a text."""
    if lines and not marks and max(len(line["y"]) for line in lines) == 1:
        points = [(line["name"], line["y"][0], line.get("over", {}).get("steps")) for line in lines]
        texts = [
            f"{name} {value:,}{f' {unit}' if unit else ''}{f' at step {steps[0]:,}' if steps else ''}"
            for name, value, steps in points
            if value is not None
        ]
        text, lines = ", ".join(texts) or text, []
    traces = [*lines, *marks]
    chart = {"title": title, "text": text, "data": traces, "unit": unit, "zero": zero, "smooth": smooth}
    chart["axes"] = [axis for axis in AXES if any(axis in trace.get("over", ()) for trace in traces)]
    chart["timeTitle"] = f"time ({_time_scale(report)[1]})"
    if len(report.runs) != 1:
        return chart
    places, restarts = [], []
    for before, attempt in pairwise(report.runs[0].attempts):
        places.append({"steps": attempt.first_step, "time": attempt.at})
        lost = f", {format_count(before.lost_steps, 'repeated step')}" if before.lost_steps else ""
        outcome = f"attempt {before.number} {_OUTCOMES[before.outcome]}{lost}"
        restarts.append(f"attempt {attempt.number} began at step {attempt.first_step} after {outcome}")
    return _with_rules(report, chart, "restart", "quiet", places, restarts)


def _with_rules(
    report: Report, chart: Chart, name: str, color: str, places: Sequence[Mapping[str, float]], texts: Sequence[str]
) -> Chart:
    """Add a trace of vertical lines with texts to a chart with data."""
    if not chart["data"] or not places:
        return chart
    over = _over(report, {axis: np.array([place[axis] for place in places], dtype=float) for axis in places[0]})
    trace = {"kind": "rule", "name": name, "color": color, "over": over, "texts": list(texts)}
    return chart | {"data": [*chart["data"], trace]}


def _time_scale(report: Report) -> tuple[float, str]:
    return _scale("s", [np.array([run.duration_s]) for run in report.runs])


def _scale(unit: str, columns: Iterable[Column]) -> tuple[float, str]:
    """Return the size and the name of the unit for values up to the largest in ``columns``."""
    largest = max((float(np.abs(values[np.isfinite(values)]).max(initial=0.0)) for values in columns), default=0.0)
    units = {
        "s": [(86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms")],
        "B": [(2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")],
        "%": [(0.01, "%")],
    }.get(unit, [(1.0, "")])
    return next(((size, name) for size, name in units if largest >= 2 * size), units[-1])


def _drawable(values: Column) -> Column:
    """Replace values too large or too small for the arithmetic of axes by infinity or 0."""
    large, small = np.abs(values) > 1e300, np.abs(values) < 1e-300
    return np.where(large, np.copysign(np.inf, values), np.where(small, 0.0, values))


def _round(number: float, digits: int = 6) -> float | int | None:
    """Round to the number of visible digits; None for a non-finite number."""
    if not math.isfinite(number):
        return None
    rounded = float(f"{number:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 2**53 else rounded
