"""Read run folders into a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from time import time

from dtrain.errors import ConfigError
from dtrain.report.model import MetricSeries, Report, RunReport
from dtrain.report.reading.attempts import MergedAttempt, attempt_reports, checkpoint_reports, merge_attempts, run_events
from dtrain.report.reading.goodput import (
    MAX_SLICES,
    curve_with_step,
    gauge_series,
    goodput,
    rank_reports,
    slice_edges,
    slices_per_rank,
    slowest_ranks,
    speed_samples,
    time_slices,
)
from dtrain.report.reading.jsonl_reader import JsonlReader, Row
from dtrain.report.reading.metric_table import MetricTable, make_series, points_per_series
from dtrain.report.reading.parallel import ParallelLedgerReader, gc_paused, read_into, resume_steps
from dtrain.report.reading.run_files import (
    attempt_differences,
    find_runs,
    is_run,
    ledger_files,
    ledger_problems,
    metrics_files,
    metrics_problems,
    read_attempt_files,
    read_problems,
)

_MAX_HINTS = 5


def read_report(folders: Sequence[str | Path], *, version: str, now: float | None = None) -> Report:
    """Read run folders into a report.

    Args:
        folders: folders of runs.
        version: version of dtrain.
        now: seconds since 1970; None uses the clock.

    Returns:
        A report of all folders with a run. ``problems`` lists other folders and missing parts.

    Raises:
        ConfigError: no folder has a run.
    """
    now = time() if now is None else now
    read: list[RunReport] = []
    problems: list[str] = []
    for folder in folders:
        try:
            read.append(read_run(folder, now=now))
        except ConfigError as error:
            problems.append(str(error))
    if not read:
        raise ConfigError("; ".join(problems) or "report: give the folder of a run")
    several = len(read) > 1
    problems += [f"{run.name}: {line}" if several else line for run in read for line in run.missing]
    names = [run.name for run in read]
    title = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return Report(version=version, title=title, written_at=now, runs=read, problems=problems)


def read_run(folder: str | Path, *, now: float) -> RunReport:
    """Read the folder of a run, as far as possible.

    Raises:
        ConfigError: the folder has no run.
    """
    path = Path(folder)
    _check_is_run(path, str(folder))
    with gc_paused():
        return _read_run_folder(path, str(folder), now)


def _check_is_run(path: Path, given: str) -> None:
    try:
        if is_run(path):
            return
        there = path.is_dir()
    # The name may be too long or contain a null character.
    except (OSError, ValueError) as error:
        raise ConfigError(f"report: {given[:200]!r} cannot be read: {error}") from error
    if not there:
        kind = "is a file" if path.exists() else "is not there"
        raise ConfigError(f"report: {given[:200]!r} {kind}; give the folder of a run, as dt.open_run makes it")
    below = find_runs(path)
    hint = f"runs below it: {', '.join(below[:_MAX_HINTS])}" if below else "give the folder that dt.open_run was given"
    raise ConfigError(f"report: {given[:200]!r} is no run: it has no ledger, no metrics.jsonl and no attempts; {hint}")


def _read_run_folder(path: Path, given: str, now: float) -> RunReport:
    abouts, missing = read_attempt_files(path)
    files = ledger_files(path)
    with ParallelLedgerReader(files) as started:
        metrics, of_these = read_metrics(path, resume_steps(files), has_ledger=bool(files))
        ledgers, wrong = started.result(path)
    found, odd = merge_attempts(ledgers, [end for each in metrics.values() for end in each.ends_before_resume])
    missing += [*wrong, *odd, *ledger_problems(ledgers, found, abouts)]
    if not abouts:
        missing.append("no file about an attempt: settings, versions and the command are not known")
    started_at = min((each.begin for each in found), default=None)
    missing += of_these
    if started_at is None:
        started_at = _guess_start_time(metrics, abouts)
    since = started_at or 0.0
    series = _build_series(metrics, found, since)
    ends = [0.0, *(each.end - since for each in found), *(each.times[-1] for each in series.values() if each.times)]
    edges, rank_edges = slice_edges(found, MAX_SLICES), slice_edges(found, most := slices_per_rank(len(ledgers)))
    ranks = rank_reports(found, rank_edges, started_at=since, most=most)
    saved, saved_count = checkpoint_reports(found, started_at=since)
    happened, counts = run_events(found, started_at=since)
    return RunReport(
        name=path.resolve().name or given,
        folder=given,
        started_at=started_at,
        duration_s=max(ends),
        attempts=attempt_reports(found, abouts, started_at=since, now=now),
        ranks=ranks,
        timeline=time_slices(found, edges, started_at=since, most=MAX_SLICES),
        goodput=goodput(found),
        series=series,
        speed=speed_samples(found, edges, started_at=since),
        gauges=gauge_series(found, edges, started_at=since),
        checkpoints=saved,
        checkpoint_count=saved_count,
        slowest=slowest_ranks(ranks),
        events=happened,
        event_counts=counts,
        about=abouts,
        differences=attempt_differences(abouts),
        missing=missing,
    )


def read_metrics(path: Path, resumes: Sequence[float], *, has_ledger: bool) -> tuple[dict[str, MetricTable], list[str]]:
    """Read the metrics of a run by file, and list the problems."""
    found: dict[str, MetricTable] = {}
    missing: list[str] = []
    for name, parts in metrics_files(path).items():
        metrics = found[name] = MetricTable(resumes)
        for part in parts:
            lines, malformed = JsonlReader(part), metrics.malformed
            missing += read_into(metrics, lines)
            missing += read_problems(part, lines.unreadable, path, metrics.malformed - malformed, "record of metrics")
        missing += metrics_problems(name, metrics, has_ledger=has_ledger)
    if not found:
        missing.append("no metrics.jsonl: loss, learning rate and other metrics are not known")
    return found, missing


def _guess_start_time(metrics: dict[str, MetricTable], abouts: dict[int, Row]) -> float | None:
    """Guess the start of a run without a ledger."""
    times_of_start = [about.get("started_at") for about in abouts.values()]
    times_of_start += [float(times[0]) for each in metrics.values() for _, times, _ in each.columns().values() if len(times)]
    known = [float(at) for at in times_of_start if isinstance(at, int | float) and math.isfinite(at) and at > 0]
    return min(known, default=None)


def _build_series(metrics: dict[str, MetricTable], found: list[MergedAttempt], since: float) -> dict[str, MetricSeries]:
    columns = {name: each.columns() for name, each in metrics.items()}
    points = points_per_series(sum(map(len, columns.values())))

    # Most series have the same steps.
    @cache
    def moment(step: float) -> tuple[float, float | None]:
        curve = curve_with_step(found, step)
        tokens = curve.totals_at_step(step)[1]
        return curve.time_of_step(step), tokens or None

    series = {}
    for file, each in columns.items():
        beside = "" if file == next(iter(columns)) else f" ({file.removesuffix('.jsonl')})"
        for name, (steps, times, values) in each.items():
            series[name + beside] = make_series(steps, times, values, started_at=since, moment=moment, points=points)
    return series
