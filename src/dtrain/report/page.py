"""Render a report as one self-contained HTML file: prepare facts and rows in words, which ``page.html`` lays out."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shlex
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from dtrain.arguments import format_bytes, format_duration
from dtrain.report.charts import (
    AXES,
    CAUSE_PATTERNS,
    metric_charts,
    metric_names,
    metric_unit,
    run_charts,
    run_label,
    speed_charts,
)
from dtrain.report.model import Report, RunReport
from dtrain.report.results import (
    describe_command,
    describe_devices,
    describe_parameters,
    format_speed,
    list_results,
    metric_label,
)
from dtrain.run.run_files import flatten

# characters of a setting, and rows of a table
_MAX_TEXT, _MAX_ROWS = 300, 400
# metrics at the top of the page
_MAX_RESULTS = 6
# pictures, texts and tables, and bytes of each
_MAX_SAMPLES, _MAX_SAMPLE_BYTES = 24, 4 << 20
_EVENT_WORDS = {"seconds": "took", "bytes": "size", "blocked_s": "blocked training for"}


def render_page(report: Report) -> str:
    """Render the page. A script in the page draws the charts as SVG. Without the script, the page has its texts and tables."""
    metrics, left_out = metric_charts(report)
    metrics |= speed_charts(report)
    several = len(report.runs) > 1
    of_runs = [run_charts(run, f"-{number}" if several else "") for number, run in enumerate(report.runs, start=1)]
    charts = {key: chart for group in (metrics, *of_runs) for key, chart in group.items() if chart["data"]}
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    # The filter tojson escapes the characters that could end a script element.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters |= {
        "attempt": "attempt {}".format,
        "changed_settings": list_changed_settings,
        "command": describe_command,
        "comparison": compare_values,
        "deaths": list_deaths,
        "duration": format_duration,
        "environment": list_environment,
        "events": list_events,
        "label": partial(run_label, report),
        "metrics": list_metrics,
        "moment": format_moment,
        "percent": "{:.1%}".format,
        "samples": list_samples,
        "results": lambda run: dict(list_results(run)[:_MAX_RESULTS]),
        "setting": format_setting,
        "settings": list_settings,
        "spans": list_spans,
        "summary": summarize_run,
    }
    script = _read_resource("page.js")
    return environment.from_string(_read_resource("page.html")).render(
        report=report,
        axes=[axis for axis in AXES if any(axis in chart["axes"] for chart in metrics.values())],
        charts=charts,
        left_out=left_out,
        max_rows=_MAX_ROWS,
        metric_charts=metrics,
        patterns=CAUSE_PATTERNS,
        run_charts=of_runs,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=_read_resource("page.css"),
    )


def _read_resource(name: str) -> str:
    return files("dtrain.report").joinpath(name).read_text(encoding="utf-8")


def summarize_run(run: RunReport) -> dict[str, str]:
    """Return the facts at the top of the page by name. The page shows the part of a text in brackets in small letters."""
    goodput = run.goodput
    steps = [attempt.last_step for attempt in run.attempts] or [series.last_step for series in run.series.values()]
    facts = {"steps": f"{max(steps):,}" if steps else "none"}
    facts |= {"speed (median)": speed} if (speed := format_speed(run)) else {}
    facts |= {"parameters": count} if (count := describe_parameters(run)) else {}
    if run.attempts:
        facts["ranks"] = describe_devices(run) or str(run.attempts[-1].world_size)
    facts |= {"duration": format_duration(run.duration_s), "began (UTC)": format_moment(run.started_at)}
    facts["goodput"] = "unknown (no ledger says where the time went)"
    if goodput:
        productive, total = format_duration(goodput.productive_s), format_duration(goodput.total_s)
        facts["goodput"] = f"{goodput.share:.1%} ({productive} of {total} were compute that counts)"
    if run.attempts:
        facts["restarts"] = str(len(run.attempts) - 1)
    if len(run.attempts) > 1:
        facts["steps done again"] = str(sum(attempt.lost_steps for attempt in run.attempts))
        facts |= {"lost to restarts": format_duration(goodput.by_cause.get("restart", 0.0))} if goodput else {}
    if run.checkpoint_count:
        facts["checkpoints"] = str(run.checkpoint_count)
    return facts


def compare_values(report: Report) -> list[list[str]]:
    """Return a row for each result, with the value of each run."""
    rows = [
        ["goodput", *(f"{run.goodput.share:.1%}" if run.goodput else "" for run in report.runs)],
        ["duration", *(format_duration(run.duration_s) for run in report.runs)],
        ["restarts", *(str(len(run.attempts) - 1) if run.attempts else "" for run in report.runs)],
    ]
    for name in metric_names(report):
        values = [run.series[name].last if name in run.series else None for run in report.runs]
        rows.append([metric_label(name), *(format_value(value, name) for value in values)])
    return rows


def list_changed_settings(report: Report) -> list[list[str]]:
    """Return a row for each setting that differs between runs, with the value of each run."""
    settings = [list_settings(run) for run in report.runs]
    names = sorted({name for each in settings for name in each})
    rows = [[name, *(each.get(name, "") for each in settings)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def list_metrics(report: Report) -> list[list[str]]:
    """Return a row for each metric of each run."""
    rows = []
    for name in metric_names(report):
        for run in report.runs:
            if (series := run.series.get(name)) is not None:
                values = [format_value(value, name) for value in (series.last, series.low, series.high)]
                rows.append([run_label(report, run, name), *values, f"{series.count:,}", str(series.non_finite)])
    return rows


def list_spans(run: RunReport) -> list[list[str]]:
    """Return a row for each span, that with the longest time first."""
    spans: dict[str, list[tuple[int, float, str]]] = {}
    for rank in run.ranks:
        for name, span in rank.by_span.items():
            spans.setdefault(name, []).append(span)
    rows = []
    for name, of_ranks in sorted(spans.items(), key=lambda item: -sum(seconds for _, seconds, _ in item[1])):
        counts, seconds, categories = zip(*of_ranks, strict=True)
        times = (format_duration(sum(seconds) / len(run.ranks)), format_duration(max(seconds)))
        rows.append([name, categories[0], str(max(counts)), *times])
    return rows


def list_deaths(run: RunReport) -> list[list[str]]:
    """Return a row for each death."""
    rows = []
    for death in run.deaths[:_MAX_ROWS]:
        keys = ("rank", "step", "lost_steps", "survivors")
        numbers = ["" if death[key] is None else f"{death[key]:.0f}" for key in keys]
        seconds = "" if death["seconds"] is None else f"{death['seconds']:.2f} s"
        parts = ", ".join(f"{name} {value:.2f}" for name, value in death["parts"].items() if value is not None)
        facts = [death["cause"], death["tier"] or "nothing", numbers[1], seconds, *numbers[2:], parts[:_MAX_TEXT]]
        rows.append([format_duration(death["at"]), numbers[0], *facts])
    return rows


def list_events(run: RunReport) -> list[list[str]]:
    """Return a row for each event."""
    rows = []
    for event in run.events[:_MAX_ROWS]:
        fields = [
            f"{_EVENT_WORDS.get(name, name.removesuffix('_s'))} {format_value(value, name)}"
            for name, value in event["fields"].items()
        ]
        numbers = ["" if event[key] is None else str(event[key]) for key in ("attempt", "rank", "step")]
        rows.append([format_duration(event["at"]), event["name"], *numbers, ", ".join(fields)[:_MAX_TEXT]])
    return rows


def list_samples(run: RunReport) -> list[dict[str, Any]]:
    """Return pictures as data addresses, texts, and tables with columns and rows; a file that is too large has a note."""
    samples = []
    for row in run.samples[:_MAX_SAMPLES]:
        file, sample = Path(row["file"]), {**row, "kind": "text", "text": ""}
        try:
            size = file.stat().st_size
            if size > _MAX_SAMPLE_BYTES:
                sample["text"] = f"{format_bytes(size)} are too many for the page, see {file}"
            elif row["kind"] == "image":
                sample |= {"kind": "image", "address": f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"}
            elif row["kind"] == "table":
                content = json.loads(file.read_bytes())
                cells = [[format_value(cell, "") for cell in values] for values in content["data"]]
                sample |= {"kind": "table", "columns": [str(name) for name in content["columns"]], "rows": cells}
            else:
                sample["text"] = file.read_text(encoding="utf-8", errors="replace")
        # A file may be cut or written by hand.
        except (OSError, ValueError, KeyError, TypeError) as error:
            sample["text"] = f"{file} cannot be read: {error}"
        samples.append(sample)
    return samples


def list_settings(run: RunReport) -> dict[str, str]:
    """Return the settings of the last attempt."""
    return format_facts(run.about[max(run.about)].get("settings", {})) if run.about else {}


def list_environment(run: RunReport) -> list[tuple[str, str]]:
    """Return the facts about the last attempt, without settings."""
    about = {name: value for name, value in run.about[max(run.about)].items() if name != "settings"}
    if isinstance(started_at := about.get("started_at"), int | float):
        about["started_at"] = f"{format_moment(started_at)} UTC"
    return list(format_facts(about).items())


def format_moment(seconds: float | None) -> str:
    """Format seconds since 1970: ``"2026-01-31 12:00"``."""
    if seconds is None or not 0 <= seconds < 253e9:
        return "unknown"
    return f"{datetime.fromtimestamp(seconds, tz=UTC):%Y-%m-%d %H:%M}"


def format_value(value: Any, name: str) -> str:
    """Format a number with the unit that its name tells; other values as a setting."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "" if value is None else format_setting(value)
    unit = metric_unit(name)
    if name == "seconds" or unit == "s":
        return format_duration(value)
    if isinstance(value, int) and not unit:
        return f"{value:,}"
    if unit:
        return format_bytes(value) if unit == "B" else f"{value:.1%}"
    return f"{value:,.0f}" if 1e5 <= abs(value) < 1e9 else f"{value:.5g}"


def format_setting(value: Any) -> str:
    """Format a setting as text of limited length: texts as they are, other values as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def format_facts(facts: Any) -> dict[str, str]:
    """Format nested facts by dotted name."""
    return {
        name: format_setting(shlex.join(map(str, value)) if name.endswith("command") and isinstance(value, list) else value)
        for name, value in flatten(facts)
    }
