"""``eta``: how long a run will take yet, which learns what evaluations and checkpoints cost."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dtrain import spans
from dtrain.clock import Clock
from dtrain.durations import Duration
from dtrain.monitors.meter import Meter
from dtrain.monitors.speed import run_identity
from dtrain.spans import SpanTime
from dtrain.state import TrainState

_MAX_SAMPLES = 128  # that are kept; then every second one is forgotten
_ROUNDING = 1e-6  # of an interval
_MAX_COSTS = 16  # of each kind whose mean cost is taken
_RECURRING_CAUSES = ("evaluation", "checkpoint")  # causes whose spans are expected again
_ONE_TIME_CAUSES = ("compile", "restart", "setup")  # causes that are not
_ONE_TIME_SPANS = ("search", "load")  # spans that are not, either, of causes that are


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSample:
    """What was seen at one moment.

    Args:
        progress: how far training has come, in any unit.
        seconds: that had been spent on training: without what comes back at intervals, and without what comes once.
    """

    progress: float
    seconds: float


@dataclass(slots=True, kw_only=True)
class Interruption:
    """What comes back at intervals.

    Args:
        first: the progress at which it was seen first; ``last``, at last; ``times``, how often.
        costs: seconds that the last of them took.
    """

    first: float
    last: float
    times: int = 0
    costs: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_COSTS))

    def add(self, progress: float, seconds: float) -> None:
        """It was seen again. Mutates: all fields but ``first``."""
        self.last, self.times = progress, self.times + 1
        self.costs.append(seconds)

    def remaining(self, now: float, total: float) -> float:
        """Seconds that it will take from ``now`` until ``total``, if it comes as often as it came; not what is overdue.

        After a single one, as if its interval had ended there for the first time: more cannot be told yet.
        """
        every = (self.last - self.first) / (self.times - 1) if self.times > 1 else self.first
        if every <= 0:
            return 0.0
        passed = (
            math.ceil((now - self.last) / every - _ROUNDING) - 1 if now > self.last else 0
        )  # what is due just now may come yet
        times = int((total - self.last) / every + _ROUNDING) - passed
        return max(0, times) * sum(self.costs) / len(self.costs)


def estimate_seconds_left(
    samples: Sequence[ProgressSample], interruptions: Mapping[str, Interruption], total: float
) -> float | None:
    """Seconds until ``total``, or None where nothing can be told yet. Pure.

    Formula: ``(total - progress) * seconds / progress``, over the newer half of what was seen, plus for each interruption its
    mean cost times how often it will come yet

    Only the newer half counts, so what was slow at the start (the first step compiles, sizes are searched) is soon behind.

    Example:
        >>> looks = [Look(progress=10, seconds=100.0), Look(progress=20, seconds=105.0), Look(progress=30, seconds=110.0)]
        >>> estimate_seconds_left(looks, {}, 100)  # 70 to go, and 10 in 5 seconds
        35.0
        >>> evaluation = Interruption(first=20, last=20)
        >>> evaluation.add(20, 4.0)
        >>> estimate_seconds_left(looks, {"evaluate": evaluation}, 100)  # and at 40, 60, 80 and 100
        51.0
    """
    if not samples:
        return None
    last = samples[-1]
    if last.progress >= total:
        return 0.0
    since = samples[(len(samples) - 1) // 2]
    if last.progress <= since.progress:
        return None
    pace = max(0.0, last.seconds - since.seconds) / (last.progress - since.progress)
    return (total - last.progress) * pace + sum(each.remaining(last.progress, total) for each in interruptions.values())


def eta(length: Duration | int | str) -> Meter:
    """A meter of a run's time: ``time/elapsed_s`` so far, ``time/left_s``, and ``time/end``, in seconds since 1970.

    What is left is training at the pace of late, and the evaluations and checkpoints that are still to come, as often and as
    long as they were seen in this process (spans of cause ``evaluation`` and ``checkpoint``). Time that does not come back
    (compiling, the search of a microbatch, loading) does not count. The first call begins, and gives the elapsed time alone; so
    does the first after a checkpoint was loaded, since it may be another machine now. An estimate is each rank's own.

    Args:
        length: how long the run is to be: ``10_000``, ``"3ep"``, ``"1e9tok"``, ``"2h"``; ``"1dur"`` where ``step.init`` knows.
            With epochs, there is an estimate once it is known how many steps one has: of ``step.init(run=...)``, else after the
            first.

    Collective: none. Host sync: none.

    Raises:
        ConfigError: no duration; in a call, ``dur`` in a run whose length is not known.
    """
    whole = Duration.parse(length)
    history = _RunHistory()

    def left(state: TrainState) -> dict[str, float]:
        clock = state.clock
        found = {"time/elapsed_s": clock.seconds}
        place = run_progress(clock, whole)
        if place is None:
            return found
        done, total = place
        seconds = history.estimate(run_identity(state), clock.step, done, total)
        if whole.unit == "sec":
            seconds = max(0.0, total - done)  # which is known
        if seconds is not None:
            found |= {"time/left_s": seconds, "time/end": time.time() + seconds}
        return found

    return left


def run_progress(clock: Clock, whole: Duration) -> tuple[float, float] | None:
    """How far training has come and how far it is to come, in one unit; None where the steps of an epoch are not known."""
    if whole.unit != "ep":
        return float(clock.count(whole.unit)), float(whole.value)
    steps: float | None = clock.run.steps_per_epoch if clock.run is not None else None
    if steps is None and clock.epoch:
        steps = (clock.step - clock.step_in_epoch) / clock.epoch
    if not steps:
        return None
    # In steps that were really done, so that epochs of different lengths move the end, and not what was done.
    return float(clock.step), clock.step + max(0.0, (whole.value - clock.epoch) * steps - min(clock.step_in_epoch, steps))


class _RunHistory:
    """What this process has seen of one run."""

    def __init__(self) -> None:
        self._run: tuple[int, str | None] | None = None
        self._step = 0
        self._samples: list[ProgressSample] = []
        self._interruptions: dict[str, Interruption] = {}
        self._last_totals: dict[str, SpanTime] = {}

    def estimate(self, run: tuple[int, str | None], step: int, done: float, total: float) -> float | None:
        """Take a look, and say what is left. Mutates: what is remembered."""
        totals = spans.totals()
        if run != self._run or step < self._step:
            self._run, self._last_totals = run, totals
            self._samples.clear()
            self._interruptions.clear()
        self._step = step
        if not step:  # the first steps are not like the others
            return 0.0 if done >= total else None
        training = 0.0
        for name, (_, seconds) in totals.items():
            cause = spans.category_of(name)
            if cause in _RECURRING_CAUSES:
                self._add_interruption(name, done, seconds)
            elif cause not in _ONE_TIME_CAUSES and name not in _ONE_TIME_SPANS:
                training += seconds
        self._last_totals = totals
        self._samples.append(ProgressSample(progress=done, seconds=training))
        if len(self._samples) > _MAX_SAMPLES:
            del self._samples[1::2]
        return estimate_seconds_left(self._samples, self._interruptions, total)

    def _add_interruption(self, name: str, done: float, seconds: float) -> None:
        before = self._last_totals.get(name)
        spent = seconds - (before.seconds if before is not None else 0.0)
        if spent > 0 and name not in _ONE_TIME_SPANS:
            self._interruptions.setdefault(name, Interruption(first=done, last=done)).add(done, spent)
