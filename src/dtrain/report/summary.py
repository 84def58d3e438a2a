"""Summarize a report in at most ten lines for the terminal."""

from __future__ import annotations

from dtrain.report.format import format_count, format_duration
from dtrain.report.model import Report, RunReport

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
        lines.append(
            f"restarts: {len(run.attempts) - 1}; down {format_duration(goodput.down_s)}, set up again "
            f"{format_duration(goodput.again_s)}, lost {format_count(lost, 'step')} and {format_duration(goodput.lost_s)}"
        )
    if errors := [f"attempt {each.number}, {each.error}" for each in run.attempts if each.error]:
        lines.append(f"failed: {errors[-1][:200]}")
    if run.checkpoint_count:
        blocked = [each.held_s for each in run.checkpoints if each.held_s is not None]
        total, longest = format_duration(sum(blocked)), format_duration(max(blocked, default=0.0))
        stall = f"; held training for {total} in all, {longest} at most" if blocked else ""
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
    return f"{last_attempt.how} at step {last_attempt.last_step:,}, after {format_duration(run.duration_s)} on {ranks}"


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
