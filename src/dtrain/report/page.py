"""Render a report as one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Any

from dtrain.arguments import format_bytes, format_count, format_duration
from dtrain.report.charts import (
    AXES,
    CAUSE_PATTERNS,
    Chart,
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

# characters of a setting, rows of a table, and rows of a table that is open at first
_MAX_TEXT, _MAX_ROWS, _MAX_OPEN_ROWS = 300, 400, 15
# metrics at the top of the page
_MAX_RESULTS = 6
_EVENT_WORDS = {"seconds": "took", "bytes": "size", "blocked_s": "blocked training for"}


def render_page(report: Report) -> str:
    """Render the page. A script in the page draws the charts as SVG. Without the script, the page has its texts and tables."""
    script = _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The page and its script set styles of elements. No address is allowed, so the page cannot send anything.
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    body, charts = _sections(report)
    # Inside a script element, only these characters could end the element.
    numbers = json.dumps(charts, separators=(",", ":"), allow_nan=False)
    numbers = numbers.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    title = escape(report.title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        '<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{_resource('page.css')}</style>"
        "<noscript><style>#controls, .figures { display: none; }</style></noscript></head>"
        f"<body><noscript><p>The charts need JavaScript. The tables do not.</p></noscript>{_patterns()}{body}"
        f"<footer>Written by dtrain {escape(report.version)} at {_format_time(report.written_at)} UTC.</footer>"
        f'<script type="application/json" id="charts">{numbers}</script><script>{script}</script></body></html>\n'
    )


def _resource(name: str) -> str:
    return files("dtrain.report").joinpath(name).read_text(encoding="utf-8")


def _patterns() -> str:
    """Define the patterns of the time categories for all charts."""
    patterns = "".join(
        f'<pattern id="pattern-{cause}" width="8" height="8" patternUnits="userSpaceOnUse"><path d="{strokes}"/></pattern>'
        for cause, strokes in CAUSE_PATTERNS.items()
    )
    return f'<svg class="patterns" aria-hidden="true"><defs>{patterns}</defs></svg>'


def _sections(report: Report) -> tuple[str, dict[str, Chart]]:
    """Return the body of the page, and its charts by the id of their element."""
    metrics, left_out = metric_charts(report)
    more = f"{format_count(left_out, 'more metric')} {'is' if left_out == 1 else 'are'}"
    note = f'<p class="note">{more} not drawn; <code>dtrain report --json</code> has all.</p>'
    several = len(report.runs) > 1
    charts = {**metrics, **speed_charts(report)}
    heading = f"<h1>{escape(report.title)}</h1>" if len(report.runs) != 1 else ""
    parts = [heading, _problems(report)]
    parts += [f'<section class="card">{_summary(run, "h2" if several else "h1")}</section>' for run in report.runs]
    parts += [_comparison(report)] if several else []
    parts += [f'<section id="metrics"><h2>Metrics</h2>{_controls(charts)}{_figures(charts)}{note if left_out else ""}']
    parts += [f"{_metric_table(report)}</section>"]
    for number, run in enumerate(report.runs, start=1):
        own = run_charts(run, f"-{number}" if several else "")
        charts |= own
        of_run = f" of {escape(run_label(report, run))}" if several else ""
        parts.append(
            f"{_settings(run, of_run)}<section><h2>Time and restarts{of_run}</h2>{_figures(own)}{_cause_table(run)}"
            f"{_attempt_table(run)}{_span_table(run)}{_slowest_ranks(run)}{_event_table(run)}{_environment(run)}</section>"
        )
    return "".join(parts), {key: chart for key, chart in charts.items() if chart["data"]}


def _figures(charts: Mapping[str, Chart]) -> str:
    """Render a frame for each chart with data, and a line of text for each without."""
    frames = "".join(
        f'<figure id="{key}" role="img" aria-label="{escape(chart["title"])}"><h3>{escape(chart["title"])}</h3>'
        '<div class="plot"></div><div class="legend"></div><div class="tip" hidden></div></figure>'
        for key, chart in charts.items()
        if chart["data"]
    )
    texts = "".join(
        f'<p class="note"><b>{escape(chart["title"])}</b>: {escape(chart["text"])}</p>'
        for chart in charts.values()
        if not chart["data"]
    )
    return (f'<div class="figures">{frames}</div>' if frames else "") + texts


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def _controls(charts: Mapping[str, Chart]) -> str:
    axes = [axis for axis in AXES if any(axis in chart["axes"] for chart in charts.values())]
    if not axes:
        return ""
    buttons = "".join(
        f'<label><input type="radio" name="axis" value="{axis}"{" checked" * (axis == axes[0])}> {axis}</label>'
        for axis in axes
    )
    return (
        f'<form id="controls" aria-label="Axes">{buttons}<label><input type="checkbox" id="log"> log scale</label>'
        '<label>smooth losses <input type="range" id="smooth" min="0" max="99" value="0"></label></form>'
    )


def _format_time(seconds: float | None) -> str:
    if seconds is None or not 0 <= seconds < 253e9:
        return "unknown"
    return f"{datetime.fromtimestamp(seconds, tz=UTC):%Y-%m-%d %H:%M}"


def _format_value(value: Any, name: str) -> str:
    """Format a number with the unit that its name tells; other values as a setting."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "" if value is None else _format_setting(value)
    unit = metric_unit(name)
    if name == "seconds" or unit == "s":
        return format_duration(value)
    if isinstance(value, int) and not unit:
        return f"{value:,}"
    if unit:
        return format_bytes(value) if unit == "B" else f"{value:.1%}"
    return f"{value:,.0f}" if 1e5 <= abs(value) < 1e9 else f"{value:.5g}"


def _format_setting(item: Any) -> str:
    text = item if isinstance(item, str) else json.dumps(item, default=str, ensure_ascii=False)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, is_open: bool = True) -> str:
    """Render a table that can be folded, and is folded if it is long; nothing without rows."""
    if not rows:
        return ""
    top = "".join(f'<th scope="col">{escape(text)}' for text in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows[:_MAX_ROWS])
    return (
        f"<details{' open' * (is_open and len(rows) <= _MAX_OPEN_ROWS)}><summary>{escape(title)}</summary>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}"><table><thead><tr>{top}<tbody>{body}'
        "</table></div></details>"
    )


def _problems(report: Report) -> str:
    if not report.problems:
        return ""
    lines = "".join(f"<li>{escape(problem)}" for problem in report.problems)
    many = len(report.problems)
    title = f"{many} things are missing or damaged" if many > 1 else "Something is missing or damaged"
    return f'<section id="problems"><h2>{title}</h2><ul>{lines}</ul></section>'


def _summary(run: RunReport, heading: str) -> str:
    goodput = run.goodput
    outcome = run.attempts[-1].outcome if run.attempts else "unknown"
    steps = [attempt.last_step for attempt in run.attempts] or [series.last_step for series in run.series.values()]
    facts = {"steps": f"{max(steps):,}" if steps else "none"}
    facts |= {"speed (median)": speed} if (speed := format_speed(run)) else {}
    facts |= {"parameters": count} if (count := describe_parameters(run)) else {}
    if run.attempts:
        facts["ranks"] = describe_devices(run) or str(run.attempts[-1].world_size)
    facts |= {"duration": format_duration(run.duration_s), "began (UTC)": _format_time(run.started_at)}
    costs = {"goodput": "unknown (no ledger says where the time went)"}
    if goodput:
        productive, total = format_duration(goodput.productive_s), format_duration(goodput.total_s)
        costs["goodput"] = f"{goodput.share:.1%} ({productive} of {total} were compute that counts)"
    if run.attempts:
        costs["restarts"] = str(len(run.attempts) - 1)
    if len(run.attempts) > 1:
        costs["steps done again"] = str(sum(attempt.lost_steps for attempt in run.attempts))
        costs |= {"lost to restarts": format_duration(goodput.by_cause.get("restart", 0.0))} if goodput else {}
    if run.checkpoint_count:
        costs["checkpoints"] = str(run.checkpoint_count)
    errors = "".join(
        f'<p class="error">attempt {attempt.number} {attempt.outcome}: {escape(attempt.error)}</p>'
        for attempt in run.attempts
        if attempt.error
    )
    results = _list_facts(dict(list_results(run)[:_MAX_RESULTS]))
    command = f"<p><code>{escape(command)}</code></p>" if (command := describe_command(run)) else ""
    return (
        f'<{heading}>{escape(run.name)} <span class="{outcome}">{outcome}</span></{heading}>'
        f'{errors}<dl class="results">{results}</dl><dl>{_list_facts(facts | costs)}</dl>{command}'
    )


def _list_facts(facts: Mapping[str, str]) -> str:
    """Render facts. The part of a text in brackets is small."""
    rows = {name: text.partition(" (") for name, text in facts.items()}
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}{f' <small>({escape(more)}</small>' if more else ''}</dd></div>"
        for name, (text, _, more) in rows.items()
    )


def _comparison(report: Report) -> str:
    head = ["", *(run_label(report, run) for run in report.runs)]
    rows = [
        ["goodput", *(f"{run.goodput.share:.1%}" if run.goodput else "" for run in report.runs)],
        ["duration", *(format_duration(run.duration_s) for run in report.runs)],
        ["restarts", *(str(len(run.attempts) - 1) if run.attempts else "" for run in report.runs)],
    ]
    for name in metric_names(report):
        values = [run.series[name].last if name in run.series else None for run in report.runs]
        rows.append([metric_label(name), *(_format_value(value, name) for value in values)])
    settings = [flatten_mapping(run.about[max(run.about)].get("settings", {})) if run.about else {} for run in report.runs]
    names = sorted({name for each in settings for name in each})
    differ = [[name, *(each.get(name, "") for each in settings)] for name in names
              if len({each.get(name) for each in settings}) > 1]  # fmt: skip
    tables = _table("Last values", head, rows) + _table("Settings that differ", ["setting", *head[1:]], differ)
    return f'<section id="comparison"><h2>Comparison</h2>{tables}{"" if differ else _note("no setting differs")}</section>'


def _metric_table(report: Report) -> str:
    rows = [
        [run_label(report, run, name) if len(report.runs) == 1 else f"{run_label(report, run)}: {name}",
         *(_format_value(value, name) for value in (series.last, series.low, series.high)),
         f"{series.count:,}", str(series.non_finite)]
        for name in metric_names(report) for run in report.runs if (series := run.series.get(name))
    ]  # fmt: skip
    return _table("All metrics", ["metric", "last", "lowest", "highest", "records", "not finite"], rows, is_open=False)


def _cause_table(run: RunReport) -> str:
    causes = sorted(run.goodput.by_cause.items(), key=lambda item: -item[1]) if run.goodput else []
    total = sum(seconds for _, seconds in causes) or 1.0
    rows = [[name, format_duration(seconds), f"{seconds / total:.1%}"] for name, seconds in causes]
    return _table("Wall time by cause", ["cause", "time", "share"], rows)


def _attempt_table(run: RunReport) -> str:
    rows = [
        [str(each.number), format_duration(each.at), each.outcome, f"{each.first_step} to {each.last_step}",
         str(each.world_size), format_duration(each.down_s), format_duration(each.setup_s),
         f"{each.lost_steps} ({format_duration(each.lost_s)})" if each.lost_steps else "0",
         _format_setting(each.resumed_from or "")]
        for each in run.attempts
    ]  # fmt: skip
    head = ["attempt", "began at", "end", "steps", "ranks", "down before", "set-up", "steps done again", "resumed from"]
    return _table("Attempts", head, rows)


def _span_table(run: RunReport) -> str:
    spans: dict[str, list[tuple[int, float, str]]] = {}
    for rank in run.ranks:
        for name, span in rank.by_span.items():
            spans.setdefault(name, []).append(span)
    mean = {name: sum(seconds for _, seconds, _ in each) / len(run.ranks) for name, each in spans.items()}
    rows = [
        [name, spans[name][0][2], str(max(count for count, _, _ in spans[name])), format_duration(mean[name]),
         format_duration(max(seconds for _, seconds, _ in spans[name]))]
        for name in sorted(mean, key=lambda name: -mean[name])
    ]  # fmt: skip
    return _table("Time by span", ["span", "counts as", "times", "mean over ranks", "most of a rank"], rows, is_open=False)


def _slowest_ranks(run: RunReport) -> str:
    if not run.slowest:
        return _note("no rank kept the others waiting for long, or there is only one")
    rows = [
        [f"rank {slow.rank}", slow.host, format_duration(slow.waited_for_s), format_duration(slow.stall_s), slow.text]
        for slow in run.slowest
    ]
    return _table("Slowest ranks", ["rank", "host", "others waited", "it waited", "what it says"], rows)


def _event_table(run: RunReport) -> str:
    if not run.events:
        return _note("no event was recorded")
    rows = []
    for event in run.events[:_MAX_ROWS]:
        more = [
            f"{_EVENT_WORDS.get(name, name.removesuffix('_s'))} {_format_value(item, name)}"
            for name, item in event["fields"].items()
        ]
        numbers = ["" if event[key] is None else str(event[key]) for key in ("attempt", "rank", "step")]
        rows.append([format_duration(event["at"]), event["name"], *numbers, ", ".join(more)[:_MAX_TEXT]])
    counts = ", ".join(f"{name} {many}" for name, many in sorted(run.event_counts.items()))
    return _table(f"Events: {counts}", ["at", "event", "attempt", "rank", "step", "more"], rows)


def _settings(run: RunReport, of_run: str) -> str:
    """Render the settings of the last attempt, all of them visible."""
    settings = flatten_mapping(run.about[max(run.about)].get("settings", {})) if run.about else {}
    if not settings:
        return ""
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in settings.items())
    return f'<section><h2>Settings{of_run}</h2><dl class="settings">{rows}</dl></section>'


def _environment(run: RunReport) -> str:
    if not run.about:
        return _note("it is not known what was run: the folder has no file about an attempt")
    newest = max(run.about)
    numbers = sorted(run.about)
    rows = [
        [name, *(_format_setting(values.get(number, "")) for number in numbers)] for name, values in run.differences.items()
    ]
    changed = _table("What changed between attempts", ["", *(f"attempt {number}" for number in numbers)], rows)
    about = {name: value for name, value in run.about[newest].items() if name != "settings"}
    if isinstance(started_at := about.get("started_at"), int | float):
        about["started_at"] = f"{_format_time(started_at)} UTC"
    facts = [[name, text] for name, text in flatten_mapping(about).items()]
    return changed + _table(f"Environment of attempt {newest}", ["", f"attempt {newest}"], facts)


def flatten_mapping(settings: Any, name: str = "") -> dict[str, str]:
    """Flatten nested settings into dotted names."""
    if name.endswith("command") and isinstance(settings, list):
        return {name: _format_setting(shlex.join(map(str, settings)))}
    if isinstance(settings, Mapping) and settings:
        return {
            key: text
            for part, inner in settings.items()
            for key, text in flatten_mapping(inner, f"{name}.{part}" if name else str(part)).items()
        }
    return {name: _format_setting(settings)} if name else {}
