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
        raise ConfigError(" ".join(problems) or "report: folders must have at least 1 folder, got none.")
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


def _check_is_run(path: Path, name: str) -> None:
    prefix = f"report: path must be the folder of a run, got {name[:200]!r}, which"
    try:
        if is_run(path):
            return
        is_folder = path.is_dir()
    # The name may be too long or contain a null character.
    except (OSError, ValueError) as error:
        raise ConfigError(f"{prefix} cannot be read: {error}") from error
    if not is_folder:
        kind = "is a file" if path.exists() else "is not there"
        raise ConfigError(f"{prefix} {kind}. Pass the folder given to dt.open_run.")
    below = find_runs(path)
    hint = f"Runs below: {', '.join(below[:_MAX_HINTS])}." if below else "Pass the folder given to dt.open_run."
    raise ConfigError(f"{prefix} has no ledger, no metrics.jsonl and no attempts. {hint}")


def _read_run_folder(path: Path, folder: str, now: float) -> RunReport:
    abouts, missing = read_attempt_files(path)
    files = ledger_files(path)
    with ParallelLedgerReader(files) as started:
        metrics, metrics_missing = read_metrics(path, resume_steps(files), has_ledger=bool(files))
        ledgers, unreadable = started.result(path)
    merged, anomalies = merge_attempts(ledgers, [end for each in metrics.values() for end in each.ends_before_resume])
    missing += [*unreadable, *anomalies, *ledger_problems(ledgers, merged, abouts)]
    if not abouts:
        missing.append("no file about an attempt: settings, versions and the command are not known")
    started_at = min((each.begin for each in merged), default=None)
    missing += metrics_missing
    if started_at is None:
        started_at = _guess_start_time(metrics, abouts)
    since = started_at or 0.0
    series = _build_series(metrics, merged, since)
    ends = [0.0, *(each.end - since for each in merged), *(each.times[-1] for each in series.values() if each.times)]
    edges, rank_edges = slice_edges(merged, MAX_SLICES), slice_edges(merged, most := slices_per_rank(len(ledgers)))
    ranks = rank_reports(merged, rank_edges, started_at=since, most=most)
    checkpoints, checkpoint_count = checkpoint_reports(merged, started_at=since)
    events, counts = run_events(merged, started_at=since)
    return RunReport(
        name=path.resolve().name or folder,
        folder=folder,
        started_at=started_at,
        duration_s=max(ends),
        attempts=attempt_reports(merged, abouts, started_at=since, now=now),
        ranks=ranks,
        timeline=time_slices(merged, edges, started_at=since, most=MAX_SLICES),
        goodput=goodput(merged),
        series=series,
        speed=speed_samples(merged, edges, started_at=since),
        gauges=gauge_series(merged, edges, started_at=since),
        checkpoints=checkpoints,
        checkpoint_count=checkpoint_count,
        slowest=slowest_ranks(ranks),
        events=events,
        event_counts=counts,
        about=abouts,
        differences=attempt_differences(abouts),
        missing=missing,
    )


def read_metrics(path: Path, resumes: Sequence[float], *, has_ledger: bool) -> tuple[dict[str, MetricTable], list[str]]:
    """Read the metrics of a run by file, and list the problems."""
    tables: dict[str, MetricTable] = {}
    missing: list[str] = []
    for name, parts in metrics_files(path).items():
        metrics = tables[name] = MetricTable(resumes)
        for part in parts:
            lines, malformed = JsonlReader(part), metrics.malformed
            missing += read_into(metrics, lines)
            missing += read_problems(part, lines.unreadable, path, metrics.malformed - malformed, "record of metrics")
        missing += metrics_problems(name, metrics, has_ledger=has_ledger)
    if not tables:
        missing.append("no metrics.jsonl: loss, learning rate and other metrics are not known")
    return tables, missing


def _guess_start_time(metrics: dict[str, MetricTable], abouts: dict[int, Row]) -> float | None:
    """Guess the start of a run without a ledger."""
    times_of_start = [about.get("started_at") for about in abouts.values()]
    times_of_start += [float(times[0]) for each in metrics.values() for _, times, _ in each.columns().values() if len(times)]
    known = [float(at) for at in times_of_start if isinstance(at, int | float) and math.isfinite(at) and at > 0]
    return min(known, default=None)


def _build_series(metrics: dict[str, MetricTable], merged: list[MergedAttempt], since: float) -> dict[str, MetricSeries]:
    columns = {name: each.columns() for name, each in metrics.items()}
    points = points_per_series(sum(map(len, columns.values())))

    # Most series have the same steps.
    @cache
    def moment(step: float) -> tuple[float, float | None]:
        curve = curve_with_step(merged, step)
        tokens = curve.totals_at_step(step)[1]
        return curve.time_of_step(step), tokens or None

    series = {}
    for file, each in columns.items():
        beside = "" if file == next(iter(columns)) else f" ({file.removesuffix('.jsonl')})"
        for name, (steps, times, values) in each.items():
            series[name + beside] = make_series(steps, times, values, started_at=since, moment=moment, points=points)
    return series
