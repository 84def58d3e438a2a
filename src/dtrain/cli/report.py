"""Define ``dtrain report``: summarize one run or several runs, and write an HTML page about them."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain import __version__
from dtrain.arguments import format_count, format_duration
from dtrain.errors import ConfigError, escape_unprintable
from dtrain.optional_dependencies import install_command

if TYPE_CHECKING:
    from dtrain.report.model import Report, RunReport

EXAMPLES = """
dtrain report runs/gpt                                   writes runs/gpt/report.html
dtrain report runs/gpt runs/gpt-wide --output two.html   compares them
dtrain report runs/gpt --json | jq .runs[0].goodput
"""

_NOTHING_EXIT_CODE = 1


def report(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN_DIR", help="Folders of runs, as dt.open_run creates them.", show_default=False)
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="File of the page; by default RUN_DIR/report.html, for several runs ./report.html, and no page with --json.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object, for programs.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the path of the page.")] = False,
) -> int:
    """Summarize the time, speed and metrics of a run.

    Write the report as one HTML page that needs no network. The page shows metrics, goodput, speed, memory, restarts and
    checkpoints. Its charts need the extra report; without the extra, the command prints the summary alone.

    A run may still run, or may have been killed or damaged: the page shows the available data, and lists missing data.

    Exit codes: 0 written; 1 nothing in the folder could be read, or a file could not be written; 2 bad usage, no run, or
    --output without the extra.
    """
    from dtrain.report.model import to_json
    from dtrain.report.page import render_page
    from dtrain.report.read_run import read_report

    found = read_report(runs, version=__version__)
    lines = [json.dumps(to_json(found), indent=1, allow_nan=False)] if as_json else []
    if not as_json and not quiet:
        lines += map(escape_unprintable, summarize(found))
    if output is None and not as_json:
        if find_spec("plotly") is None:
            typer.echo(f"no page: its charts need the package plotly: {install_command('report')}", err=True)
        else:
            output = str(Path(runs[0] if len(runs) == 1 else ".") / "report.html")
    if output is not None:
        _write_page(output, render_page(found))
        lines += [] if as_json else [escape_unprintable(output)]
    for line in lines:
        typer.echo(line)
    return 0 if any(run.attempts or run.series or run.about for run in found.runs) else _NOTHING_EXIT_CODE


def _write_page(path: str, text: str) -> None:
    """Write a file atomically, because a browser may read the old file, and the disk may be full."""
    page_path = Path(path)
    if not page_path.parent.is_dir() or page_path.is_dir():
        problem = "is a folder" if page_path.is_dir() else "is in a folder that does not exist"
        raise ConfigError(f"report: --output {problem}, got {path!r}. Name a file in an existing folder.")
    partial = page_path.with_name(f".{page_path.name[:100]}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(page_path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"report: {path}: {error.strerror}. Choose another path with --output.") from error


_MAX_CAUSES, _MAX_METRICS, _MAX_NAME_LENGTH, _MAX_LINES = 6, 3, 40, 10


def summarize(report: Report) -> list[str]:
    """Summarize one run in detail, or several runs with one line each, in at most ten lines."""
    if len(report.runs) == 1:
        lines = _run_lines(report.runs[0])
    else:
        runs = report.runs[: _MAX_LINES - 2]
        lines = [f"{_shorten(run.name)}: {_run_state(run)}{_goodput_text(run, ', ')}{_loss_text(run)}" for run in runs]
        if len(runs) < len(report.runs):
            lines.append(f"and {format_count(len(report.runs) - len(runs), 'more run')}")
    if report.problems:
        more = len(report.problems) - 1
        rest = f" (and {more} more, in the report)" if more else ""
        lines.append(f"missing: {report.problems[0][:200]}{rest}")
    return lines


def _run_lines(run: RunReport) -> list[str]:
    lines = [f"{_shorten(run.name)}: {_run_state(run)}"]
    goodput = run.goodput
    if goodput is not None:
        productive, total = format_duration(goodput.productive_s), format_duration(goodput.total_s)
        lines.append(f"goodput: {goodput.share:.1%}, {productive} of {total} in steps that count")
        largest = sorted(((spent, cause) for cause, spent in goodput.by_cause.items()), reverse=True)[:_MAX_CAUSES]
        if goodput.total_s > 0:
            lines.append("time: " + ", ".join(f"{cause} {spent / goodput.total_s:.1%}" for spent, cause in largest))
    if len(run.attempts) > 1 and goodput is not None:
        lost = sum(each.lost_steps for each in run.attempts)
        down, setup, lost_time = map(format_duration, (goodput.down_s, goodput.repeated_setup_s, goodput.lost_s))
        lost_steps = format_count(lost, "step")
        lines.append(f"restarts: {len(run.attempts) - 1}; down {down}, set up again {setup}, lost {lost_steps} and {lost_time}")
    if errors := [f"attempt {each.number}, {each.error}" for each in run.attempts if each.error]:
        lines.append(f"failed: {errors[-1][:200]}")
    if run.checkpoint_count:
        blocked = [each["blocked_s"] for each in run.checkpoints if each["blocked_s"] is not None]
        total, longest = format_duration(sum(blocked)), format_duration(max(blocked, default=0.0))
        stall = f"; blocked training for {total} in all, {longest} at most" if blocked else ""
        lines.append(f"checkpoints: {run.checkpoint_count}{stall}")
    if run.slowest:
        lines.append(f"slow: {run.slowest[0].text[:200]}")
    if text := _last_metrics(run):
        lines.append(f"metrics: {text}")
    return lines


def _run_state(run: RunReport) -> str:
    if not run.attempts:
        last = max((series.last_step for series in run.series.values()), default=None)
        return "no ledger" if last is None else f"no ledger; step {last:,}"
    last_attempt = run.attempts[-1]
    ranks = format_count(last_attempt.world_size, "rank")
    return f"{last_attempt.outcome} at step {last_attempt.last_step:,}, after {format_duration(run.duration_s)} on {ranks}"


def _goodput_text(run: RunReport, before: str) -> str:
    return "" if run.goodput is None else f"{before}goodput {run.goodput.share:.1%}"


def _loss_text(run: RunReport) -> str:
    last = run.series["loss"].last if "loss" in run.series else None
    return "" if last is None else f", loss {last:.4g}"


def _last_metrics(run: RunReport) -> str:
    names = sorted(run.series, key=lambda name: ("loss" not in name, "/" in name, name))[:_MAX_METRICS]
    values = [(name, run.series[name].last) for name in names]
    return ", ".join(f"{_shorten(name)} {'not finite' if value is None else format(value, '.4g')}" for name, value in values)


def _shorten(name: str) -> str:
    return name if len(name) <= _MAX_NAME_LENGTH else name[: _MAX_NAME_LENGTH - 1] + "…"
