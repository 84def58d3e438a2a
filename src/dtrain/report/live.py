"""Follow a running job: read its files as they grow and return the current state."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dtrain.report.attempts import ALL_RANK_EVENTS
from dtrain.report.ledger import AT, CAUSE_COLUMN, CAUSES, SAMPLES, STEP, TOKENS, WIDTH, AttemptLedger, RankLedger
from dtrain.report.metric_table import to_number
from dtrain.report.model import Column
from dtrain.run import run_files
from dtrain.run.run_files import TIME, JsonlReader, Row, ledger_files, step_from_record

# window of current rates: a few ledger lines
_WINDOW_S = 60.0
_MAX_EVENTS = 200
_SHOWN_CAUSES = ("compute", "data", "stall", "checkpoint")


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
            events=sorted(self._events, key=lambda event: event[0]),
            unreadable=self._metrics.unreadable + sum(lines.unreadable for _, lines in self._ledgers.values()),
        )


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
