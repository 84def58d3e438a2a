"""Hyperparameters as functions of the clock: numbers, schedules and the units of schedules.

``hyperparameter`` checks a number or schedule once and returns a function of the clock. ``with_unit`` makes a schedule a
function of tokens, samples or seconds. ``check_over_run`` checks a schedule over the whole run before the first step.
``warn_if_absolute_lr`` warns if factors look like learning rates. The other ``check_*`` functions check the arguments of the
schedule factories.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.arguments import check_choice, warn
from dtrain.errors import ConfigError
from dtrain.schedules.clock import Clock
from dtrain.schedules.durations import UNITS, RunLength
from dtrain.typing import Schedule


@dataclass(frozen=True, slots=True)
class UnitSchedule:
    """A schedule as a function of a unit other than steps, for example tokens, samples or seconds. Created by ``with_unit``."""

    unit: str
    schedule: Schedule

    def __call__(self, t: float) -> float:
        return self.schedule(t)


def with_unit(unit: str, schedule: Schedule) -> UnitSchedule:
    """Return ``schedule`` as a function of the clock's count of ``unit`` instead of steps.

    A transform that takes a schedule also takes the result. For example, a learning rate can follow the number of trained
    tokens, whatever the batch size is.

    Formula: ``value = schedule(clock.count(unit))``

    Args:
        unit: ``ba`` (steps), ``ep`` (whole epochs), ``sp``, ``tok``, ``sec`` (rank 0's clock), ``dur`` (fraction of the run).
        schedule: a pure function of the count.

    Example:
        >>> import dtrain as dt
        >>> decay = dt.schedules.with_unit("tok", lambda t: 1.0 - t / 1e9)
        >>> dt.schedules.hyperparameter(decay, "example")(
        ...     dt.schedules.Clock(tokens=250_000_000)
        ... )
        0.75

    Raises:
        ConfigError: ``unit`` is unknown, or ``schedule`` is not a function or has another unit.

    Source: dtrain's own; a scheduler of MosaicML's Composer has the unit of its ``t_max``.
    """
    check_choice("with_unit", "unit", unit, UNITS)
    if not callable(schedule):
        raise ConfigError(f"with_unit: schedule must be a function of a number, got {schedule!r}. Pass a schedule.")
    if isinstance(schedule, UnitSchedule) and schedule.unit != unit:
        raise ConfigError(
            f"with_unit: the schedule must not have another unit, got {schedule.unit!r} and {unit=}. Give one unit."
        )
    return UnitSchedule(unit, schedule)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A condition on a number, with its text for errors: "in [0, 1)"."""

    text: str
    is_satisfied: Callable[[float], bool]


def parse_interval(text: str) -> Constraint:
    """Parse an interval in mathematical notation: ``"[0, 1)"`` includes 0 and excludes 1.

    Example:
        >>> [parse_interval("[0, 1)").is_satisfied(value) for value in (-0.1, 0.0, 1.0)]
        [False, True, False]
    """
    low, high = (float(bound) for bound in text[1:-1].split(","))
    above = operator.ge if text[0] == "[" else operator.gt
    below = operator.le if text[-1] == "]" else operator.lt
    return Constraint(f"in {text}", lambda value: bool(above(value, low) and below(value, high)))


@dataclass(frozen=True, slots=True)
class Hyperparameter:
    """A number or a schedule as a function of the clock. Created by ``hyperparameter``.

    Args:
        label: name of the method and the hyperparameter for errors: ``"ema: decay"``.
        value: the number or schedule.
        allowed: condition on every value; None allows all numbers.
    """

    label: str
    value: float | Schedule
    allowed: Constraint | None = None

    @property
    def unit(self) -> str:
        """Return the unit of the schedule: steps, or the unit given to ``with_unit``."""
        return self.value.unit if isinstance(self.value, UnitSchedule) else "ba"

    def __call__(self, clock: Clock) -> float:
        """Return the value for the next step.

        Raises:
            ConfigError: the schedule returns a value that is no number or is not allowed.
        """
        if not callable(self.value):
            return self.value
        value = self.value(clock.count(self.unit))
        if type(value) is not float:
            number = to_number(value)
            if number is None:
                raise ConfigError(f"{_describe_non_number(self.label, value)} at step {clock.step}. {_advise_on_return(value)}")
            value = number
        if self.allowed is not None and not self.allowed.is_satisfied(value):
            raise ConfigError(
                f"{self.label} must be {self.allowed.text}, got {value!r} from its schedule at step {clock.step}. "
                "Keep the schedule inside, for example with dt.schedules.clip(schedule, low=..., high=...)."
            )
        return value


def hyperparameter(value: float | Schedule, label: str, allowed: str | Constraint | None = None) -> Hyperparameter:
    """Return a number or schedule as a checked function of the clock.

    A schedule is evaluated for the next step: at the step number, or at the clock's count of the schedule's unit. ``Step.init``
    checks the schedules in ``Transform.hyperparameters`` over the whole run.

    Args:
        value: a finite number or a schedule.
        label: name of the method and the hyperparameter for errors: ``"ema: decay"``.
        allowed: interval of the allowed values, for example ``"[0, 1)"``; None allows all numbers.

    Example:
        >>> import dtrain as dt
        >>> decay = dt.schedules.hyperparameter(
        ...     lambda step: 0.9 + step / 100, "mine: decay", "[0, 1)"
        ... )
        >>> decay(dt.schedules.Clock(step=5))
        0.9500000000000001

    Raises:
        ConfigError: ``value`` is neither a finite number nor a function, or the number is not allowed.
    """
    condition = parse_interval(allowed) if isinstance(allowed, str) else allowed
    if hasattr(value, "get_last_lr"):
        name = value.__name__ if isinstance(value, type) else type(value).__name__
        raise ConfigError(
            f"{label} must be a number or a function of the step, got torch's {name}, which sets the rates of the optimizer "
            "itself. Pass the function that LambdaLR takes, or a schedule such as dt.schedules.cosine(1.0, 0.0, 600)."
        )
    if not callable(value):
        number = None if isinstance(value, bool) else to_number(value)
        value = value if number is None else number
        if not is_number(value) or not math.isfinite(value):
            raise ConfigError(
                f"{label} must be a finite number or a schedule (a function of the step), got {value!r}. "
                "Pass a number, or a schedule such as dt.schedules.linear(1.0, 0.0, 600)."
            )
        if condition is not None and not condition.is_satisfied(value):
            raise ConfigError(f"{label} must be {condition.text}, got {value!r}. Change the value.")
    return Hyperparameter(label, value, condition)


def is_number(value: object) -> bool:
    """Return True if ``value`` is an int or a float. True and False are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def to_number(value: object) -> float | None:
    """Convert a real number (numpy's, a tensor without axes) to a plain float or int; return None for other values."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, int):
        return value
    return float(value) if isinstance(value, numbers.Real) else None


def _describe_non_number(label: str, value: object) -> str:
    return f"{label} must be a number, got {value!r} from its schedule"


def _advise_on_return(value: object) -> str:
    return "Does the function return?" if value is None else "Return a float, such as float(value)."


STEP_UNIT = "ba"
"""The unit of a function without ``with_unit``."""


def common_unit(caller: str, *schedules: Schedule) -> str:
    """Return the unit that all ``schedules`` share.

    Raises:
        ConfigError: an argument is not a function, or the schedules have different units.
    """
    units: list[str] = []
    for schedule in schedules:
        if not callable(schedule):
            raise ConfigError(
                f"{caller}: schedule must be a function of a number, got {schedule!r}. For a number use dt.schedules.constant."
            )
        units.append(schedule.unit if isinstance(schedule, UnitSchedule) else STEP_UNIT)
    if len(distinct := dict.fromkeys(units)) > 1:
        raise ConfigError(
            f"{caller}: schedules must have one unit, got {' and '.join(distinct)}. Give each schedule that unit with "
            "dt.schedules.with_unit."
        )
    return units[0]


def attach_unit(unit: str, schedule: Schedule) -> Schedule:
    """Return ``schedule`` as a function of ``unit``. A schedule of steps is returned unchanged."""
    return schedule if unit == STEP_UNIT else UnitSchedule(unit, schedule)


def check_sequence(caller: str, name: str, values: object) -> None:
    """Raise unless ``values`` is iterable and not text.

    Raises:
        ConfigError: ``values`` is a single value.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(f"{caller}: {name} must be a list, got {name}={values!r}. Write [{values!r}] for a single value.")


def check_increasing(caller: str, name: str, times: tuple[float, ...]) -> None:
    """Raise unless ``times`` are increasing numbers, each at least 0.

    Raises:
        ConfigError: ``times`` are not such numbers.
    """
    if not all(is_number(time) and 0 <= time < math.inf for time in times) or sorted(set(times)) != list(times):
        raise ConfigError(
            f"{caller}: {name} must be increasing numbers of at least 0, got {list(times)!r}. "
            "Sort the numbers, and remove repetitions."
        )


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
    allowed = hyper.allowed

    def fits(value: object) -> bool:
        number = value if type(value) is float else to_number(value)
        return number is not None and allowed.is_satisfied(number)

    try:
        violation = _find_first_violation(
            hyper.value, fits, _sample_counts(end, integer=integer), nearest=1 if integer else 1e-6
        )
    except _ScheduleCallError as error:
        if last is None:
            # A schedule may raise after the end of the run.
            return None
        raise ConfigError(
            f"{hyper.label}: the schedule raises at {error.count} {hyper.unit} of the run: {error.__cause__!r}. "
            "Call the schedule at this point to see its error."
        ) from error
    if violation is None:
        return None
    count, value = violation
    when = f"step {count}" if hyper.unit == "ba" else f"{count} {hyper.unit}"
    problem = f"{hyper.label} must be {allowed.text}, got {value!r} from its schedule at {when}"
    if to_number(value) is None:
        problem = f"{_describe_non_number(hyper.label, value)} at {when}"
        if last is not None:
            raise ConfigError(f"{problem}. {_advise_on_return(value)}")
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
    for t in _sample_counts(1.0, integer=False) if of_run else _geometric_counts(10**13):
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
            warn(
                f"{caller}: the largest factor is {top:.3g} and the optimizer's rate is {base:.3g}, so the run trains at "
                f"{top * base:.3g}. Give factors of the optimizer's rate, as in dt.schedules.cosine(1.0, 0.1, steps), or give "
                "rates and build the optimizer with lr=1.0."
            )
            return
