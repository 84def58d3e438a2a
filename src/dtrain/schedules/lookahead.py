"""Look ahead along a schedule: find a value that is not allowed before training comes to the step that uses it.

Factors of a learning rate, told apart from learning rates."""

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
"""The last count to look at if the length of the run is not known: about as long as runs are."""

_NUM_SAMPLES = 1024


def check_over_run(hyper: Hyperparameter, run: RunLength | None) -> str | None:
    """Check the values of a schedule over a run, before the run.

    It samples: every one of the first steps, the last one, and a thousand between; then it halves its way to where the values
    begin to be wrong.

    Returns:
        A warning, if the length of the run is not known and a schedule leaves its range in a run that goes on for long enough.

    Raises:
        ConfigError: the run comes to a step whose value is not allowed, or for which the schedule raises.
    """
    if not callable(hyper.value) or hyper.allowed is None:
        return None
    last = None if run is None else _last_count(hyper.unit, run)
    whole, end = hyper.unit != "dur", _HORIZONS[hyper.unit] if last is None else last
    try:
        found = _find_first_violation(
            hyper.value, hyper.allowed.is_satisfied, _sample_counts(end, whole=whole), nearest=1 if whole else 1e-6
        )
    except _ScheduleCallError as error:
        if last is None:
            return None  # a schedule need not go on behind the end of the run
        raise ConfigError(
            f"{hyper.label}: its schedule raises at {error.count} {hyper.unit} of the run: {error.__cause__!r}"
        ) from error
    if found is None:
        return None
    at, value = found
    when = f"step {at}" if hyper.unit == "ba" else f"{at} {hyper.unit}"
    what = f"{hyper.label} must be {hyper.allowed.text}, and its schedule gives {value!r} at {when}"
    if last is not None:
        of = "" if run is None or run.total is None else f" of a run of {run.total}"
        raise ConfigError(
            f"{what}{of}. Keep the schedule inside, for example with dt.schedules.clip(schedule, low=..., high=...)."
        )
    if at == 0:
        return None  # the first step raises
    return (
        f"{what}. A run that comes so far stops there with an error. Keep the schedule inside, for example with "
        "dt.schedules.clip(schedule, low=..., high=...), or give the length of the run: step.init(..., run=loader.run_length('3ep'))."
    )


def peak_value(schedule: Schedule) -> float | None:
    """Return the largest value of a schedule, as far as samples show; None if it gives none.

    The samples are at all powers of 1.1, in the schedule's own unit. A schedule that raises is asked no further: a table of the
    factors of a run has an end.
    """
    found: float | None = None
    for t in (
        _sample_fractions() if isinstance(schedule, UnitSchedule) and schedule.unit == "dur" else _geometric_counts(10**13)
    ):
        try:
            value = float(schedule(t))
        except Exception:  # noqa: BLE001  # of the user's function, for a time that no run may come to
            return found
        found = value if found is None else max(found, value)
    return found


@dataclass
class _ScheduleCallError(Exception):
    """The function of a schedule raised, at a count."""

    count: float


def _find_first_violation(
    schedule: Schedule, fits: Callable[[float], bool], points: Iterable[float], *, nearest: float
) -> tuple[float, float] | None:
    """Find the first of ``points`` whose value does not fit, and go back by halves to where that begins; with the value."""

    def at(t: float) -> float:
        try:
            return schedule(t)
        except Exception as error:
            raise _ScheduleCallError(t) from error

    fine: float | None = None
    for wrong in points:
        if fits(at(wrong)):
            fine = wrong
            continue
        while fine is not None and wrong - fine > nearest:
            middle = (fine + wrong) / 2 if nearest < 1 else (fine + wrong) // 2
            fine, wrong = (middle, wrong) if fits(at(middle)) else (fine, middle)
        return wrong, at(wrong)
    return None


def _sample_counts(last: float, *, whole: bool) -> Iterator[float]:
    """Counts from 0 to ``last``, in order: all the first ones, then evenly spaced, and powers, for runs of unknown length."""
    if not whole:
        yield from (last * point / _NUM_SAMPLES for point in range(_NUM_SAMPLES + 1))
        return
    end = int(last)
    even = {end * point // _NUM_SAMPLES for point in range(_NUM_SAMPLES + 1)}
    yield from sorted({*range(min(64, end) + 1), *even, *(int(t) for t in _geometric_counts(end))})


def _geometric_counts(last: float) -> Iterator[int]:
    yield 0
    at = 1.0
    while at <= last:
        yield int(at)
        at = max(at * 1.1, at + 1.0)


def _sample_fractions() -> Iterator[float]:
    return (point / _NUM_SAMPLES for point in range(_NUM_SAMPLES + 1))


def _last_count(unit: str, run: RunLength) -> float | None:
    """What the clock has counted when the last step of ``run`` begins; None if that is not known."""
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
        return None  # the units of this run cannot be converted into steps
    per_step = {"ba": 1, "sp": run.samples_per_step, "tok": run.tokens_per_step}.get(unit)
    if unit == "ep" and run.steps_per_epoch is not None:
        return (steps - 1) // run.steps_per_epoch
    return None if per_step is None else (steps - 1) * per_step


_MIN_FACTOR_PEAK = 0.01
"""If no factor ever comes to this, they are taken for rates."""

_MIN_UNIT_LR = 0.5
"""An optimizer with this rate or a larger one was built for rates."""


def warn_if_absolute_lr(
    caller: str, factors: Sequence[float | Schedule], factor_indices: Sequence[int | None], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Warn if ``factors`` look like learning rates, which would be multiplied by the rates of the optimizer.

    Factors by layer are far below 1 for some groups, but not for all of them. Warm-ups and decays come near 1 at some time.

    Args:
        caller: the function that was given the factors, for the warning.
        factors: numbers or schedules.
        factor_indices: for each group the index of its factor; None if it has none.
        groups: of the optimizer, with the base rates.
    """
    peaks = [peak_value(factor) if callable(factor) else factor for factor in factors]
    bases = [(float(group["lr"]), at) for group, at in zip(groups, factor_indices, strict=True) if at is not None]
    largest = max((found for found in peaks if found is not None), default=0.0)
    if None in factor_indices:  # a group without a factor keeps its rate
        largest = max(largest, 1.0)
    for base, at in bases:
        top = peaks[at]
        if top is None or top <= 0 or base >= _MIN_UNIT_LR:
            continue
        same = callable(factors[at]) and math.isclose(top, base, rel_tol=0.1)
        if largest < _MIN_FACTOR_PEAK or (same and (largest == top or top < _MIN_FACTOR_PEAK)):
            warnings.warn(
                f"{caller}: the factors come to {top:.3g} at most, and the optimizer's rate is {base:.3g}, so the run trains at "
                f"{top * base:.3g}. Give factors of the optimizer's rate, as in dt.schedules.cosine(1.0, 0.1, steps), or give rates and "
                "build the optimizer with lr=1.0.",
                stacklevel=2,
            )
            return
