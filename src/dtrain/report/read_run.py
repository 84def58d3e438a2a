"""Read run folders into a report, and describe missing or damaged parts. ``LiveRun`` follows the files of a running job."""

from __future__ import annotations

import gc
import math
import re
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any

import numpy as np

from dtrain.arguments import format_count, single_line
from dtrain.errors import ConfigError
from dtrain.report.attempts import (
    ALL_RANK_EVENTS,
    MergedAttempt,
    attempt_reports,
    checkpoint_reports,
    death_reports,
    death_row,
    describe_death,
    gauge_series,
    goodput,
    merge_attempts,
    rank_reports,
    run_events,
    slice_edges,
    slowest_ranks,
    step_moments,
    timeline,
    trim_data,
    world_size,
)
from dtrain.report.ledger import AT, CAUSE_COLUMN, CAUSES, SAMPLES, STEP, TOKENS, WIDTH, AttemptLedger, RankLedger
from dtrain.report.metric_table import MetricTable, make_series, points_per_series, to_number
from dtrain.report.model import Column, MetricSeries, Report, RunReport
from dtrain.run import run_files
from dtrain.run.run_files import (
    FORMAT,
    TIME,
    JsonlReader,
    Row,
    attempt_files,
    flatten,
    ledger_files,
    metrics_files,
    newest_media,
    read_attempt,
    step_from_record,
)

_MAX_HINTS = 5
# lines of one kind
_MAX_PROBLEMS = 12
_MAX_DIFFERENCES = 200
# facts that differ between all attempts
_TIMES = re.compile(r"(^|\.)(format|attempt|pid|time|at|[^.]*_at)(\.|$)")
_MAX_METADATA_DEPTH = 6
# window of current rates: a few ledger lines
_WINDOW_S = 60.0
_MAX_EVENTS = 200
_SHOWN_CAUSES = ("compute", "data", "stall", "checkpoint")


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
    runs: list[RunReport] = []
    problems: list[str] = []
    for folder in folders:
        try:
            runs.append(read_run(folder, now=now))
        except ConfigError as error:
            problems.append(str(error))
    if not runs:
        raise ConfigError(" ".join(problems) or "report: folders must have at least 1 folder, got none.")
    problems += [f"{run.name}: {line}" if len(runs) > 1 else line for run in runs for line in run.missing]
    title = ", ".join(run.name for run in runs[:4]) + (f" and {len(runs) - 4} more" if len(runs) > 4 else "")
    return Report(version=version, title=title, written_at=now, runs=runs, problems=problems)


def read_run(folder: str | Path, *, now: float) -> RunReport:
    """Read the folder of a run, as far as possible.

    Raises:
        ConfigError: the folder has no run.
    """
    path = Path(folder)
    _check_is_run(path, str(folder))
    # Collection would take a fifth of the time, and the millions of objects have no cycles.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _read_run(path, str(folder), now)
    finally:
        if was_enabled:
            gc.enable()


def _read_run(path: Path, folder: str, now: float) -> RunReport:
    abouts, missing = _read_attempt_files(path)
    ledgers, ledger_problems = [], list[str]()
    for rank, file in ledger_files(path).items():
        ledgers.append(RankLedger(rank))
        ledger_problems += _read_file(file, path, ledgers[-1], "line of a ledger")
    resumes = [lines.first_step for ledger in ledgers[:1] for lines in ledger.attempts.values() if lines.has_lines]
    metrics, metrics_problems = _read_metrics(path, [step for step in resumes if step > 0], has_ledger=bool(ledgers))
    merged, anomalies = merge_attempts(ledgers, [end for each in metrics.values() for end in each.ends_before_resume])
    missing += [*ledger_problems, *anomalies, *_missing_in_ledgers(ledgers, merged, abouts)]
    if not abouts:
        missing.append("no file about an attempt: settings, versions and the command are not known")
    missing += metrics_problems
    starts = [each.begin for each in merged]
    # Without a ledger, the first record of metrics is close to the start.
    if not starts:
        times: list[Any] = [about.get("started_at") for about in abouts.values()]
        times += [float(rows[0, 1]) for table in metrics.values() for rows in table.columns().values()]
        starts = [float(at) for at in times if isinstance(at, int | float) and math.isfinite(at) and at > 0]
    started_at = min(starts, default=None)
    origin = started_at or 0.0
    series = _build_series(metrics, merged, origin)
    ends = [each.end - origin for each in merged] + [float(each.times[-1]) for each in series.values() if len(each.times)]
    edges, ranks = slice_edges(merged), rank_reports(merged)
    facts = {
        number: {name: value for name, value in flatten(about) if value != {} and not _TIMES.search(name)}
        for number, about in abouts.items()
    }
    names = sorted({name for each in facts.values() for name in each})
    changed = [name for name in names if len({repr(each.get(name)) for each in facts.values()}) > 1]
    checkpoints, checkpoint_count = checkpoint_reports(merged, started_at=origin)
    events, counts = run_events(merged, started_at=origin)
    return RunReport(
        name=path.resolve().name or folder,
        folder=folder,
        samples=newest_media(path),
        started_at=started_at,
        duration_s=max(ends, default=0.0),
        attempts=attempt_reports(merged, abouts, started_at=origin, now=now),
        ranks=ranks,
        timeline=timeline(merged, edges, started_at=origin),
        goodput=goodput(merged),
        series=series,
        gauges=gauge_series(merged, edges, started_at=origin),
        checkpoints=checkpoints,
        checkpoint_count=checkpoint_count,
        deaths=death_reports(merged, started_at=origin),
        slowest=slowest_ranks(ranks),
        events=events,
        event_counts=counts,
        about=abouts,
        differences={name: {number: each.get(name) for number, each in facts.items()} for name in changed[:_MAX_DIFFERENCES]},
        missing=missing,
    )


def _check_is_run(path: Path, name: str) -> None:
    prefix = f"report: path must be the folder of a run, got {name[:200]!r}, which"
    try:
        if _is_run(path):
            return
        is_folder = path.is_dir()
    # The name may be too long or contain a null character.
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{prefix} cannot be read: {str(error).rstrip('.')}. Pass the folder given to dt.open_run."
        ) from error
    if not is_folder:
        kind = "is a file" if path.exists() else "is not there"
        raise ConfigError(f"{prefix} {kind}. Pass the folder given to dt.open_run.")
    try:
        runs = sorted(each.name for each in path.iterdir() if each.is_dir() and _is_run(each))
    except OSError:
        runs = []
    hint = f"Runs below: {', '.join(runs[:_MAX_HINTS])}." if runs else "Call dt.open_run in the loop, and pass its folder."
    raise ConfigError(f"{prefix} has no ledger, no metrics.jsonl and no attempts. {hint}")


def _is_run(folder: Path) -> bool:
    return bool(ledger_files(folder) or metrics_files(folder) or attempt_files(folder))


def _read_file(path: Path, folder: Path, into: RankLedger | MetricTable, kind: str) -> list[str]:
    """Read a file of JSON lines to its end, and describe its problems."""
    lines, malformed, name = JsonlReader(path), into.malformed, path.relative_to(folder).as_posix()
    problems = []
    try:
        for rows in lines.read_batches(whole_file=True):
            into.add(rows)
    except OSError as error:
        problems.append(f"{path.name}: cannot be read: {error.strerror or error}")
    if lines.unreadable:
        problems.append(f"{name}: {format_count(lines.unreadable, 'line')} could not be read: cut short, or damaged")
    if malformed := into.malformed - malformed:
        problems.append(f"{name}: {format_count(malformed, 'line')} {'is' if malformed == 1 else 'are'} no {kind}")
    return problems


def _read_metrics(folder: Path, resumes: list[int], *, has_ledger: bool) -> tuple[dict[str, MetricTable], list[str]]:
    """Read the metrics of a run by file, and list the problems."""
    tables: dict[str, MetricTable] = {}
    problems: list[str] = []
    for name, parts in metrics_files(folder).items():
        table = tables[name] = MetricTable(resumes)
        for part in parts:
            problems += _read_file(part, folder, table, "record of metrics")
        for metric, many in Counter(table.non_numeric).most_common(_MAX_PROBLEMS):
            values = f"{format_count(many, 'value')} of {metric[:60]!r} {'is' if many == 1 else 'are'} no number"
            problems.append(f"{name}: {values}; left out")
        if table.has_too_many_names:
            problems.append(f"{name}: there are more than two thousand metrics; further names are left out")
        if table.went_back and not has_ledger:
            problems.append(
                f"{name}: the steps go back {format_count(table.went_back, 'time')}: restarts, with which "
                f"{format_count(table.repeated, 'record')} no longer {'counts' if table.repeated == 1 else 'count'}"
            )
        if not table.count:
            problems.append(f"{name}: has no record that could be read")
    return tables, problems or ([] if tables else ["no metrics.jsonl: loss, learning rate and other metrics are not known"])


def _missing_in_ledgers(ledgers: Sequence[RankLedger], merged: Sequence[MergedAttempt], abouts: dict[int, Row]) -> list[str]:
    """Describe the missing parts of ledgers."""
    if not ledgers:
        return ["no ledger: where the time went, how it ended, speed, memory and checkpoints are not known"]
    if not merged:
        return ["the ledgers have no line that could be read: where the time went is not known"]
    missing = []
    for each in merged:
        size = world_size(each, abouts.get(each.number, {}))
        if absent := sorted(set(range(size)) - set(each.ranks)):
            ranks = _format_list(absent)
            missing.append(f"attempt {each.number}: nothing from rank {ranks} of {size}; means are over those there")
        if lost := [rank for rank, lines in each.ranks.items() if not lines.open_count]:
            missing.append(f"attempt {each.number}: rank {_format_list(lost)} has no line of when it began")
    numbers = {each.number for each in merged}
    if gone := sorted(set(range(1, max(numbers))) - numbers):
        missing.append(
            f"nothing in the ledgers of attempt {_format_list(gone)}: it ended before its first line, or that is lost"
        )
    unknown_kinds = sum((Counter(ledger.unknown_kinds) for ledger in ledgers), Counter[str]())
    for kind, many in list(unknown_kinds.items())[:_MAX_PROBLEMS]:
        missing.append(
            f"ledger: {format_count(many, 'line')} of a kind that this version does not know, {kind[:60]!r}; left out"
        )
    unknown = sorted({cause for each in merged for lines in each.ranks.values() for cause in lines.unknown_causes})
    if unknown:
        missing.append(f"ledger: causes that this version does not know count as other: {', '.join(unknown[:_MAX_PROBLEMS])}")
    dropped = sum(lines.dropped_events for each in merged for lines in each.ranks.values())
    if dropped:
        missing.append(f"ledger: {format_count(dropped, 'event')} beyond the first many left out")
    return missing[: 4 * _MAX_PROBLEMS]


def _format_list(numbers: list[int], most: int = 8) -> str:
    """Format a list of numbers: ``"1, 2, 3 and 9 more"``."""
    text = ", ".join(map(str, numbers[:most]))
    return text if len(numbers) <= most else f"{text} and {len(numbers) - most} more"


def _read_attempt_files(folder: Path) -> tuple[dict[int, Row], list[str]]:
    """Read the files of attempts by number, and list the problems."""
    contents: dict[int, Row] = {}
    problems = []
    for number, path in attempt_files(folder).items():
        where = path.relative_to(folder).as_posix()[:100]
        try:
            about = read_attempt(path)
        except (OSError, ValueError) as error:
            problems.append(f"{where}: cannot be read: {single_line(error)[:200]}")
            continue
        version = about.get("format")
        if isinstance(version, int) and version > FORMAT:
            problems.append(f"{where}: written by a newer version (format {version}, this reads {FORMAT}): there may be more")
        contents[number] = trim_data(about, _MAX_METADATA_DEPTH)
    return contents, problems


def _build_series(metrics: dict[str, MetricTable], merged: list[MergedAttempt], origin: float) -> dict[str, MetricSeries]:
    columns = {file: table.columns() for file, table in metrics.items()}
    points = points_per_series(sum(map(len, columns.values())))
    series = {}
    for file, each in columns.items():
        suffix = "" if file == next(iter(columns)) else f" ({file.removesuffix('.jsonl')})"
        for name, rows in each.items():
            series[name + suffix] = make_series(
                rows, started_at=origin, ledger=lambda steps: step_moments(merged, steps), points=points
            )
    return series


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSnapshot:
    """Rank in its newest attempt.

    Args:
        rank: number of the rank.
        host: host name.
        step: number of completed steps.
        age_s: seconds since the last line.
        shares: fractions of the last minute by category.
        rss_bytes: memory of the process; None if unknown.
        closed: outcome; None while running.
    """

    rank: int
    host: str
    step: int
    age_s: float
    shares: dict[str, float]
    rss_bytes: float | None
    closed: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """Run at one moment.

    Args:
        attempt: newest attempt; 0 before the first.
        step: number of completed steps.
        seconds: time since the start of the newest attempt.
        metrics: newest value of each metric.
        steps_per_s: rate of the last minute; None without a count.
        samples_per_s: rate of the last minute; None without a count.
        tokens_per_s: rate of the last minute; None without a count.
        goodput: compute fraction of the newest attempt, mean over ranks; None without a ledger.
        ranks: ranks of the newest attempt.
        last_death: description of the last death after which the run went on; empty without one.
        events: events in order: time, rank and line.
        unreadable: number of unreadable lines.
    """

    attempt: int
    step: int
    seconds: float
    metrics: dict[str, float]
    steps_per_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    goodput: float | None
    ranks: list[RankSnapshot]
    last_death: str
    events: list[tuple[float, int, Row]]
    unreadable: int

    @property
    def has_ended(self) -> bool:
        """True if every rank has ended."""
        return bool(self.ranks) and all(each.closed for each in self.ranks)


class LiveRun:
    """Reader of the folder of a run, which may not exist yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ledgers: dict[int, tuple[RankLedger, JsonlReader]] = {}
        self._metrics: JsonlReader = JsonlReader(folder / run_files.METRICS)
        self._metrics_inode: int | None = None
        self._latest_metrics: dict[str, float] = {}
        self._step, self._step_at = 0, math.nan
        self._events: deque[tuple[float, int, Row]] = deque(maxlen=_MAX_EVENTS)
        self._reported_events: dict[tuple[int, int], int] = {}

    def refresh(self, now: float) -> RunSnapshot:
        """Read new lines and return the current state.

        Args:
            now: seconds since 1970.
        """
        for rank, path in ledger_files(self._folder).items():
            if rank not in self._ledgers:
                self._ledgers[rank] = RankLedger(rank), JsonlReader(path)
        for ledger, lines in self._ledgers.values():
            for rows in _read_new_rows(lines):
                ledger.add(rows)
        self._read_metrics()
        return self._snapshot(now)

    def _read_metrics(self) -> None:
        try:
            identity = self._metrics.path.stat().st_ino
        except OSError:
            return
        # After a rotation, the path is a new file.
        if identity != self._metrics_inode:
            self._metrics, self._metrics_inode = JsonlReader(self._metrics.path), identity
        for rows in _read_new_rows(self._metrics):
            for row in rows:
                if (step := step_from_record(row)) is not None:
                    self._step, self._step_at = step, to_number(row.get(TIME)) or math.nan
                named = ((name, to_number(value)) for name, value in row.items() if name not in (run_files.STEP, TIME))
                self._latest_metrics |= {name: value for name, value in named if value is not None}

    def _snapshot(self, now: float) -> RunSnapshot:
        newest = max((number for ledger, _ in self._ledgers.values() for number in ledger.attempts), default=0)
        current = {
            rank: lines
            for rank, (ledger, _) in sorted(self._ledgers.items())
            if (lines := ledger.attempts.get(newest)) is not None and lines.has_lines
        }
        for rank, lines in current.items():
            seen = self._reported_events.get((rank, newest), 0)
            new = (event for event in lines.events[seen:] if rank == min(current) or event["name"] not in ALL_RANK_EVENTS)
            self._events.extend((event["at"], rank, event) for event in new)
            self._reported_events[rank, newest] = len(lines.events)
        begin = min((lines.began_at for lines in current.values()), default=now)
        ends = max((lines.ended_at for lines in current.values()), default=now)
        # Metrics may be newer than the ledger, which is written at intervals.
        logged = [self._step] if not current or self._step_at >= begin else []
        ended = bool(current) and all(lines.closed for lines in current.values())
        changes = {}
        for rank, lines in current.items():
            before, after = lines.totals_at([max(lines.ended_at - _WINDOW_S, lines.began_at), lines.ended_at])
            changes[rank] = np.asarray(after - before)
        first_change = next(iter(changes.values()), np.zeros(WIDTH))
        seconds, steps, samples, tokens = first_change[[AT, STEP, SAMPLES, TOKENS]].tolist()
        spent = [lines.totals[CAUSES:] for lines in current.values()]
        shares = [float(each[CAUSE_COLUMN["compute"] - CAUSES] / each.sum()) for each in spent if each.sum() > 0]
        return RunSnapshot(
            attempt=newest,
            step=max([*logged, *(lines.last_step for lines in current.values())], default=0),
            seconds=max(0.0, (ends if ended else now) - begin),
            metrics=dict(self._latest_metrics),
            steps_per_s=steps / seconds if seconds > 0 else None,
            samples_per_s=samples / seconds if seconds > 0 and samples > 0 else None,
            tokens_per_s=tokens / seconds if seconds > 0 and tokens > 0 else None,
            goodput=sum(shares) / len(shares) if shares else None,
            ranks=[_rank_snapshot(rank, lines, changes[rank], now) for rank, lines in current.items()],
            last_death=next((_describe_last_death(ledger) for _, (ledger, _) in sorted(self._ledgers.items())), ""),
            events=sorted(self._events, key=lambda event: event[0]),
            unreadable=self._metrics.unreadable + sum(lines.unreadable for _, lines in self._ledgers.values()),
        )


def _describe_last_death(ledger: RankLedger) -> str:
    for lines in reversed(ledger.attempts.values()):
        if deaths := [event for event in lines.events if event["name"] == "recovered"]:
            return describe_death(death_row(deaths[-1], lines.events))
    return ""


def _read_new_rows(lines: JsonlReader) -> list[list[Row]]:
    try:
        return list(lines.read_batches())
    # The file may not exist yet, or no longer.
    except OSError:
        return []


def _rank_snapshot(rank: int, lines: AttemptLedger, change: Column, now: float) -> RankSnapshot:
    spent = float(change[CAUSES:].sum())
    rss = lines.gauges.get("rss_bytes")
    return RankSnapshot(
        rank=rank,
        host=lines.host,
        step=lines.last_step,
        age_s=max(0.0, now - lines.ended_at),
        shares={cause: float(change[CAUSE_COLUMN[cause]]) / spent for cause in _SHOWN_CAUSES} if spent > 0 else {},
        rss_bytes=rss[-1] if rss and math.isfinite(rss[-1]) else None,
        closed=str(lines.closed["reason"])[:20] if lines.closed else None,
    )
