"""Define the data model of a report. ``read_run`` fills it; the page, the summary and ``--json`` show it.

Times are in seconds. Moments (``at``) count from the start of the run's first attempt, ``RunReport.started_at``, in seconds
since 1970. Steps, samples and tokens are totals over all ranks. Unknown values are None, NaN in a column of numbers, or empty;
``RunReport.missing`` states the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dtrain.run.run_files import Row

FORMAT = 2
"""Version of the output of ``to_json``. Raised if readers must change."""

Column = NDArray[np.float64]
AttemptOutcome = Literal["done", "stopped", "failed", "killed", "running"]
"""Outcome of an attempt. ``killed``: the attempt wrote no end and has been silent for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReport:
    """Attempt: one start of the run.

    Args:
        number: number of the attempt, from 1.
        at: start of the first process.
        ended_at: time of the last line; for a killed attempt, of the last line or metric record.
        outcome: how the attempt ended.
        error: error of the first rank that failed: ``"rank 3: RuntimeError: ..."``, or None.
        first_step: number of completed steps at the start.
        last_step: number of completed steps at the end.
        resumed_from: path of the loaded checkpoint, or None.
        world_size: number of ranks.
        hosts: host names, sorted.
        setup_s: time from process start to ``open_run``; mean over ranks.
        lost_steps: number of steps that a later attempt repeated.
        lost_s: wall time since the first repeated step.
        down_s: wall time between the end of the previous attempt and this start.
        by_cause: seconds by category; mean over ranks. Time in repeated steps is ``restart``.
    """

    number: int
    at: float
    ended_at: float
    outcome: AttemptOutcome
    error: str | None
    first_step: int
    last_step: int
    resumed_from: str | None
    world_size: int
    hosts: list[str]
    setup_s: float
    lost_steps: int
    lost_s: float
    down_s: float
    by_cause: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Rank over all attempts: host in the last attempt, seconds by category, and count and seconds by span."""

    rank: int
    host: str
    by_cause: dict[str, float]
    by_span: dict[str, tuple[int, float, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Slices of wall time, at most 400, as columns. Seconds are means over ranks.

    Args:
        at: start of each slice.
        seconds: length.
        attempt: running attempt; between two attempts, the later attempt.
        by_cause: seconds by category, with sum ``seconds`` for a complete ledger. Time between attempts and in repeated steps
            is ``restart``.
        step: completed steps at the end.
        compute_s: seconds of compute, also in repeated steps.
        steps: steps, samples and tokens in the slice; NaN after the last line of a killed attempt, and between attempts.
        samples: see ``steps``.
        tokens: see ``steps``.
    """

    at: Column
    seconds: Column
    attempt: Column
    by_cause: dict[str, Column]
    step: Column
    compute_s: Column
    steps: Column
    samples: Column
    tokens: Column


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputReport:
    """Goodput: productive fraction of wall time.

    Args:
        total_s: time from the start of the first attempt to the last line.
        productive_s: compute time in steps that were not repeated; mean over ranks.
        share: ``productive_s / total_s``, 0 to 1.
        by_cause: seconds by category, with sum ``total_s`` for a complete ledger. ``restart`` is the sum of the next three
            fields, which count in no other category.
        down_s: time between attempts.
        repeated_setup_s: setup of all attempts after the first.
        lost_s: time in repeated steps.
    """

    total_s: float
    productive_s: float
    share: float
    by_cause: dict[str, float]
    down_s: float
    repeated_setup_s: float
    lost_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSeries:
    """Metric by step, without the earlier records of repeated steps.

    At most 1000 finite points in order of steps: a longer series keeps the minimum and maximum of each interval, so no spike is
    lost. At most 200 non-finite values stay in ``values``, too.

    Args:
        steps: steps of the points.
        values: values of the points.
        tokens: token counts at the points; empty if unknown.
        times: times of the points, slightly decreasing after repeated steps; empty if unknown.
        count: number of records, including non-finite values.
        non_finite: number of non-finite values.
        last: newest finite value.
        last_step: step of the newest record.
        low: minimum.
        high: maximum.
    """

    steps: Column
    values: Column
    tokens: Column
    times: Column
    count: int
    non_finite: int
    last: float | None
    last_step: int
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """Rank that other ranks waited for.

    Args:
        rank: number of the rank.
        host: host of the rank.
        stall_s: time that the rank waited for others.
        waited_for_s: difference to the wait of the median rank, about the cost for the other ranks.
        most: category with the largest excess over the median rank; None without excess.
        most_s: excess in seconds.
        text: description in words.
    """

    rank: int
    host: str
    stall_s: float
    waited_for_s: float
    most: str | None
    most_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeSeries:
    """Gauge over time, such as ``rss_bytes``: maximum over ranks, and the rank with the maximum. At most 400 entries."""

    times: Column
    values: Column
    ranks: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Report of one run.

    Args:
        name: last part of the folder.
        folder: folder as passed by the user.
        started_at: seconds since 1970, origin of all moments; None if unknown.
        duration_s: time until the last line.
        attempts: attempts in order; empty without a ledger.
        ranks: ranks in order; empty without a ledger.
        timeline: wall time by category and progress; None without a ledger.
        goodput: goodput; None without a ledger.
        series: metrics by name.
        gauges: gauges by name.
        checkpoints: at most 1000 checkpoints in order of time, else those that blocked training longest: step, attempt, at,
            blocked_s (longest over ranks), duration_s (until durable) and bytes.
        checkpoint_count: number of all checkpoints.
        deaths: deaths after which the run went on: at, attempt, rank (None for none), cause, tier ("memory", "disk", or None
            for none) and step that were loaded, seconds to the next loss, lost_steps, survivors (ranks that have stayed), and
            ``parts`` of the seconds.
        slowest: ranks that others waited for, worst first; at most 8.
        events: at most 1000 events in order of time, else the first and last of each name: at, name, attempt, rank, step, and
            ``fields``.
        event_counts: number of all events by name.
        about: content of each attempt's file as plain data, by number.
        differences: facts in ``about`` that differ between attempts, by dotted name and attempt, without times.
        samples: newest picture, text and table of each name: name, kind, step and file.
        missing: missing or damaged parts, one line each.
    """

    name: str
    folder: str
    started_at: float | None = None
    duration_s: float = 0.0
    attempts: list[AttemptReport] = field(default_factory=list)
    ranks: list[RankReport] = field(default_factory=list)
    timeline: Timeline | None = None
    goodput: GoodputReport | None = None
    series: dict[str, MetricSeries] = field(default_factory=dict)
    gauges: dict[str, GaugeSeries] = field(default_factory=dict)
    checkpoints: list[Row] = field(default_factory=list)
    checkpoint_count: int = 0
    deaths: list[Row] = field(default_factory=list)
    slowest: list[SlowRank] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    event_counts: dict[str, int] = field(default_factory=dict)
    about: dict[int, Row] = field(default_factory=dict)
    differences: dict[str, dict[int, Any]] = field(default_factory=dict)
    samples: list[Row] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Report of all requested runs.

    Args:
        format: version of this model.
        version: version of dtrain.
        title: title of the page.
        written_at: seconds since 1970.
        runs: runs in the order of the request.
        problems: folders without a run and general problems, then ``missing`` of each run with its name.
    """

    format: int = FORMAT
    version: str
    title: str
    written_at: float
    runs: list[RunReport]
    problems: list[str]


def to_json(value: Any) -> Any:
    """Convert a report or a part of a report to plain JSON data. Keys become texts, non-finite numbers become texts."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)
