"""Folders of runs into a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from time import time

from dtrain.errors import ConfigError
from dtrain.report.model import Report, RunReport, Series
from dtrain.report.reading.about import differences, read_abouts
from dtrain.report.reading.attempts import Together, as_model, together
from dtrain.report.reading.events import checkpoints, events
from dtrain.report.reading.folder import (
    damage,
    is_run,
    ledger_files,
    metrics_files,
    of_ledgers,
    of_metrics,
    runs_below,
)
from dtrain.report.reading.goodput import goodput, rank_reports, slowest
from dtrain.report.reading.ledgers import fill, reading, resumes, without_collection
from dtrain.report.reading.lines import Lines, Row
from dtrain.report.reading.metrics import Metrics
from dtrain.report.reading.series import make_series, points_each
from dtrain.report.reading.timeline import SLICES, curve_of, edges_of, gauges, rank_slices, speeds, timeline

_BELOW = 5


def read_report(folders: Sequence[str | Path], *, version: str, now: float | None = None) -> Report:
    """What the folders tell.

    Args:
        folders: of runs.
        version: of dtrain.
        now: seconds since 1970; None for the clock's.

    Returns:
        A report of all folders that hold a run. The others are in its ``problems``, with whatever is missing in those.

    Raises:
        ConfigError: none of them holds a run.
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
    """What the folder of a run tells, as far as it can be read.

    Raises:
        ConfigError: there is no run in it.
    """
    path = Path(folder)
    _must_be_run(path, str(folder))
    with without_collection():
        return _read(path, str(folder), now)


def _must_be_run(path: Path, given: str) -> None:
    try:
        if is_run(path):
            return
        there = path.is_dir()
    except (OSError, ValueError) as error:  # a name that is too long, or with a zero in it
        raise ConfigError(f"report: {given[:200]!r} cannot be read: {error}") from error
    if not there:
        kind = "is a file" if path.exists() else "is not there"
        raise ConfigError(f"report: {given[:200]!r} {kind}; give the folder of a run, as dt.open_run makes it")
    below = runs_below(path)
    hint = f"runs below it: {', '.join(below[:_BELOW])}" if below else "give the folder that dt.open_run was given"
    raise ConfigError(f"report: {given[:200]!r} is no run: it has no ledger, no metrics.jsonl and no attempts; {hint}")


def _read(path: Path, given: str, now: float) -> RunReport:
    abouts, missing = read_abouts(path)
    files = ledger_files(path)
    with reading(files) as started:
        metrics, of_these = read_metrics(path, resumes(files), has_ledger=bool(files))
        ledgers, wrong = started.result(path)
    found, odd = together(ledgers, [end for each in metrics.values() for end in each.ends])
    missing += [*wrong, *odd, *of_ledgers(ledgers, found, abouts)]
    if not abouts:
        missing.append("no file about an attempt: settings, versions and the command are not known")
    started_at = min((each.begin for each in found), default=None)
    missing += of_these
    if started_at is None:
        started_at = _first_moment(metrics, abouts)
    since = started_at or 0.0
    series = _series(metrics, found, since)
    ends = [0.0, *(each.end - since for each in found), *(each.times[-1] for each in series.values() if each.times)]
    edges, rank_edges = edges_of(found, SLICES), edges_of(found, most := rank_slices(len(ledgers)))
    ranks = rank_reports(found, rank_edges, started_at=since, most=most)
    saved, saved_count = checkpoints(found, started_at=since)
    happened, counts = events(found, started_at=since)
    return RunReport(
        name=path.resolve().name or given,
        folder=given,
        started_at=started_at,
        duration_s=max(ends),
        attempts=as_model(found, abouts, started_at=since, now=now),
        ranks=ranks,
        timeline=timeline(found, edges, started_at=since, most=SLICES),
        goodput=goodput(found),
        series=series,
        speed=speeds(found, edges, started_at=since),
        gauges=gauges(found, edges, started_at=since),
        checkpoints=saved,
        checkpoint_count=saved_count,
        slowest=slowest(ranks),
        events=happened,
        event_counts=counts,
        about=abouts,
        differences=differences(abouts),
        missing=missing,
    )


def read_metrics(path: Path, resumes: Sequence[float], *, has_ledger: bool) -> tuple[dict[str, Metrics], list[str]]:
    """The metrics of a run by file, and what could not be read."""
    found: dict[str, Metrics] = {}
    missing: list[str] = []
    for name, parts in metrics_files(path).items():
        metrics = found[name] = Metrics(resumes)
        for part in parts:
            lines, malformed = Lines(part), metrics.malformed
            missing += fill(metrics, lines)
            missing += damage(part, lines.unreadable, path, metrics.malformed - malformed, "record of metrics")
        missing += of_metrics(name, metrics, has_ledger=has_ledger)
    if not found:
        missing.append("no metrics.jsonl: loss, learning rate and other metrics are not known")
    return found, missing


def _first_moment(metrics: dict[str, Metrics], abouts: dict[int, Row]) -> float | None:
    """When a run without a ledger began, as far as anybody says."""
    said = [about.get("started_at") for about in abouts.values()]
    said += [float(times[0]) for each in metrics.values() for _, times, _ in each.columns().values() if len(times)]
    known = [float(at) for at in said if isinstance(at, int | float) and math.isfinite(at) and at > 0]
    return min(known, default=None)


def _series(metrics: dict[str, Metrics], found: list[Together], since: float) -> dict[str, Series]:
    columns = {name: each.columns() for name, each in metrics.items()}
    points = points_each(sum(map(len, columns.values())))

    @cache  # most series have the same steps
    def moment(step: float) -> tuple[float, float | None]:
        curve = curve_of(found, step)
        tokens = curve.by_step(step)[1]
        return curve.moment_of(step), tokens or None

    series = {}
    for file, each in columns.items():
        beside = "" if file == next(iter(columns)) else f" ({file.removesuffix('.jsonl')})"
        for name, (steps, times, values) in each.items():
            series[name + beside] = make_series(steps, times, values, started_at=since, moment=moment, points=points)
    return series
