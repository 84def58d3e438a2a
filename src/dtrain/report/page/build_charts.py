"""Build the charts of a report, or the text for an empty chart."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, count

from dtrain.report.model import AttemptReport, MetricSeries, Report, RunReport, SpeedSample
from dtrain.report.page.charts import Axis, BarChart, Chart, ChartLine, LineChart, MarkerLine, TimeChart, TimeColumn
from dtrain.report.page.scales import AxisKind, format_axis_duration

# points of all metrics: about 4 MB of a page
MAX_POINTS = 30_000
# Each metric has its own chart up to this number. Beyond, metrics of a group share charts.
MAX_SINGLE_CHARTS = 24
# lines in a shared chart
MAX_LINES = 8
# Further metrics appear only in ``--json``.
MAX_METRIC_CHARTS = 60
# ranks with a bar
MAX_BARS = 32

LEARNING_RATE, SPEED, MEMORY, MFU = "learning rate", "speed", "memory", "mfu"
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def metric_charts(report: Report) -> tuple[list[Chart], int]:
    """Build the charts of metrics, losses first, one line per run. Return also the number of metrics without a chart."""
    names = [name for name in metric_names(report) if metric_section(name) == ""]
    share = max(60, MAX_POINTS // max(1, sum(len(run.series) for run in report.runs)))
    groups = [(name, [name]) for name in names] if len(names) <= MAX_SINGLE_CHARTS else group_metrics(names)
    keys = chart_keys([title for title, _ in groups[:MAX_METRIC_CHARTS]])
    charts: list[Chart] = [
        LineChart(
            key=key,
            title=title,
            lines=tuple(_metric_lines(report, group, share)),
            empty=f"no finite value of {title} was logged",
            smooth=any("loss" in name.lower() or "perplexity" in name.lower() for name in group),
            kind=axis_kind(group[0]),
            rules=restart_markers(report.runs),
        )
        for key, (title, group) in zip(keys, groups, strict=False)
    ]
    if not charts:
        charts = [LineChart(key="loss", title="Loss", lines=(), empty="no metric was logged")]
    return charts, sum(len(group) for _, group in groups[MAX_METRIC_CHARTS:])


def chart_keys(titles: Sequence[str]) -> list[str]:
    """Create unique keys for charts, used in links and file names."""
    used = {"learning-rate", "throughput", "mfu", "memory", "time", "ranks", "checkpoints", "checkpoint-size"}
    keys = []
    for title in titles:
        base = "-".join(re.findall("[a-z0-9]+", title.lower()))[:60] or "metric"
        key = next(key for key in chain([base], (f"{base}-{number}" for number in count(2))) if key not in used)
        used.add(key)
        keys.append(key)
    return keys


def metric_names(report: Report) -> list[str]:
    """Return the metrics of all runs: ``loss`` first, then names ending in ``loss``, then by name."""
    names = {name for run in report.runs for name in run.series}
    return sorted(names, key=lambda name: (name != "loss", not name.endswith("loss"), name))


def metric_section(name: str) -> str:
    """Return the section that draws a metric; "" for the section of metrics."""
    last = name.rsplit("/", 1)[-1].lower()
    if name == "lr" or name.startswith("lr/") or last in ("lr", "learning_rate"):
        return LEARNING_RATE
    if "mfu" in name.lower().replace("/", "_").split("_"):
        return MFU
    if name.startswith(("memory/", "mem/")):
        return MEMORY
    return SPEED if name.startswith(("speed/", "throughput/")) else ""


def axis_kind(name: str) -> AxisKind:
    """Return the unit of a metric from its name."""
    last = name.rsplit("/", 1)[-1]
    if last.endswith("bytes"):
        return "bytes"
    if metric_section(name) == MFU:
        return "percent"
    return "seconds" if last.endswith(("_s", "seconds")) and not last.endswith("per_s") else "number"


def group_metrics(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Group names with a common prefix, a few at a time, with a title for each group."""
    by_group: dict[str, list[str]] = {}
    for name in names:
        by_group.setdefault(name.rsplit("/", 1)[0] if "/" in name else name, []).append(name)
    titled: list[tuple[str, list[str]]] = []
    for group, members in by_group.items():
        for start in range(0, len(members), MAX_LINES):
            title = members[0] if len(members) == 1 else f"{group}/\N{HORIZONTAL ELLIPSIS}"
            part = (
                f" ({start + 1} to {min(start + MAX_LINES, len(members))} of {len(members)})"
                if len(members) > MAX_LINES
                else ""
            )
            titled.append((title + part, members[start : start + MAX_LINES]))
    return titled


def learning_rate_chart(report: Report) -> Chart:
    """Build the chart of learning rates of all runs and groups."""
    return _section_chart(report, LEARNING_RATE, "learning-rate", "Learning rate", "no learning rate was logged", zero=True)


def speed_charts(report: Report) -> list[Chart]:
    """Build the charts of throughput over wall time and compute time, of MFU and of memory."""
    unit, lines = _throughput(report)
    charts: list[Chart] = [
        LineChart(
            key="throughput",
            title=f"Throughput, {unit}" if unit else "Throughput",
            lines=tuple(lines),
            empty="no throughput is known: there is no ledger, or no step in it",
            note="over all time, and over compute alone; the room between is what else took time" if lines else "",
            zero=True,
            rules=restart_markers(report.runs),
        )
    ]
    # The ledger has the throughput at any time, so metrics of the throughput meter are not repeated.
    in_ledger = unit != ""
    own = [name for name in metric_names(report) if metric_section(name) == SPEED and not (in_ledger and _is_throughput(name))]
    groups = group_metrics(own) if len(own) > MAX_LINES else [(name, [name]) for name in own]
    charts += [
        LineChart(
            key=key if key.startswith("speed") else f"speed-{key}",
            title=title,
            lines=tuple(_metric_lines(report, group, 400)),
            zero=True,
            empty=f"no finite value of {title} was logged",
            kind=axis_kind(title),
            rules=restart_markers(report.runs),
        )
        for key, (title, group) in zip(chart_keys([title for title, _ in groups]), groups, strict=True)
    ]
    charts.append(_section_chart(report, MFU, "mfu", "Model FLOPs utilisation", "no MFU was logged", kind="percent", zero=True))
    return [*charts, _memory_chart(report)]


def _is_throughput(name: str) -> bool:
    """Return True for a metric of the ``throughput`` meter, which repeats the throughput of the ledger."""
    base = name.removesuffix("/compute").removesuffix("_per_device")
    return base in {f"speed/{unit}_per_s" for unit in ("tokens", "samples", "steps")}


def _throughput(report: Report) -> tuple[str, list[ChartLine]]:
    pieces = [piece for run in report.runs for piece in run.speed]
    for unit in ("tokens", "samples", "steps"):
        if any(getattr(piece, f"{unit}_per_s") is not None for piece in pieces):
            return f"{unit}/s", [
                line
                for run in report.runs
                for label, name in (("all time", f"{unit}_per_s"), ("compute", f"{unit}_per_compute_s"))
                if (line := _speed_line(run_label(report, run, label), run.speed, name)) is not None
            ]
    return "", []


def _speed_line(label: str, pieces: Sequence[SpeedSample], field: str) -> ChartLine | None:
    samples = [(piece, float(number)) for piece in pieces if (number := getattr(piece, field)) is not None]
    if not samples:
        return None
    over: dict[Axis, Sequence[float]] = {
        "steps": [piece.step for piece, _ in samples],
        "time": [piece.at + piece.seconds / 2 for piece, _ in samples],
    }
    return ChartLine(name=label, over=over, values=[number for _, number in samples])


def _memory_chart(report: Report) -> Chart:
    names = [name for name in metric_names(report) if metric_section(name) == MEMORY and axis_kind(name) == "bytes"]
    lines = list(_metric_lines(report, names, 400))
    for run in report.runs:
        for name, gauge in sorted(run.gauges.items()):
            if axis_kind(name) == "bytes" and gauge.values:
                title = run_label(
                    report, run, f"{name.removesuffix('_bytes')}, largest of all ranks (now rank {gauge.ranks[-1]})"
                )
                lines.append(ChartLine(name=title, over={"time": gauge.times}, values=gauge.values))
    return LineChart(
        key="memory",
        title="Memory",
        lines=tuple(lines),
        kind="bytes",
        zero=True,
        rules=restart_markers(report.runs),
        empty="no memory was measured: neither the ledger nor the metrics have it",
    )


def _section_chart(
    report: Report, role: str, key: str, title: str, empty: str, *, kind: AxisKind = "number", zero: bool
) -> Chart:
    names = [name for name in metric_names(report) if metric_section(name) == role][: 2 * MAX_LINES]
    return LineChart(key=key, title=title, lines=tuple(_metric_lines(report, names, 400)), empty=empty, kind=kind, zero=zero,
                     rules=restart_markers(report.runs))  # fmt: skip


def _metric_lines(report: Report, names: Iterable[str], points: int) -> Iterable[ChartLine]:
    names = list(names)
    for name in names:
        for run in report.runs:
            if name in run.series:
                yield series_line(
                    run_label(report, run, name if len(names) > 1 or len(report.runs) == 1 else ""), run.series[name], points
                )


def run_label(report: Report, run: RunReport, label: str = "") -> str:
    """Return the label of a line: ``label`` for a single run, else the name of the run, or its folder if names are equal."""
    if len(report.runs) == 1 and label:
        return label
    own = sum(other.name == run.name for other in report.runs)
    name = run.name if own == 1 else run.folder
    return f"{name}: {label}" if label else name


def series_line(name: str, series: MetricSeries, points: int) -> ChartLine:
    """Build a line from a series with at most ``points`` points and its non-finite marks."""
    indices = thin_points(series.values, points)
    rows = [
        (step, series.tokens[index] if series.tokens else None, series.times[index] if series.times else None, number)
        for index in indices
        for step, number in [(series.steps[index], clamp_to_drawable(series.values[index]))]
    ]
    marks = [(mark.step, mark.tokens, mark.at, _NON_FINITE[mark.what]) for mark in series.marks]
    rows = sorted([*rows, *marks], key=lambda row: row[0])
    over: dict[Axis, Sequence[float]] = {"steps": [row[0] for row in rows]}
    for axis, column in (("tokens", 1), ("time", 2)):
        numbers = [row[column] for row in rows]
        if rows and all(number is not None for number in numbers):
            over[axis] = [float(number) for number in numbers if number is not None]  # type: ignore[index]
    return ChartLine(name=name, over=over, values=[row[3] for row in rows])


def clamp_to_drawable(number: float) -> float:
    """Replace values too large or too small for axis arithmetic by infinity or 0."""
    if abs(number) > 1e300:
        return math.copysign(math.inf, number)
    return number if abs(number) > 1e-300 else 0.0


def thin_points(values: Sequence[float], points: int) -> list[int]:
    """Return the indices of the points to draw: all, or minimum and maximum of each interval with the first and last point."""
    if len(values) <= points:
        return list(range(len(values)))
    intervals = max(1, (points - 2) // 2)
    kept = {0, len(values) - 1}
    for number in range(intervals):
        interval = range(number * len(values) // intervals, (number + 1) * len(values) // intervals)
        if interval:
            kept |= {min(interval, key=values.__getitem__), max(interval, key=values.__getitem__)}
    return sorted(kept)


def restart_markers(runs: Sequence[RunReport]) -> tuple[MarkerLine, ...]:
    """Return a marker at the start of each later attempt. With several runs in a chart, return none."""
    if len(runs) != 1:
        return ()
    return tuple(
        MarkerLine(at={"steps": attempt.first_step, "time": attempt.at}, text=_restart_text(before, attempt))
        for before, attempt in zip(runs[0].attempts, runs[0].attempts[1:], strict=False)
    )


def _restart_text(before: AttemptReport, attempt: AttemptReport) -> str:
    lost = f", {before.lost_steps} steps were done again" if before.lost_steps else ""
    outcome = f"attempt {before.number} {_outcome_text(before)}{lost}"
    return f"attempt {attempt.number} began at step {attempt.first_step} after {outcome}"


def _outcome_text(attempt: AttemptReport) -> str:
    return {"done": "was done", "stopped": "was stopped", "failed": "failed", "killed": "was killed"}.get(attempt.how, "ran")


def time_charts(run: RunReport, suffix: str) -> list[Chart]:
    """Build the charts of wall time by category, over time and per rank."""
    ends = [
        MarkerLine(
            at={"time": each.ended_at},
            text=f"attempt {each.number} {_outcome_text(each)}: {each.error or 'no word of why'}",
            bad=True,
        )
        for each in run.attempts
        if each.how in ("failed", "killed")
    ]
    columns = tuple(TimeColumn(start=each.at, end=each.at + each.seconds, causes=each.by_cause) for each in run.timeline)
    ranks = run.ranks
    if len(ranks) > MAX_BARS:
        slow = {slow.rank for slow in run.slowest}
        ranks = sorted(
            sorted(ranks, key=lambda rank: (rank.rank not in slow, rank.rank))[:MAX_BARS], key=lambda rank: rank.rank
        )
    rest = f"{len(ranks)} of {len(run.ranks)} ranks, with the slowest among them" if len(ranks) < len(run.ranks) else ""
    return [
        TimeChart(
            key=f"time{suffix}",
            title="Wall time by cause",
            columns=columns,
            rules=(*restart_markers([run]), *ends),
            empty="no ledger: it is not known where the time went",
            note="share of each moment, mean over ranks",
        ),
        BarChart(
            key=f"ranks{suffix}",
            title="Time of each rank",
            rows=tuple((f"rank {each.rank}", each.by_cause) for each in ranks),
            empty="no ledger of any rank",
            note=rest,
        ),
    ]


def checkpoint_charts(run: RunReport, suffix: str) -> list[Chart]:
    """Build the charts of blocking time, duration and size of checkpoints."""
    blocked = _checkpoint_lines(run, "training was held", "held_s")
    times = [*blocked, *_checkpoint_lines(run, "until it was durable", "duration_s")]
    longest = max((each.held_s or 0.0 for each in run.checkpoints), default=0.0)
    return [
        LineChart(
            key=f"checkpoints{suffix}",
            title="Time of checkpoints",
            lines=tuple(times),
            kind="seconds",
            zero=True,
            dots=True,
            empty="no time of a checkpoint is known" if run.checkpoints else "no checkpoint was written",
            note=f"held training for {format_axis_duration(longest)} at most" if blocked else "",
        ),
        LineChart(
            key=f"checkpoint-size{suffix}",
            title="Size of checkpoints",
            lines=tuple(_checkpoint_lines(run, "size", "bytes")),
            kind="bytes",
            zero=True,
            dots=True,
            empty="no size of a checkpoint is known",
        ),
    ]


def _checkpoint_lines(run: RunReport, name: str, field: str) -> list[ChartLine]:
    rows = [(each, float(number)) for each in run.checkpoints if (number := getattr(each, field)) is not None]
    over: Mapping[Axis, Sequence[float]] = {"steps": [each.step for each, _ in rows], "time": [each.at for each, _ in rows]}
    return [ChartLine(name=name, over=over, values=[number for _, number in rows])] if rows else []


def all_charts(report: Report) -> list[Chart]:
    """Build every chart of the page, in order."""
    charts = [*metric_charts(report)[0], learning_rate_chart(report), *speed_charts(report)]
    for run, suffix in runs_with_suffix(report):
        charts += [*time_charts(run, suffix), *checkpoint_charts(run, suffix)]
    return charts


def runs_with_suffix(report: Report) -> list[tuple[RunReport, str]]:
    """Return the runs with the suffix of their chart keys: empty for a single run, else the number."""
    return [(run, f"-{number}" if len(report.runs) > 1 else "") for number, run in enumerate(report.runs, start=1)]
