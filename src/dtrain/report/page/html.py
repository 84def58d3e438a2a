"""Render a report as one self-contained HTML file, readable without network and without script."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Any

from dtrain.report.model import Report, RunReport
from dtrain.report.page import build_charts
from dtrain.report.page.charts import Chart, cause_css, known_causes, svg_patterns
from dtrain.report.page.html_parts import cause_legend, cause_table, charts_json, render_chart, render_table
from dtrain.report.page.scales import format_axis_duration, format_value

# characters of a setting
_MAX_TEXT = 300
# rows of a table
_MAX_ROWS = 400


def render_page(report: Report) -> str:
    """Render the page."""
    metrics, left_out = build_charts.metric_charts(report)
    rates, speeds = build_charts.learning_rate_chart(report), build_charts.speed_charts(report)
    drawn: list[Chart] = [*metrics, rates, *speeds]
    sections = [("runs" if len(report.runs) > 1 else "run", "", _cards(report))]
    if len(report.runs) > 1:
        sections.append(("comparison", "Comparison", _comparison(report)))
    sections += [
        ("metrics", "Loss and metrics", _render_charts(metrics) + _hidden_metrics_note(left_out)),
        ("rate", "Learning rate", _render_charts([rates])),
        ("speed", "Speed and memory", _render_charts(speeds)),
    ]
    for key, title, make in (
        ("where", "Where the time went", build_charts.time_charts),
        ("saves", "Checkpoints", build_charts.checkpoint_charts),
    ):
        bodies = []
        for run, suffix in build_charts.runs_with_suffix(report):
            charts = make(run, suffix)
            drawn += charts
            more = (cause_table(run.goodput.by_cause) if run.goodput else "", _attempt_table(run) + _span_table(run))
            before, after = more if key == "where" else ("", "")
            bodies.append(_run_title(report, run) + before + _render_charts(charts) + after)
        sections.append((key, title, "".join(bodies)))
    for key, title, body in (
        ("slowest", "Slowest ranks", _slowest_ranks),
        ("events", "Events", _event_table),
        ("about", "Environment", _environment),
    ):
        sections.append((key, title, "".join(_run_title(report, run) + body(run) for run in report.runs)))
    return _document(report, sections, charts_json(drawn))


def _document(report: Report, sections: list[tuple[str, str, str]], numbers: str) -> str:
    style, script = _resource("page.css") + cause_css(), _resource("page.js")
    policy = (
        f"default-src 'none'; style-src 'sha256-{_csp_digest(style)}'; script-src 'sha256-{_csp_digest(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in sections if title)
    body = "".join(
        f'<section id="{key}">{_section_title(title)}{_controls() if key == "metrics" else ""}{inside}</section>'
        for key, title, inside in sections
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,">'
        f"<title>{escape(report.title)}</title><style>{style}</style></head>"
        f'<body><a class="skip" href="#main">Skip to the report</a>{svg_patterns()}'
        f'<header class="top"><h1>{escape(report.title)}</h1>'
        f'<nav aria-label="Sections">{links}</nav></header><main id="main" tabindex="-1">{_problems(report)}{body}</main>'
        f"<footer>Written by dtrain {escape(report.version)} at {_format_time(report.written_at)} UTC.</footer>"
        f'<script type="application/json" id="numbers">{numbers}</script><script>{script}</script></body></html>\n'
    )


def _section_title(title: str) -> str:
    return f"<h2>{title}</h2>" if title else ""


def _resource(name: str) -> str:
    return files("dtrain.report.page").joinpath(name).read_text(encoding="utf-8")


def _csp_digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _format_time(seconds: float | None) -> str:
    if seconds is None or not 0 <= seconds < 253e9:
        return "unknown"
    at = datetime.fromtimestamp(seconds, tz=UTC)
    return f'<time datetime="{at:%Y-%m-%dT%H:%M:%SZ}">{at:%Y-%m-%d %H:%M}</time>'


def _problems(report: Report) -> str:
    if not report.problems:
        return ""
    lines = "".join(f"<li>{escape(problem)}" for problem in report.problems)
    many = (
        f"{len(report.problems)} things are missing or damaged"
        if len(report.problems) > 1
        else "Something is missing or damaged"
    )
    return f'<section id="problems" class="problems" aria-label="Problems"><h2>{many}</h2><ul>{lines}</ul></section>'


def _controls() -> str:
    """Render the chart controls. The script shows the form, which is useless without the script."""
    axes = "".join(
        f'<label><input type="radio" name="axis" value="{axis}"{checked}><span>{axis}</span></label>'
        for axis, checked in (("steps", " checked"), ("tokens", ""), ("time", ""))
    )
    return (
        '<form class="controls" id="controls" hidden aria-label="How charts are drawn">'
        f"<fieldset><legend>over</legend>{axes}</fieldset>"
        '<label><input type="checkbox" id="log"> log scale</label>'
        '<label>smooth losses <input type="range" id="smooth" min="0" max="99" value="0">'
        '<output id="smoothed">off</output></label></form>'
    )


def _render_charts(charts: Iterable[Chart]) -> str:
    return f'<div class="figures">{"".join(map(render_chart, charts))}</div>'


def _hidden_metrics_note(many: int) -> str:
    return f'<p class="note">{many} more metrics are not drawn; <code>dtrain report --json</code> has them.</p>' if many else ""


def _run_title(report: Report, run: RunReport) -> str:
    return f'<h3 class="run">{escape(build_charts.run_label(report, run))}</h3>' if len(report.runs) > 1 else ""


def _cards(report: Report) -> str:
    return f'<div class="cards">{"".join(_card(run) for run in report.runs)}</div>'


def _card(run: RunReport) -> str:
    goodput = run.goodput
    how = run.attempts[-1].how if run.attempts else "unknown"
    steps = [attempt.last_step for attempt in run.attempts] or [series.last_step for series in run.series.values()]
    lost = sum(attempt.lost_steps for attempt in run.attempts)
    facts = {
        "steps": str(max(steps)) if steps else "none",
        "duration": format_axis_duration(run.duration_s),
        "restarts": str(len(run.attempts) - 1) if run.attempts else "unknown",
        "lost to restarts": f"{format_axis_duration(goodput.by_cause.get('restart', 0.0))}" if goodput else "unknown",
        "steps done again": str(lost) if run.attempts else "unknown",
        "ranks": str(run.attempts[-1].world_size) if run.attempts else "unknown",
        "began (UTC)": _format_time(run.started_at),
    }
    big = (
        f'<p class="goodput"><b>{goodput.share * 100:.1f}<small>\u202f%</small></b> goodput</p>'
        f'<p class="note">{format_axis_duration(goodput.productive_s)} of {format_axis_duration(goodput.total_s)} were compute '
        "that counts</p>"
        if goodput else '<p class="goodput"><b>?</b> goodput</p><p class="note">no ledger says where the time went</p>'
    )  # fmt: skip
    errors = "".join(f'<p class="error">attempt {attempt.number} {attempt.how}: {escape(attempt.error)}</p>'
                     for attempt in run.attempts if attempt.error)  # fmt: skip
    listed = "".join(f"<div><dt>{name}</dt><dd>{text}</dd></div>" for name, text in facts.items())
    bar = _time_bar(goodput.by_cause) if goodput else ""
    return (
        f'<article class="card"><header><h2>{escape(run.name)}</h2><span class="state {how}">{how}</span></header>'
        f'<div class="sides"><div>{big}</div><dl>{listed}</dl></div>{bar}{errors}</article>'
    )


def _time_bar(by_cause: Mapping[str, float]) -> str:
    causes = known_causes(by_cause)
    total = sum(causes.values()) or 1.0
    left, parts = 0.0, []
    for name, seconds in causes.items():
        x, width = left / total * 100, seconds / total * 100
        parts.append(
            f'<rect x="{x:.2f}%" width="{width:.2f}%" height="100%" fill="url(#fill-{name})">'
            f"<title>{name} {format_axis_duration(seconds)}</title></rect>"
        )
        left += seconds
    words = ", ".join(f"{name} {format_axis_duration(seconds)}" for name, seconds in causes.items())
    return (
        f'<svg class="whole" role="img" aria-label="Wall time by cause: {words}">{"".join(parts)}</svg>{cause_legend(causes)}'
    )


def _comparison(report: Report) -> str:
    head = ["", *(build_charts.run_label(report, run) for run in report.runs)]
    rows = [
        ["goodput", *(f"{run.goodput.share * 100:.1f}\u202f%" if run.goodput else "" for run in report.runs)],
        ["duration", *(format_axis_duration(run.duration_s) for run in report.runs)],
        ["restarts", *(str(max(0, len(run.attempts) - 1)) if run.attempts else "" for run in report.runs)],
        *([name, *(_last_value(run, name) for run in report.runs)] for name in build_charts.metric_names(report)[:_MAX_ROWS]),
    ]
    settings = [flatten_mapping(run.about[max(run.about)].get("settings", {})) if run.about else {} for run in report.runs]
    names = sorted({name for each in settings for name in each})
    other = [[name, *(each.get(name, "") for each in settings)] for name in names
             if len({each.get(name) for each in settings}) > 1]  # fmt: skip
    differ = (
        render_table(["setting", *head[1:]], other[:_MAX_ROWS], texts=range(len(head)))
        if other
        else '<p class="nothing">no setting differs</p>'
    )
    return f"<h3>Last values</h3>{render_table(head, rows)}<h3>Settings that differ</h3>{differ}"


def _last_value(run: RunReport, name: str) -> str:
    series = run.series.get(name)
    return format_value(series.last, build_charts.axis_kind(name)) if series and series.last is not None else ""


def _attempt_table(run: RunReport) -> str:
    if not run.attempts:
        return ""
    rows = [
        [str(each.number), format_axis_duration(each.at), each.how, f"{each.first_step} to {each.last_step}",
         str(each.world_size), format_axis_duration(each.down_s), format_axis_duration(each.setup_s),
         f"{each.lost_steps} ({format_axis_duration(each.lost_s)})" if each.lost_steps else "0",
         format_setting(each.resumed_from or "")]
        for each in run.attempts[:_MAX_ROWS]
    ]  # fmt: skip
    head = ["attempt", "began at", "end", "steps", "ranks", "down before", "set-up", "steps done again", "resumed from"]
    return f"<h4>Attempts</h4>{render_table(head, rows, texts=(2, 8))}"


def _span_table(run: RunReport) -> str:
    names = {name for rank in run.ranks for name in rank.by_span}
    if not names:
        return ""
    totals = {name: [rank.by_span[name] for rank in run.ranks if name in rank.by_span] for name in names}
    mean = {name: sum(each.seconds for each in spent) / len(run.ranks) for name, spent in totals.items()}
    rows = [
        [name, totals[name][0].cause, str(max(each.count for each in totals[name])), format_axis_duration(mean[name]),
         format_axis_duration(max(each.seconds for each in totals[name]))]
        for name in sorted(names, key=lambda name: -mean[name])
    ]  # fmt: skip
    listed = render_table(["span", "counts as", "times", "mean over ranks", "most of a rank"], rows, texts=(0, 1))
    return f"<details><summary>Time by span</summary>{listed}</details>"


def _slowest_ranks(run: RunReport) -> str:
    if not run.slowest:
        return '<p class="nothing">no rank kept the others waiting for long, or there is only one</p>'
    rows = [
        [
            f"rank {slow.rank}",
            slow.host,
            format_axis_duration(slow.waited_for_s),
            format_axis_duration(slow.stall_s),
            format_axis_duration(slow.compute_s),
            slow.text,
        ]
        for slow in run.slowest
    ]
    why = "Ranks wait for each other in every step: the one that waits least is the one that the others wait for."
    return f'<p class="note">{why}</p>' + render_table(
        ["rank", "host", "others waited", "it waited", "compute", "what it says"], rows, texts=(0, 1, 5)
    )


def _event_table(run: RunReport) -> str:
    if not run.events:
        return '<p class="nothing">no event was recorded</p>'
    rows = [
        [format_axis_duration(event.at), event.name, str(event.attempt), str(event.rank),
         "" if event.step is None else str(event.step),
         ", ".join(f"{name.removesuffix('_s')} {_format_field(name, item)}" for name, item in event.fields.items())[:_MAX_TEXT]]
        for event in run.events[:_MAX_ROWS]
    ]  # fmt: skip
    counts = ", ".join(f"{name} {many}" for name, many in sorted(run.event_counts.items()))
    return f'<p class="note">{escape(counts)}</p>' + render_table(
        ["at", "event", "attempt", "rank", "step", "more"], rows, texts=(1, 5)
    )


def _format_field(name: str, item: Any) -> str:
    if isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item):
        if name in ("seconds", "held_s"):
            return format_axis_duration(item)
        return format_value(item, build_charts.axis_kind(name))
    return format_setting(item)


def _environment(run: RunReport) -> str:
    if not run.about:
        return '<p class="nothing">it is not known what was run: the folder has no file about an attempt</p>'
    newest = max(run.about)
    changed = {each.name for each in run.differences}
    parts = []
    if run.differences:
        numbers = sorted({number for each in run.differences for number in each.values})
        rows = [
            [each.name, *(format_setting(each.values.get(number, "")) for number in numbers)]
            for each in run.differences[:_MAX_ROWS]
        ]
        table = render_table(["", *(f"attempt {each}" for each in numbers)], rows, texts=range(len(numbers) + 1))
        parts.append(f"<h4>What changed between attempts</h4>{table}")
    facts = [[name, text] for name, text in flatten_mapping(run.about[newest]).items()]
    marked = frozenset(name for name, _ in facts if name in changed)
    listed = render_table(["", f"attempt {newest}"], facts[:_MAX_ROWS], texts=(0, 1), marked=marked)
    parts.append(f"<details open><summary>All of attempt {newest}</summary>{listed}</details>")
    return "".join(parts)


def flatten_mapping(settings: Any, name: str = "") -> dict[str, str]:
    """Flatten nested settings into dotted names."""
    if name.endswith("command") and isinstance(settings, list):
        return {name: format_setting(shlex.join(map(str, settings)))}
    if isinstance(settings, Mapping) and settings:
        return {
            key: text
            for part, inner in settings.items()
            for key, text in flatten_mapping(inner, f"{name}.{part}" if name else str(part)).items()
        }
    return {name: format_setting(settings)} if name else {}


def format_setting(item: Any) -> str:
    """Format a setting as a text of limited length."""
    text = item if isinstance(item, str) else json.dumps(item, default=str, ensure_ascii=False)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}\N{HORIZONTAL ELLIPSIS}"
