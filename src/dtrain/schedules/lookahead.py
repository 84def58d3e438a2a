"""Check a schedule over the whole run before the first step, and warn if factors look like learning rates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.durations import RunLength
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import Hyperparameter, UnitSchedule
from dtrain.typing import Schedule

_HORIZONS = {"ba": 10**6, "ep": 10**3, "sp": 10**9, "tok": 10**12, "sec": 10**7, "dur": 1}
"""Last count to check per unit if the length of the run is unknown: about the longest runs."""

_NUM_SAMPLES = 1024


def check_over_run(hyper: Hyperparameter, run: RunLength | None) -> str | None:
    """Check the values of a schedule over a run before the run.

    The check samples the first steps, the last step and about a thousand steps between. If a value is not allowed, a bisection
    finds the first such step.

    Returns:
        A warning if the length of the run is unknown and the schedule leaves its range after many steps; otherwise None.

    Raises:
        ConfigError: the run reaches a step whose value is not allowed or for which the schedule raises.
    """
    if not callable(hyper.value) or hyper.allowed is None:
        return None
    last = None if run is None else _last_count(hyper.unit, run)
    integer, end = hyper.unit != "dur", _HORIZONS[hyper.unit] if last is None else last
    try:
        violation = _find_first_violation(
            hyper.value, hyper.allowed.is_satisfied, _sample_counts(end, integer=integer), nearest=1 if integer else 1e-6
        )
    except _ScheduleCallError as error:
        if last is None:
            # A schedule may raise after the end of the run.
            return None
        raise ConfigError(
            f"{hyper.label}: the schedule raises at {error.count} {hyper.unit} of the run: {error.__cause__!r}"
        ) from error
    if violation is None:
        return None
    count, value = violation
    when = f"step {count}" if hyper.unit == "ba" else f"{count} {hyper.unit}"
    problem = f"{hyper.label} must be {hyper.allowed.text}, got {value!r} from its schedule at {when}"
    if last is not None:
        of_run = "" if run is None or run.total is None else f" of a run of {run.total}"
        raise ConfigError(
            f"{problem}{of_run}. Keep the schedule inside, for example with dt.schedules.clip(schedule, low=..., high=...)."
        )
    if count == 0:
        # The first step raises.
        return None
    return (
        f"{problem}. A run of that length stops there with an error. Keep the schedule inside, for example with "
        "dt.schedules.clip(schedule, low=..., high=...), or give the length of the run: "
        "step.init(..., run_length=loader.run_length('3ep'))."
    )


def peak_value(schedule: Schedule) -> float | None:
    """Return the largest sampled value of a schedule; None if the schedule returns no value.

    The samples are at all powers of 1.1 in the schedule's unit. Sampling stops if the schedule raises, because a table of
    factors ends with the run.
    """
    peak: float | None = None
    of_run = isinstance(schedule, UnitSchedule) and schedule.unit == "dur"
    for t in _sample_fractions() if of_run else _geometric_counts(10**13):
        try:
            value = float(schedule(t))
        # The user's function may raise anything after the end of the run.
        except Exception:  # noqa: BLE001
            return peak
        peak = value if peak is None else max(peak, value)
    return peak


@dataclass
class _ScheduleCallError(Exception):
    """The function of a schedule raised an error at ``count``."""

    count: float


def _find_first_violation(
    schedule: Schedule, fits: Callable[[float], bool], points: Iterable[float], *, nearest: float
) -> tuple[float, float] | None:
    """Return the first count whose value violates ``fits``, and the value. A bisection refines the first bad point."""

    def evaluate(t: float) -> float:
        try:
            return schedule(t)
        except Exception as error:
            raise _ScheduleCallError(t) from error

    good: float | None = None
    for bad in points:
        if fits(evaluate(bad)):
            good = bad
            continue
        while good is not None and bad - good > nearest:
            middle = (good + bad) / 2 if nearest < 1 else (good + bad) // 2
            good, bad = (middle, bad) if fits(evaluate(middle)) else (good, middle)
        return bad, evaluate(bad)
    return None


def _sample_counts(last: float, *, integer: bool) -> Iterator[float]:
    """Yield increasing counts from 0 to ``last``: all small counts, evenly spaced counts, and powers of 1.1."""
    if not integer:
        yield from (last * point / _NUM_SAMPLES for point in range(_NUM_SAMPLES + 1))
        return
    end = int(last)
    even = {end * point // _NUM_SAMPLES for point in range(_NUM_SAMPLES + 1)}
    yield from sorted({*range(min(64, end) + 1), *even, *(int(t) for t in _geometric_counts(end))})


def _geometric_counts(last: float) -> Iterator[int]:
    yield 0
    count = 1.0
    while count <= last:
        yield int(count)
        count = max(count * 1.1, count + 1.0)


def _sample_fractions() -> Iterator[float]:
    return (point / _NUM_SAMPLES for point in range(_NUM_SAMPLES + 1))


def _last_count(unit: str, run: RunLength) -> float | None:
    """Return the clock's count at the beginning of the last step of ``run``; None if unknown."""
    total = run.total
    if total is None:
        return None
    if unit == "dur":
        return math.nextafter(1.0, 0.0)
    if unit == total.unit:
        return max(float(total.value) - 1, 0)
    try:
        steps = run.steps()
    except ConfigError:
        # The run has no conversion from its unit to steps.
        return None
    per_step = {"ba": 1, "sp": run.samples_per_step, "tok": run.tokens_per_step}.get(unit)
    if unit == "ep" and run.steps_per_epoch is not None:
        return (steps - 1) // run.steps_per_epoch
    return None if per_step is None else (steps - 1) * per_step


_MIN_FACTOR_PEAK = 0.01
"""If no factor reaches this value, the factors are taken for learning rates."""

_MIN_UNIT_LR = 0.5
"""An optimizer with at least this learning rate expects absolute rates as factors."""


def warn_if_absolute_lr(
    caller: str, factors: Sequence[float | Schedule], factor_indices: Sequence[int | None], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Warn if ``factors`` look like learning rates, because the factors are multiplied by the optimizer's rates.

    Factors per layer are far below 1 for some groups, but not for all groups. Warm-ups and decays reach about 1 at some step.

    Args:
        caller: function that received the factors, for the warning.
        factors: numbers or schedules.
        factor_indices: index of the factor for each group; None for a group without a factor.
        groups: parameter groups of the optimizer, with the base rates.
    """
    peaks = [peak_value(factor) if callable(factor) else factor for factor in factors]
    bases = [(float(group["lr"]), index) for group, index in zip(groups, factor_indices, strict=True) if index is not None]
    largest = max((peak for peak in peaks if peak is not None), default=0.0)
    # A group without a factor keeps its rate, a factor of 1.
    if None in factor_indices:
        largest = max(largest, 1.0)
    for base, index in bases:
        top = peaks[index]
        if top is None or top <= 0 or base >= _MIN_UNIT_LR:
            continue
        same = callable(factors[index]) and math.isclose(top, base, rel_tol=0.1)
        if largest < _MIN_FACTOR_PEAK or (same and (largest == top or top < _MIN_FACTOR_PEAK)):
            warnings.warn(
                f"{caller}: the largest factor is {top:.3g} and the optimizer's rate is {base:.3g}, so the run trains at "
                f"{top * base:.3g}. Give factors of the optimizer's rate, as in dt.schedules.cosine(1.0, 0.1, steps), or give "
                "rates and build the optimizer with lr=1.0.",
                stacklevel=2,
            )
            return
