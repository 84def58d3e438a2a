"""What a report tells, as plain data: what ``reading`` finds in the folders of runs, and what the page draws.

Times are seconds, and moments (``at``, ``times``) are counted from the start of the run's first attempt, which is
``RunReport.started_at``, in seconds since 1970. Steps, samples and tokens are those of all ranks together. What is not known is
None, an empty list, or left out of a mapping; why it is not known stands in ``RunReport.missing``. Numbers are finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

FORMAT = 1
"""Of what ``to_json`` returns; higher when a program that reads it would have to change."""

AttemptOutcome = Literal["done", "stopped", "failed", "killed", "running"]
"""How an attempt ended. ``killed``: it wrote no end, and has been silent for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptReport:
    """One start of the run.

    Args:
        number: from 1.
        at: when its first process was started.
        ended_at: when its last line was written; if it was killed, or its last record of metrics.
        how: how it ended.
        error: of a rank that failed, the first to do so: ``"rank 3: RuntimeError: ..."``, or None.
        first_step: steps that were done when it began.
        last_step: and when it ended.
        resumed_steps: where the checkpoint was that it continued, or None.
        world_size: ranks.
        hosts: names, sorted.
        setup_s: from the start of the processes until the run was opened; mean over ranks.
        lost_steps: done here, and done again by a later attempt.
        lost_s: wall time since the first of them.
        down_s: wall time between the end of the attempt before and the start of this one.
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
    """What one rank spent an attempt on.

    Args:
        attempt: which.
        host: where the rank was.
        seconds: of wall time, from the opening of the run to the rank's last line, or if it was killed, to the attempt's end.
        by_cause: the same by cause; with ``setup`` from before the opening.
    """

    attempt: int
    host: str
    seconds: float
    by_cause: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanTotal:
    """How often a span was entered, its own seconds, and what they count as."""

    count: int
    seconds: float
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSlice:
    """What a piece of wall time went to.

    Args:
        at: when it begins.
        seconds: how long it is.
        attempt: which one was running; between two attempts, the one that comes.
        by_cause: seconds, which add up to ``seconds`` as far as the ledger is whole. Time between attempts is ``restart``; in
            ``RunReport.timeline``, so is time in steps that were done again.
    """

    at: float
    seconds: float
    attempt: int
    by_cause: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank over all attempts.

    Args:
        rank: which.
        host: of the last attempt.
        by_cause: seconds.
        by_span: by name of the span.
        attempts: those that it took part in.
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
    """How much of the wall time was training that counts.

    Args:
        total_s: from the start of the first attempt to the last line of the last.
        productive_s: compute in steps that were not done again; mean over ranks.
        share: the quotient, 0 to 1.
        by_cause: of ``total_s``, which it adds up to as far as the ledger is whole. ``restart`` is all that restarts cost, the
            sum of the three that follow, and so these are in no other cause.
        down_s: between attempts.
        again_s: setup of all attempts after the first.
        lost_s: in steps that were done again.
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
    """A value that is no finite number: ``"nan"``, ``"inf"`` or ``"-inf"``; at most 200 are kept of a series."""

    step: int
    what: Literal["nan", "inf", "-inf"]
    tokens: float | None
    at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSeries:
    """A metric over the steps that count: of a step that was done again, the last record.

    At most 1000 points, in order of steps; of more, the least and the greatest value of each stretch, so that no spike is lost.

    Args:
        steps: of the points.
        values: of the points, all finite.
        tokens: at the points; empty if nobody knows.
        times: at the points, which may go back a little where an attempt did steps again; empty if nobody knows.
        marks: values that are not finite.
        count: of records, with those that are not finite.
        bad: of those that are not finite.
        last: value, the newest finite one.
        last_step: of the newest record.
        low: least value.
        high: greatest value.
        low_step: where the least was.
        high_step: where the greatest was.
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
    """A checkpoint.

    Args:
        step: what it holds.
        attempt: who wrote it.
        at: when training went on.
        held_s: for how long training was held, on the rank that was held longest; None if no rank said.
        duration_s: until it was durable; None if that was never told, so perhaps it is not.
        bytes: of all ranks; None if not told.
    """

    step: int
    attempt: int
    at: float
    held_s: float | None
    duration_s: float | None
    bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """A rank that others waited for, or may have.

    Args:
        rank: which.
        host: where.
        stall_s: it waited for others.
        waited_for_s: how much longer than it the median rank waited: about what it cost the others.
        compute_s: its compute.
        most: cause of which it has most more than the median rank; None if there is none.
        most_s: by how much.
        text: the same in words.
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
    """How fast it went in a piece of wall time, of all ranks together; None where nothing was counted.

    Args:
        at: when the piece begins.
        seconds: how long it is.
        attempt: which.
        step: after it.
        steps_per_s: over wall time.
        samples_per_s: over wall time.
        tokens_per_s: over wall time.
        steps_per_compute_s: over compute alone; so for the next two.
        samples_per_compute_s: see above.
        tokens_per_compute_s: see above.
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
    """A gauge over time, such as ``rss_bytes``: the greatest value of all ranks, and which had it. Lists of one length, <= 400.

    ``by_rank``: the greatest value of each rank.
    """

    times: list[float]
    values: list[float]
    ranks: list[int]
    by_rank: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """Something that happened. ``fields`` are plain data; ``step`` is None where the event has none."""

    at: float
    name: str
    attempt: int
    rank: int
    step: int | None
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDifference:
    """A fact that changed between attempts: its name with dots (``"versions.torch"``), and its value by attempt."""

    name: str
    values: dict[int, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run.

    Args:
        name: the folder's last part.
        folder: as it was given.
        started_at: seconds since 1970; everything else counts from here. None if nobody said.
        duration_s: until the last line.
        attempts: in order; empty without a ledger.
        ranks: in order; empty without a ledger.
        timeline: at most 400 slices over wall time, mean over ranks.
        goodput: None without a ledger.
        series: by name of the metric.
        speed: at most 400 pieces.
        gauges: by name.
        checkpoints: at most 1000 in order of time, and of more, those that held training longest.
        checkpoint_count: of all.
        slowest: ranks that others waited for, worst first; at most 8.
        events: at most 1000 in order of time; of a name with many, the first and the last.
        event_counts: of all, by name.
        about: of each attempt: what its file says, plain data, by number.
        differences: what in these is not the same in all attempts, apart from moments.
        missing: what is not there, or damaged, a line each.
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
    """All runs that were asked for.

    Args:
        format: of this model.
        version: of dtrain that wrote it.
        title: for people.
        written_at: seconds since 1970.
        runs: in the order asked for.
        problems: paths that hold no run, and what else concerns no single run; then ``missing`` of each run, with its name.
    """

    format: int = FORMAT
    version: str
    title: str
    written_at: float
    runs: list[RunReport]
    problems: list[str]


def to_json(value: Any) -> Any:
    """Plain data out of a report, or a part of one: fields by name, keys as texts, and no number that JSON does not know."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # in an event's fields, or an attempt's settings
    return value if isinstance(value, str | int | float | None) else str(value)
