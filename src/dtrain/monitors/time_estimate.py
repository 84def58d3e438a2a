"""Estimate the remaining time of a run (``eta``) from recent speed and the cost of evaluations and checkpoints."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dtrain import spans
from dtrain.monitors.meter import Meter, run_identity
from dtrain.schedules.clock import Clock
from dtrain.schedules.durations import Duration
from dtrain.spans import SpanTime
from dtrain.state import TrainState

# largest number of samples; beyond, every second sample is dropped
_MAX_SAMPLES = 128
# fraction of an interval
_ROUNDING = 1e-6
# number of recent costs in the mean of each span
_MAX_COSTS = 16
# categories of spans that recur
_RECURRING_CATEGORIES = ("evaluation", "checkpoint")
# categories of spans that happen once
_ONE_TIME_CATEGORIES = ("compile", "restart", "setup")
# spans that happen once, in categories that recur
_ONE_TIME_SPANS = ("search", "load")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSample:
    """Progress at one moment.

    Args:
        progress: training progress, in any unit.
        seconds: training time so far, without recurring and one-time interruptions.
    """

    progress: float
    seconds: float


@dataclass(slots=True, kw_only=True)
class Interruption:
    """Interruption that recurs at intervals, such as an evaluation.

    Args:
        first: progress at the first occurrence; ``last``, at the latest; ``times``, number of occurrences.
        costs: seconds of the latest occurrences.
    """

    first: float
    last: float
    times: int = 0
    costs: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_COSTS))

    def add(self, progress: float, seconds: float) -> None:
        """Add an occurrence. Mutates: all fields except ``first``."""
        self.last, self.times = progress, self.times + 1
        self.costs.append(seconds)

    def remaining(self, now: float, total: float) -> float:
        """Estimate the seconds of all occurrences from ``now`` until ``total``, at the observed interval.

        Overdue occurrences are ignored.

        After a single occurrence, the interval is the progress at this occurrence.
        """
        interval = (self.last - self.first) / (self.times - 1) if self.times > 1 else self.first
        if interval <= 0:
            return 0.0
        # An occurrence that is due exactly now still counts.
        passed = math.ceil((now - self.last) / interval - _ROUNDING) - 1 if now > self.last else 0
        times = int((total - self.last) / interval + _ROUNDING) - passed
        return max(0, times) * sum(self.costs) / len(self.costs)


def estimate_seconds_left(
    samples: Sequence[ProgressSample], interruptions: Mapping[str, Interruption], total: float
) -> float | None:
    """Estimate the seconds until ``total``; None without enough samples. Pure.

    Formula: ``(total - progress) * seconds / progress``, over the newer half of the samples, plus for each interruption its
    mean cost times the number of expected occurrences

    Only the newer half counts, so a slow start (compilation of the first step, microbatch search) is soon forgotten.

    Example:
        >>> times = {10: 100.0, 20: 105.0, 30: 110.0}
        >>> samples = [
        ...     ProgressSample(progress=progress, seconds=seconds)
        ...     for progress, seconds in times.items()
        ... ]
        >>> estimate_seconds_left(samples, {}, 100)  # 70 to go at 10 in 5 seconds
        35.0
        >>> evaluation = Interruption(first=20, last=20)
        >>> evaluation.add(20, 4.0)
        >>> estimate_seconds_left(
        ...     samples, {"evaluate": evaluation}, 100
        ... )  # and evaluations at 40, 60, 80 and 100
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


def eta(run_length: Duration | int | str) -> Meter:
    """Create a meter of run time: ``time/elapsed_s``, ``time/left_s``, and ``time/end`` in seconds since 1970.

    The remaining time is training at recent speed plus the expected evaluations and checkpoints. Their interval and cost are
    those observed in this process (spans of category ``evaluation`` and ``checkpoint``). One-time costs (compilation,
    microbatch search, loading) are excluded. The first call returns the elapsed time only, also after loading a checkpoint,
    since the machine may differ. Each rank computes its own estimate.

    Args:
        run_length: length of the run: ``10_000``, ``"3ep"``, ``"1e9tok"``, ``"2h"``; ``"1dur"`` if ``step.init`` knows the
            length. With epochs, the estimate needs the steps per epoch: from ``step.init(run_length=...)``, else after the
            first epoch.

    Collective: none. Host sync: none.

    Example:
        import dtrain as dt

        meter = dt.monitors.eta("3ep")
        for batch in loader.until("3ep"):
            state, metrics = step(state, batch)
            if state.crossed("100ba"):
                log(state.clock.step, meter(state))

    Raises:
        ConfigError: invalid duration; in a call, ``dur`` in a run of unknown length.
    """
    whole = Duration.parse(run_length)
    history = _RunHistory()

    def meter_fn(state: TrainState) -> dict[str, float]:
        clock = state.clock
        times = {"time/elapsed_s": clock.seconds}
        progress = run_progress(clock, whole)
        if progress is None:
            return times
        done, total = progress
        seconds = history.estimate(run_identity(state), clock.step, done, total)
        # A length in seconds gives the exact remaining time.
        if whole.unit == "sec":
            seconds = max(0.0, total - done)
        if seconds is not None:
            times |= {"time/left_s": seconds, "time/end": time.time() + seconds}
        return times

    return meter_fn


def run_progress(clock: Clock, whole: Duration) -> tuple[float, float] | None:
    """Return the progress and the total length of a run in one unit; None if the steps per epoch are unknown."""
    if whole.unit != "ep":
        return float(clock.count(whole.unit)), float(whole.value)
    steps: float | None = clock.run_length.steps_per_epoch if clock.run_length is not None else None
    if steps is None and clock.epoch:
        steps = (clock.step - clock.step_in_epoch) / clock.epoch
    if not steps:
        return None
    # In real steps, so that an epoch of another length changes the total and not the progress.
    return float(clock.step), clock.step + max(0.0, (whole.value - clock.epoch) * steps - min(clock.step_in_epoch, steps))


class _RunHistory:
    """Observations of one run by this process."""

    def __init__(self) -> None:
        self._run: tuple[int, str | None] | None = None
        self._step = 0
        self._samples: list[ProgressSample] = []
        self._interruptions: dict[str, Interruption] = {}
        self._last_totals: dict[str, SpanTime] = {}

    def estimate(self, run: tuple[int, str | None], step: int, done: float, total: float) -> float | None:
        """Add a sample and return the estimated seconds left. Mutates: the samples and interruptions."""
        totals = spans.totals()
        if run != self._run or step < self._step:
            self._run, self._last_totals = run, totals
            self._samples.clear()
            self._interruptions.clear()
        self._step = step
        # The first steps are slower than usual.
        if not step:
            return 0.0 if done >= total else None
        training = 0.0
        for name, (_, seconds) in totals.items():
            category = spans.category_of(name)
            if category in _RECURRING_CATEGORIES:
                self._add_interruption(name, done, seconds)
            elif category not in _ONE_TIME_CATEGORIES and name not in _ONE_TIME_SPANS:
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
