"""Look ahead along a schedule: find a value that is not allowed before training comes to the step that uses it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from dtrain.durations import RunLength
from dtrain.errors import ConfigError
from dtrain.schedules.hyper import Hyperparameter, Measured
from dtrain.types import Schedule

_FARTHEST = {"ba": 10**6, "ep": 10**3, "sp": 10**9, "tok": 10**12, "sec": 10**7, "dur": 1}
"""The last count to look at if the length of the run is not known: about as long as runs are."""

_POINTS = 1024


def check_ahead(hyper: Hyperparameter, run: RunLength | None) -> str | None:
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
    last = None if run is None else _last(hyper.unit, run)
    whole, end = hyper.unit != "dur", _FARTHEST[hyper.unit] if last is None else last
    try:
        found = _first_outside(hyper.value, hyper.allowed.fits, _points(end, whole=whole), nearest=1 if whole else 1e-6)
    except _ScheduleError as error:
        if last is None:
            return None  # a schedule need not go on behind the end of the run
        raise ConfigError(
            f"{hyper.where}: its schedule raises at {error.at} {hyper.unit} of the run: {error.__cause__!r}"
        ) from error
    if found is None:
        return None
    at, value = found
    when = f"step {at}" if hyper.unit == "ba" else f"{at} {hyper.unit}"
    what = f"{hyper.where} must be {hyper.allowed.text}, and its schedule gives {value!r} at {when}"
    if last is not None:
        of = "" if run is None or run.total is None else f" of a run of {run.total}"
        raise ConfigError(f"{what}{of}. Keep the schedule inside, for example with dt.clamp(schedule, low=..., high=...).")
    if at == 0:
        return None  # the first step raises
    return (
        f"{what}. A run that comes so far stops there with an error. Keep the schedule inside, for example with "
        "dt.clamp(schedule, low=..., high=...), or give the length of the run: step.init(..., run=loader.run_length('3ep'))."
    )


def peak(schedule: Schedule) -> float | None:
    """Return the largest value of a schedule, as far as samples show; None if it gives none.

    The samples are at all powers of 1.1, in the schedule's own unit. A schedule that raises is asked no further: a table of the
    factors of a run has an end.
    """
    found: float | None = None
    for t in _share_points() if isinstance(schedule, Measured) and schedule.unit == "dur" else _powers(10**13):
        try:
            value = float(schedule(t))
        except Exception:  # noqa: BLE001  # of the user's function, for a time that no run may come to
            return found
        found = value if found is None else max(found, value)
    return found


@dataclass
class _ScheduleError(Exception):
    """The function of a schedule raised, at a count."""

    at: float


def _first_outside(
    schedule: Schedule, fits: Callable[[float], bool], points: Iterable[float], *, nearest: float
) -> tuple[float, float] | None:
    """Find the first of ``points`` whose value does not fit, and go back by halves to where that begins; with the value."""

    def at(t: float) -> float:
        try:
            return schedule(t)
        except Exception as error:
            raise _ScheduleError(t) from error

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


def _points(last: float, *, whole: bool) -> Iterator[float]:
    """Counts from 0 to ``last``, in order: all the first ones, then evenly spaced, and powers, for runs of unknown length."""
    if not whole:
        yield from (last * point / _POINTS for point in range(_POINTS + 1))
        return
    end = int(last)
    even = {end * point // _POINTS for point in range(_POINTS + 1)}
    yield from sorted({*range(min(64, end) + 1), *even, *(int(t) for t in _powers(end))})


def _powers(last: float) -> Iterator[int]:
    yield 0
    at = 1.0
    while at <= last:
        yield int(at)
        at = max(at * 1.1, at + 1.0)


def _share_points() -> Iterator[float]:
    return (point / _POINTS for point in range(_POINTS + 1))


def _last(unit: str, run: RunLength) -> float | None:
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
