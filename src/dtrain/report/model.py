"""Define the data model of a report: dataclasses that ``reading`` fills from run folders and ``page`` draws.

Times are in seconds. Moments (``at``, ``times``) count from the start of the run's first attempt, ``RunReport.started_at``, in
seconds since 1970. Steps, samples and tokens are totals over all ranks. Unknown values are None, an empty list or a missing
key; ``RunReport.missing`` states the reason. Numbers are finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

FORMAT = 1
"""Version of the output of ``to_json``. Raised if readers must change."""

AttemptOutcome = Literal["done", "stopped", "failed", "killed", "running"]
"""Outcome of an attempt. ``killed``: the attempt wrote no end and has been silent for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReport:
    """Attempt: one start of the run.

    Args:
        number: number of the attempt, from 1.
        at: start of the first process.
        ended_at: time of the last line; for a killed attempt, of the last line or metric record.
        how: outcome.
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
    """

    number: int
    at: float
    ended_at: float
    how: AttemptOutcome
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAttemptReport:
    """Time of one rank in an attempt.

    Args:
        attempt: number of the attempt.
        host: host of the rank.
        seconds: wall time from ``open_run`` to the rank's last line; for a killed rank, to the end of the attempt.
        by_cause: seconds by category, including ``setup`` before ``open_run``.
    """

    attempt: int
    host: str
    seconds: float
    by_cause: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanTotal:
    """Count, self time (seconds) and category of one span."""

    count: int
    seconds: float
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSlice:
    """Slice of wall time by category.

    Args:
        at: start of the slice.
        seconds: length of the slice.
        attempt: running attempt; between two attempts, the later attempt.
        by_cause: seconds by category, with sum ``seconds`` for a complete ledger. Time between attempts is ``restart``. In
            ``RunReport.timeline``, time in repeated steps is ``restart``, too.
    """

    at: float
    seconds: float
    attempt: int
    by_cause: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Rank over all attempts.

    Args:
        rank: number of the rank.
        host: host in the last attempt.
        by_cause: seconds by category.
        by_span: totals by span name.
        attempts: attempts with this rank.
        timeline: at most 60 slices.
    """

    rank: int
    host: str
    by_cause: dict[str, float]
    by_span: dict[str, SpanTotal]
    attempts: list[RankAttemptReport]
    timeline: list[TimeSlice]


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
        again_s: setup of all attempts after the first.
        lost_s: time in repeated steps.
    """

    total_s: float
    productive_s: float
    share: float
    by_cause: dict[str, float]
    down_s: float
    again_s: float
    lost_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteMark:
    """Non-finite value of a series: ``"nan"``, ``"inf"`` or ``"-inf"``; at most 200 per series."""

    step: int
    what: Literal["nan", "inf", "-inf"]
    tokens: float | None
    at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSeries:
    """Metric by step, without the earlier records of repeated steps.

    At most 1000 points in order of steps. A longer series keeps the minimum and maximum of each interval, so no spike is lost.

    Args:
        steps: steps of the points.
        values: finite values of the points.
        tokens: token counts at the points; empty if unknown.
        times: times of the points, slightly decreasing after repeated steps; empty if unknown.
        marks: non-finite values.
        count: number of records, including non-finite values.
        bad: number of non-finite values.
        last: newest finite value.
        last_step: step of the newest record.
        low: minimum.
        high: maximum.
        low_step: step of the minimum.
        high_step: step of the maximum.
    """

    steps: list[int]
    values: list[float]
    tokens: list[float]
    times: list[float]
    marks: list[NonFiniteMark]
    count: int
    bad: int
    last: float | None
    last_step: int
    low: float | None
    high: float | None
    low_step: int | None
    high_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """Checkpoint.

    Args:
        step: saved step.
        attempt: attempt that wrote the checkpoint.
        at: time at which training continued.
        held_s: longest blocking time of training over ranks; None if unknown.
        duration_s: time until the checkpoint was durable; None if unknown, so possibly not durable.
        bytes: size over all ranks; None if unknown.
    """

    step: int
    attempt: int
    at: float
    held_s: float | None
    duration_s: float | None
    bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """Rank that other ranks waited for.

    Args:
        rank: number of the rank.
        host: host of the rank.
        stall_s: time that the rank waited for others.
        waited_for_s: difference to the wait of the median rank, about the cost for the other ranks.
        compute_s: compute time of the rank.
        most: category with the largest excess over the median rank; None without excess.
        most_s: excess in seconds.
        text: description in words.
    """

    rank: int
    host: str
    stall_s: float
    waited_for_s: float
    compute_s: float
    most: str | None
    most_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSample:
    """Speed over all ranks in a slice of wall time; None for rates without a count.

    Args:
        at: start of the slice.
        seconds: length of the slice.
        attempt: number of the attempt.
        step: step at the end of the slice.
        steps_per_s: rate over wall time.
        samples_per_s: rate over wall time.
        tokens_per_s: rate over wall time.
        steps_per_compute_s: rate over compute time.
        samples_per_compute_s: rate over compute time.
        tokens_per_compute_s: rate over compute time.
    """

    at: float
    seconds: float
    attempt: int
    step: int
    steps_per_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    steps_per_compute_s: float | None
    samples_per_compute_s: float | None
    tokens_per_compute_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeSeries:
    """Gauge over time, such as ``rss_bytes``: maximum over ranks, and the rank with the maximum. At most 400 entries.

    ``by_rank``: maximum of each rank.
    """

    times: list[float]
    values: list[float]
    ranks: list[int]
    by_rank: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Event of a run. ``fields`` are plain data; ``step`` is None for an event without step."""

    at: float
    name: str
    attempt: int
    rank: int
    step: int | None
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDifference:
    """Fact that changed between attempts: dotted name (``"versions.torch"``) and value by attempt."""

    name: str
    values: dict[int, Any]


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
        timeline: at most 400 slices of wall time, mean over ranks.
        goodput: goodput; None without a ledger.
        series: metrics by name.
        speed: at most 400 slices.
        gauges: gauges by name.
        checkpoints: at most 1000 checkpoints in order of time; beyond, the checkpoints that blocked training longest.
        checkpoint_count: number of all checkpoints.
        slowest: ranks that others waited for, worst first; at most 8.
        events: at most 1000 events in order of time; beyond, the first and last of each name.
        event_counts: number of all events by name.
        about: content of each attempt's file as plain data, by number.
        differences: facts in ``about`` that differ between attempts, without times.
        missing: missing or damaged parts, one line each.
    """

    name: str
    folder: str
    started_at: float | None
    duration_s: float
    attempts: list[AttemptReport]
    ranks: list[RankReport]
    timeline: list[TimeSlice]
    goodput: GoodputReport | None
    series: dict[str, MetricSeries]
    speed: list[SpeedSample]
    gauges: dict[str, GaugeSeries]
    checkpoints: list[CheckpointReport]
    checkpoint_count: int
    slowest: list[SlowRank]
    events: list[RunEvent]
    event_counts: dict[str, int]
    about: dict[int, dict[str, Any]]
    differences: list[AttemptDifference]
    missing: list[str]


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
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        # Fields of events and settings may hold non-finite numbers.
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)
