"""Composer's schedules without a warm-up.

Durations as numbers of one unit: of what the clock counts where they agree on it, else of steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from dtrain.durations import Duration, RunLength
from dtrain.errors import ConfigError
from dtrain.schedules import curves, phases
from dtrain.schedules.hyperparameter import STEP_UNIT, attach_unit, check_finite, check_sequence, is_number
from dtrain.typing import Schedule

Length: TypeAlias = "Duration | int | str"

_COUNTED_UNITS = ("sp", "tok", "sec")  # a schedule of these needs no conversion; whole epochs would make stairs of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Durations by the name of their argument, as exact numbers of ``unit``."""

    unit: str
    fractions: Mapping[str, Fraction]

    def __getitem__(self, name: str) -> float:
        """One of them; whole ones are integers."""
        found = self.fractions[name]
        return int(found) if found.denominator == 1 else float(found)

    def to_schedule(self, at: Schedule) -> Schedule:
        """``at`` as a function of their unit."""
        return attach_unit(self.unit, at)


def parse_lengths(caller: str, run: RunLength, given: Mapping[str, Length]) -> Lengths:
    """The durations ``given`` by the names of their arguments, in one unit. A ``t_warmup`` may be none at all.

    Raises:
        ConfigError: no duration, or one that ``run`` knows too little for; units that cannot be converted into each other.
    """
    if not isinstance(run, RunLength):
        raise ConfigError(f"{caller}: needs the length of the run first, got {run!r}; loader.run_length('3ep') gives it")
    parsed = {name: Duration.parse(length, allow_zero=name == "t_warmup") for name, length in given.items()}
    try:
        found = {name: _to_absolute(length, run) for name, length in parsed.items()}
        if len(units := {unit for value, unit in found.values() if value}) == 1 and units <= set(_COUNTED_UNITS):
            return Lengths(unit=units.pop(), fractions={name: value for name, (value, _) in found.items()})
        return Lengths(unit=STEP_UNIT, fractions={name: _in_steps(length, run) for name, length in parsed.items()})
    except ConfigError as error:
        told = ", ".join(f"{name}={length}" for name, length in parsed.items())
        one = " Or give all durations in one unit." if len({length.unit for length in parsed.values()}) > 1 else ""
        raise ConfigError(f"{caller}: {told}: {error}{one}") from None


def check_covers_run(caller: str, run: RunLength, t_max: Length, alpha_i: float, alpha_f: float) -> None:
    """Return unless ``t_max`` ends before the run does and leaves it a rate of 0, with which nothing is learned.

    Raises:
        ConfigError: it does, or a factor is not a finite number.
    """
    check_finite(caller, alpha_i=alpha_i, alpha_f=alpha_f)
    if run.total is None or not alpha_i > alpha_f == 0:
        return
    try:
        both = parse_lengths(caller, run, {"t_max": t_max, "total": run.total})
    except ConfigError:
        return  # they cannot be compared
    if both.fractions["t_max"] < both.fractions["total"]:
        raise ConfigError(
            f"{caller}: t_max={t_max} ends before the run of {run.total} does, and the rest of it would have a rate of 0; "
            "give t_max='1dur', or alpha_f above 0, or leave total out of RunLength(...) where this is meant"
        )


def name_each(caller: str, name: str, values: Sequence[Length]) -> dict[str, Length]:
    """Several durations of one argument, each by a name of its own.

    Raises:
        ConfigError: one duration instead of several.
    """
    check_sequence(caller, name, values)
    return {f"{name}[{number}]": value for number, value in enumerate(values)}


def _to_absolute(length: Duration, run: RunLength) -> tuple[Fraction, str]:
    """Its exact number and unit; a share of the run in the unit of the run."""
    if length.unit != "dur":
        return length.fraction, length.unit
    if run.total is None:
        raise ConfigError(f"{length} is a share of the run, whose length is not known. Give RunLength(total=...).")
    return length.fraction * run.total.fraction, run.total.unit


def _in_steps(length: Duration, run: RunLength) -> Fraction:
    if not length.value:
        return Fraction(0)  # of whatever unit
    length.steps(run)  # refuses what cannot be told; it rounds up to whole steps, and a schedule must not
    value, unit = _to_absolute(length, run)
    per = {"ep": run.steps_per_epoch, "sp": run.samples_per_step, "tok": run.tokens_per_step}.get(unit)
    if per is None:
        return value
    return value * Fraction(per) if unit == "ep" else value / Fraction(per)


def constant(run: RunLength, alpha: float = 1.0, t_max: Length = "1dur") -> Schedule:
    """The factor ``alpha`` before ``t_max``, and 1 from there on.

    Formula: ``alpha`` for ``t < t_max``, else ``1.0``

    Raises:
        ConfigError: a length that cannot be told, or ``alpha`` is not a finite number.

    Source: Composer, ``ConstantScheduler``.

    Example:
        >>> run = RunLength(total="3ep", steps_per_epoch=10)
        >>> [constant(run, 0.5, t_max="2ep")(t) for t in (0, 19, 20, 29)]
        [0.5, 0.5, 1.0, 1.0]
    """
    where = "composer.constant"
    check_finite(where, alpha=alpha)
    until = parse_lengths(where, run, {"t_max": t_max})
    end = until["t_max"]
    return until.to_schedule(lambda t: alpha if t < end else 1.0)


def linear(run: RunLength, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: Length = "1dur") -> Schedule:
    """A straight line of factors from ``alpha_i`` to ``alpha_f``, which is reached at ``t_max`` and kept.

    Formula: ``alpha_i + (alpha_f - alpha_i) * min(1, t / t_max)``

    Raises:
        ConfigError: a length that cannot be told, a factor that is not finite, or a run that goes on at a factor of 0.

    Source: Composer, ``LinearScheduler``.

    Example:
        >>> run = RunLength(total="2ep", steps_per_epoch=10)
        >>> [linear(run)(t) for t in (0, 5, 20)]
        [1.0, 0.75, 0.0]
    """
    where = "composer.linear"
    within = parse_lengths(where, run, {"t_max": t_max})
    check_covers_run(where, run, t_max, alpha_i, alpha_f)
    return within.to_schedule(curves.linear(alpha_i, alpha_f, within["t_max"]))


def cosine(run: RunLength, t_max: Length = "1dur", alpha_f: float = 0.0) -> Schedule:
    """The falling half of a cosine of factors from 1 to ``alpha_f``, which is reached at ``t_max`` and kept.

    Formula: ``alpha_f + (1 - alpha_f) * (1 + cos(pi * tau)) / 2``, where ``tau = min(1, t / t_max)``

    Raises:
        ConfigError: a length that cannot be told, ``alpha_f`` is not finite, or a run that goes on at a factor of 0.

    Source: Composer, ``CosineAnnealingScheduler``.

    Example:
        >>> run = RunLength(total="40ba")
        >>> [round(cosine(run, alpha_f=0.1)(t), 3) for t in (0, 20, 40, 50)]
        [1.0, 0.55, 0.1, 0.1]
    """
    where = "composer.cosine"
    within = parse_lengths(where, run, {"t_max": t_max})
    check_covers_run(where, run, t_max, 1.0, alpha_f)
    return within.to_schedule(curves.cosine(1.0, alpha_f, within["t_max"]))


def cosine_warm_restarts(run: RunLength, t_0: Length, t_mult: float = 1.0, alpha_f: float = 0.0) -> Schedule:
    """The falling half of a cosine of factors from 1 to ``alpha_f``, again and again, each ``t_mult`` times as long.

    Formula: ``alpha_f + (1 - alpha_f) * (1 + cos(pi * tau)) / 2``, where cycle ``i`` begins at
    ``t_i = t_0 * (1 + t_mult + ... + t_mult ** (i - 1))`` and ``tau = (t - t_i) / (t_0 * t_mult ** i)``

    Raises:
        ConfigError: a length that cannot be told, ``t_mult`` is below 1, or ``alpha_f`` is not finite.

    Source: Composer, ``CosineAnnealingWarmRestartsScheduler``.

    Example:
        >>> run = RunLength(total="7ep", steps_per_epoch=10)
        >>> [round(cosine_warm_restarts(run, "1ep", 2.0)(t), 3) for t in (0, 5, 10, 20, 30)]
        [1.0, 0.5, 1.0, 0.5, 1.0]
    """
    where = "composer.cosine_warm_restarts"
    check_finite(where, alpha_f=alpha_f)
    if not is_number(t_mult) or not 1 <= t_mult < math.inf:
        raise ConfigError(f"{where}: t_mult must be at least 1, got {t_mult=}; shorter cycles would pile up")
    first = parse_lengths(where, run, {"t_0": t_0})
    return first.to_schedule(phases.cosine_restarts(1.0, alpha_f, first["t_0"], multiplier=t_mult))


def polynomial(run: RunLength, power: float, t_max: Length = "1dur", alpha_f: float = 0.0) -> Schedule:
    """Factors from 1 to ``alpha_f``, reached at ``t_max`` and kept, as a power of the share of the time that is left.

    Formula: ``alpha_f + (1 - alpha_f) * (1 - tau) ** power``, where ``tau = min(1, t / t_max)``

    Raises:
        ConfigError: a length that cannot be told, ``power`` is not positive, ``alpha_f`` is not finite, or a run that goes on
            at a factor of 0.

    Source: Composer, ``PolynomialScheduler``.

    Example:
        >>> run = RunLength(total="10ba")
        >>> [round(polynomial(run, 2.0)(t), 3) for t in (0, 5, 9, 10)]
        [1.0, 0.25, 0.01, 0.0]
    """
    where = "composer.polynomial"
    within = parse_lengths(where, run, {"t_max": t_max})
    check_covers_run(where, run, t_max, 1.0, alpha_f)
    return within.to_schedule(curves.polynomial(1.0, alpha_f, within["t_max"], power=power))


def exponential(run: RunLength, gamma: float, decay_period: Length = "1ep") -> Schedule:
    """Factors that fall to ``gamma`` of themselves in each ``decay_period``, continuously.

    Formula: ``gamma ** (t / decay_period)``

    Raises:
        ConfigError: a length that cannot be told, or ``gamma`` is not above 0 and at most 1.

    Source: Composer, ``ExponentialScheduler``.

    Example:
        >>> run = RunLength(total="3ep", steps_per_epoch=10)
        >>> [exponential(run, 0.25)(t) for t in (0, 5, 10)]
        [1.0, 0.5, 0.25]
    """
    where = "composer.exponential"
    _check_gamma(where, gamma)
    period = parse_lengths(where, run, {"decay_period": decay_period})
    return period.to_schedule(curves.exponential(1.0, gamma, period["decay_period"]))


def step(run: RunLength, step_size: Length, gamma: float = 0.1) -> Schedule:
    """The factor ``gamma`` once more after each ``step_size``.

    Formula: ``gamma ** floor(t / step_size)``

    Raises:
        ConfigError: a length that cannot be told, or ``gamma`` is not above 0 and at most 1.

    Source: Composer, ``StepScheduler``.

    Example:
        >>> run = RunLength(total="3ep", steps_per_epoch=10)
        >>> [step(run, "1ep", 0.5)(t) for t in (0, 9, 10, 20)]
        [1.0, 1.0, 0.5, 0.25]
    """
    where = "composer.step"
    _check_gamma(where, gamma)
    period = parse_lengths(where, run, {"step_size": step_size})
    after, size = curves.geometric(where, 1.0, gamma, None), period.fractions["step_size"]
    return period.to_schedule(lambda t: after(math.floor(t / size)))  # exact: 0.3 steps go ten times into 3 of them


def multi_step(run: RunLength, milestones: Sequence[Length], gamma: float = 0.1) -> Schedule:
    """The factor ``gamma`` once more from each of ``milestones`` on.

    Formula: ``gamma ** n``, where ``n`` milestones are reached

    Raises:
        ConfigError: a length that cannot be told, no milestones, some that do not increase, or ``gamma`` is not finite.

    Source: Composer, ``MultiStepScheduler``.

    Example:
        >>> run = RunLength(total="10ep", steps_per_epoch=10)
        >>> [round(multi_step(run, ["0.3dur", "5ep"])(t), 3) for t in (0, 29, 30, 49, 50)]
        [1.0, 1.0, 0.1, 0.1, 0.01]
    """
    where = "composer.multi_step"
    times = parse_lengths(where, run, name_each(where, "milestones", milestones))
    return times.to_schedule(curves.multi_step(1.0, gamma, [times[name] for name in times.fractions]))


def _check_gamma(caller: str, gamma: float) -> None:
    if not is_number(gamma) or not 0 < gamma <= 1:
        raise ConfigError(
            f"{caller}: gamma must be above 0 and at most 1, got {gamma=}; to grow, take step_decay or exponential of dtrain "
            "with an end=, where the value stays"
        )
