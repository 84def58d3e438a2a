"""Composer's schedulers, without and with a linear warm-up from 0.

``parse_lengths`` converts the durations of a scheduler to one unit: a count of the clock that all share, or steps. After a
warm-up the decay ends at ``t_max``, as in Composer's code. Composer's documentation instead divides by ``t_max`` after the
warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from dtrain.arguments import check_number
from dtrain.errors import ConfigError
from dtrain.schedules import curves
from dtrain.schedules.durations import Duration, RunLength
from dtrain.schedules.hyperparameters import STEP_UNIT, attach_unit, check_sequence
from dtrain.typing import Schedule

Length: TypeAlias = "Duration | int | str"
# Units of the clock that need no conversion to steps. Epochs are excluded, because the clock counts whole epochs only.
_COUNTED_UNITS = ("sp", "tok", "sec")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Durations by the name of their argument, as exact numbers of ``unit``."""

    unit: str
    fractions: Mapping[str, Fraction]

    def __getitem__(self, name: str) -> float:
        """Return the length ``name``, as an int if integral."""
        length = self.fractions[name]
        return int(length) if length.denominator == 1 else float(length)

    def to_schedule(self, schedule: Schedule) -> Schedule:
        """Return ``schedule`` as a function of the unit of these lengths."""
        return attach_unit(self.unit, schedule)


def parse_lengths(caller: str, run_length: RunLength, durations: Mapping[str, Length]) -> Lengths:
    """Convert ``durations``, by argument name, to one unit. Only ``t_warmup`` may be 0.

    Raises:
        ConfigError: an entry is not a duration, or ``run_length`` lacks the numbers for a conversion to one unit.
    """
    if not isinstance(run_length, RunLength):
        raise ConfigError(
            f"{caller}: run_length must be a dt.schedules.RunLength, got {run_length!r}. Give loader.run_length('3ep')."
        )
    parsed = {name: Duration.parse(length, allow_zero=name == "t_warmup") for name, length in durations.items()}
    try:
        absolute = {name: _to_absolute(length, run_length) for name, length in parsed.items()}
        if len(units := {unit for value, unit in absolute.values() if value}) == 1 and units <= set(_COUNTED_UNITS):
            return Lengths(unit=units.pop(), fractions={name: value for name, (value, _) in absolute.items()})
        return Lengths(unit=STEP_UNIT, fractions={name: _in_steps(length, run_length) for name, length in parsed.items()})
    except ConfigError as error:
        arguments = ", ".join(f"{name}={length}" for name, length in parsed.items())
        several = len({length.unit for length in parsed.values()}) > 1
        advice = " Or give all durations in one unit." if several else ""
        raise ConfigError(f"{caller}: {arguments}: {error}{advice}") from None


def check_covers_run(caller: str, run_length: RunLength, t_max: Length, alpha_i: float, alpha_f: float) -> None:
    """Raise if ``t_max`` ends before the run and the remaining steps would have a factor of 0.

    Raises:
        ConfigError: the remaining steps have a factor of 0, or a factor is not a finite number.
    """
    check_number(caller, "alpha_i", alpha_i)
    check_number(caller, "alpha_f", alpha_f)
    if run_length.total is None or not alpha_i > alpha_f == 0:
        return
    try:
        lengths = parse_lengths(caller, run_length, {"t_max": t_max, "total": run_length.total})
    except ConfigError:
        # The lengths cannot be compared.
        return
    if lengths.fractions["t_max"] < lengths.fractions["total"]:
        raise ConfigError(
            f"{caller}: t_max must not end before the run of {run_length.total} with a factor of 0, got t_max={t_max}. "
            "Give t_max='1dur', or alpha_f above 0, or omit total in RunLength(...) if this is intended."
        )


def name_milestones(caller: str, milestones: Sequence[Length]) -> dict[str, Length]:
    """Return durations by generated names: ``"milestones[0]"``, ``"milestones[1]"``.

    Raises:
        ConfigError: ``milestones`` is a single duration.
    """
    check_sequence(caller, "milestones", milestones)
    return {f"milestones[{index}]": value for index, value in enumerate(milestones)}


def _to_absolute(length: Duration, run_length: RunLength) -> tuple[Fraction, str]:
    """Return the exact number and unit of ``length``. A fraction of the run has the unit of the run."""
    if length.unit != "dur":
        return length.fraction, length.unit
    if run_length.total is None:
        raise ConfigError(f"{length} is a fraction of the run, whose length is not known. Give RunLength(total=...).")
    return length.fraction * run_length.total.fraction, run_length.total.unit


def _in_steps(length: Duration, run_length: RunLength) -> Fraction:
    if not length.value:
        # 0 is the same length in every unit.
        return Fraction(0)
    # Raise if the conversion is impossible. The result is not used, because steps() rounds up to whole steps.
    length.steps(run_length)
    value, unit = _to_absolute(length, run_length)
    per = {"ep": run_length.steps_per_epoch, "sp": run_length.samples_per_step, "tok": run_length.tokens_per_step}.get(unit)
    if per is None:
        return value
    return value * Fraction(per) if unit == "ep" else value / Fraction(per)


def constant(run_length: RunLength, alpha: float = 1.0, t_max: Length = "1dur") -> Schedule:
    """Return the factor ``alpha`` before ``t_max``, and 1 from ``t_max`` on.

    Formula: ``alpha`` for ``t < t_max``, else ``1.0``

    Example:
        >>> import dtrain as dt
        >>> run = dt.schedules.RunLength(total="3ep", steps_per_epoch=10)
        >>> schedule = dt.schedules.composer.constant(run, 0.5, t_max="2ep")
        >>> [schedule(t) for t in (0, 19, 20, 29)]
        [0.5, 0.5, 1.0, 1.0]

    Raises:
        ConfigError: ``run_length`` cannot convert a length, or ``alpha`` is not a finite number.

    Source: Composer, ``ConstantScheduler``.
    """
    caller = "composer.constant"
    check_number(caller, "alpha", alpha)
    until = parse_lengths(caller, run_length, {"t_max": t_max})
    end = until["t_max"]
    return until.to_schedule(lambda t: alpha if t < end else 1.0)


def linear(run_length: RunLength, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: Length = "1dur") -> Schedule:
    """Return a straight line of factors from ``alpha_i`` to ``alpha_f`` at ``t_max``, and ``alpha_f`` after that.

    Formula: ``alpha_i + (alpha_f - alpha_i) * min(1, t / t_max)``

    Example:
        >>> import dtrain as dt
        >>> run = dt.schedules.RunLength(total="2ep", steps_per_epoch=10)
        >>> schedule = dt.schedules.composer.linear(run)
        >>> [schedule(t) for t in (0, 5, 20)]
        [1.0, 0.75, 0.0]

    Raises:
        ConfigError: ``run_length`` cannot convert a length, a factor is not finite, or the run continues with a factor of 0.

    Source: Composer, ``LinearScheduler``.
    """
    caller = "composer.linear"
    within = parse_lengths(caller, run_length, {"t_max": t_max})
    check_covers_run(caller, run_length, t_max, alpha_i, alpha_f)
    return within.to_schedule(curves.linear(alpha_i, alpha_f, within["t_max"]))


def cosine(run_length: RunLength, t_max: Length = "1dur", alpha_f: float = 0.0) -> Schedule:
    """Return a half cosine of factors from 1 to ``alpha_f`` at ``t_max``, and ``alpha_f`` after that.

    Formula: ``alpha_f + (1 - alpha_f) * (1 + cos(pi * tau)) / 2``, where ``tau = min(1, t / t_max)``

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.composer.cosine(
        ...     dt.schedules.RunLength(total="40ba"), alpha_f=0.1
        ... )
        >>> [round(schedule(t), 3) for t in (0, 20, 40, 50)]
        [1.0, 0.55, 0.1, 0.1]

    Raises:
        ConfigError: ``run_length`` cannot convert a length, ``alpha_f`` is not finite, or the run continues with a factor of 0.

    Source: Composer, ``CosineAnnealingScheduler``.
    """
    caller = "composer.cosine"
    within = parse_lengths(caller, run_length, {"t_max": t_max})
    check_covers_run(caller, run_length, t_max, 1.0, alpha_f)
    return within.to_schedule(curves.cosine(1.0, alpha_f, within["t_max"]))


def cosine_warm_restarts(run_length: RunLength, t_0: Length, t_mult: float = 1.0, alpha_f: float = 0.0) -> Schedule:
    """Return repeated half cosines of factors from 1 to ``alpha_f``, each ``t_mult`` times as long as the previous cycle.

    Formula: ``alpha_f + (1 - alpha_f) * (1 + cos(pi * tau)) / 2``, where cycle ``i`` begins at
    ``t_i = t_0 * (1 + t_mult + ... + t_mult ** (i - 1))`` and ``tau = (t - t_i) / (t_0 * t_mult ** i)``

    Example:
        >>> import dtrain as dt
        >>> run = dt.schedules.RunLength(total="7ep", steps_per_epoch=10)
        >>> schedule = dt.schedules.composer.cosine_warm_restarts(run, "1ep", 2.0)
        >>> [round(schedule(t), 3) for t in (0, 5, 10, 20, 30)]
        [1.0, 0.5, 1.0, 0.5, 1.0]

    Raises:
        ConfigError: ``run_length`` cannot convert a length, ``t_mult`` is below 1, or ``alpha_f`` is not finite.

    Source: Composer, ``CosineAnnealingWarmRestartsScheduler``.
    """
    caller = "composer.cosine_warm_restarts"
    check_number(caller, "alpha_f", alpha_f)
    check_number(caller, "t_mult", t_mult, minimum=1)
    first = parse_lengths(caller, run_length, {"t_0": t_0})
    return first.to_schedule(curves.cosine_restarts(1.0, alpha_f, first["t_0"], multiplier=t_mult))


def polynomial(run_length: RunLength, power: float, t_max: Length = "1dur", alpha_f: float = 0.0) -> Schedule:
    """Return a polynomial decay of factors from 1 to ``alpha_f`` at ``t_max``, and ``alpha_f`` after that.

    Formula: ``alpha_f + (1 - alpha_f) * (1 - tau) ** power``, where ``tau = min(1, t / t_max)``

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.composer.polynomial(
        ...     dt.schedules.RunLength(total="10ba"), 2.0
        ... )
        >>> [round(schedule(t), 3) for t in (0, 5, 9, 10)]
        [1.0, 0.25, 0.01, 0.0]

    Raises:
        ConfigError: ``run_length`` cannot convert a length, ``power`` is not positive, ``alpha_f`` is not finite, or the run
            continues with a factor of 0.

    Source: Composer, ``PolynomialScheduler``.
    """
    caller = "composer.polynomial"
    within = parse_lengths(caller, run_length, {"t_max": t_max})
    check_covers_run(caller, run_length, t_max, 1.0, alpha_f)
    return within.to_schedule(curves.polynomial(1.0, alpha_f, within["t_max"], power=power))


def exponential(run_length: RunLength, gamma: float, decay_period: Length = "1ep") -> Schedule:
    """Return an exponential decay of factors: times ``gamma`` per ``decay_period``.

    Formula: ``gamma ** (t / decay_period)``

    Example:
        >>> import dtrain as dt
        >>> run = dt.schedules.RunLength(total="3ep", steps_per_epoch=10)
        >>> schedule = dt.schedules.composer.exponential(run, 0.25)
        >>> [schedule(t) for t in (0, 5, 10)]
        [1.0, 0.5, 0.25]

    Raises:
        ConfigError: ``run_length`` cannot convert a length, or ``gamma`` is not above 0 and at most 1.

    Source: Composer, ``ExponentialScheduler``.
    """
    caller = "composer.exponential"
    _check_gamma(caller, gamma)
    period = parse_lengths(caller, run_length, {"decay_period": decay_period})
    return period.to_schedule(curves.exponential(1.0, gamma, period["decay_period"]))


def step(run_length: RunLength, step_size: Length, gamma: float = 0.1) -> Schedule:
    """Return factors that are multiplied by ``gamma`` after each ``step_size``.

    Formula: ``gamma ** floor(t / step_size)``

    Example:
        >>> import dtrain as dt
        >>> run = dt.schedules.RunLength(total="3ep", steps_per_epoch=10)
        >>> schedule = dt.schedules.composer.step(run, "1ep", 0.5)
        >>> [schedule(t) for t in (0, 9, 10, 20)]
        [1.0, 1.0, 0.5, 0.25]

    Raises:
        ConfigError: ``run_length`` cannot convert a length, or ``gamma`` is not above 0 and at most 1.

    Source: Composer, ``StepScheduler``.
    """
    caller = "composer.step"
    _check_gamma(caller, gamma)
    period = parse_lengths(caller, run_length, {"step_size": step_size})
    after, size = curves.geometric(caller, 1.0, gamma, None), period.fractions["step_size"]
    # A Fraction divides exactly: 3 steps are ten times 0.3 steps.
    return period.to_schedule(lambda t: after(math.floor(t / size)))


def multi_step(run_length: RunLength, milestones: Sequence[Length], gamma: float = 0.1) -> Schedule:
    """Return factors that are multiplied by ``gamma`` at each milestone.

    Formula: ``gamma ** n``, where ``n`` milestones are reached

    Example:
        >>> import dtrain as dt
        >>> run = dt.schedules.RunLength(total="10ep", steps_per_epoch=10)
        >>> schedule = dt.schedules.composer.multi_step(run, ["0.3dur", "5ep"])
        >>> [round(schedule(t), 3) for t in (0, 29, 30, 49, 50)]
        [1.0, 1.0, 0.1, 0.1, 0.01]

    Raises:
        ConfigError: ``run_length`` cannot convert a length, ``milestones`` is empty or does not increase, or ``gamma`` is not
            finite.

    Source: Composer, ``MultiStepScheduler``.
    """
    caller = "composer.multi_step"
    times = parse_lengths(caller, run_length, name_milestones(caller, milestones))
    return times.to_schedule(curves.multi_step(1.0, gamma, [times[name] for name in times.fractions]))


def _check_gamma(caller: str, gamma: float) -> None:
    advice = "For a growth use dt.schedules.step_decay or dt.schedules.exponential with end=."
    check_number(caller, "gamma", gamma, above=0, maximum=1, advice=advice)


def constant_with_warmup(run_length: RunLength, t_warmup: Length, alpha: float = 1.0, t_max: Length = "1dur") -> Schedule:
    """Return a linear warm-up from 0 to ``alpha`` at ``t_warmup``, then ``alpha`` before ``t_max``, and 1 from ``t_max`` on.

    Formula: ``alpha * t / t_warmup`` for ``t < t_warmup``, ``alpha`` for ``t < t_max``, else ``1.0``

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.composer.constant_with_warmup(
        ...     dt.schedules.RunLength(total="10ba"), "4ba", 0.5
        ... )
        >>> [schedule(t) for t in (0, 2, 4, 9)]
        [0.0, 0.25, 0.5, 0.5]

    Raises:
        ConfigError: ``run_length`` cannot convert a length, the warm-up does not end before ``t_max``, or ``alpha`` is not a
            finite number.

    Source: Composer, ``ConstantWithWarmupScheduler``.
    """
    caller = "composer.constant_with_warmup"
    check_number(caller, "alpha", alpha)
    times = _warmup_and_total(caller, run_length, t_warmup, t_max)
    end = times["t_max"]
    return times.to_schedule(curves.warmup(lambda t: alpha if t < end else 1.0, times["t_warmup"]))


def linear_with_warmup(
    run_length: RunLength, t_warmup: Length, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: Length = "1dur"
) -> Schedule:
    """Return a linear warm-up from 0 to ``alpha_i`` at ``t_warmup``, then a straight line to ``alpha_f`` at ``t_max``.

    Formula: ``alpha_i * t / t_warmup`` for ``t < t_warmup``, else ``alpha_i + (alpha_f - alpha_i) * tau``, where
    ``tau = min(1, (t - t_warmup) / (t_max - t_warmup))``

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.composer.linear_with_warmup(
        ...     dt.schedules.RunLength(total="100ba"), "20ba"
        ... )
        >>> [schedule(t) for t in (0, 10, 20, 60, 100)]
        [0.0, 0.5, 1.0, 0.5, 0.0]

    Raises:
        ConfigError: ``run_length`` cannot convert a length, the warm-up does not end before ``t_max``, a factor is not finite,
            or the run continues with a factor of 0.

    Source: Composer, ``LinearWithWarmupScheduler``.
    """
    caller = "composer.linear_with_warmup"
    times = _warmup_and_total(caller, run_length, t_warmup, t_max)
    check_covers_run(caller, run_length, t_max, alpha_i, alpha_f)
    return _prepend_warmup(times, curves.linear(alpha_i, alpha_f, _decay_length(times)))


def cosine_with_warmup(run_length: RunLength, t_warmup: Length, t_max: Length = "1dur", alpha_f: float = 0.0) -> Schedule:
    """Return a linear warm-up from 0 to 1 at ``t_warmup``, then a half cosine to ``alpha_f`` at ``t_max``.

    Formula: ``t / t_warmup`` for ``t < t_warmup``, else ``alpha_f + (1 - alpha_f) * (1 + cos(pi * tau)) / 2``, where
    ``tau = min(1, (t - t_warmup) / (t_max - t_warmup))``

    Example:
        >>> import dtrain as dt
        >>> run = dt.schedules.RunLength(total="100ba")
        >>> schedule = dt.schedules.composer.cosine_with_warmup(run, "0.2dur", alpha_f=0.1)
        >>> [round(schedule(t), 3) for t in (0, 10, 20, 60, 100)]
        [0.0, 0.5, 1.0, 0.55, 0.1]

    Raises:
        ConfigError: ``run_length`` cannot convert a length, the warm-up does not end before ``t_max``, ``alpha_f`` is not
            finite, or the run continues with a factor of 0.

    Source: Composer, ``CosineAnnealingWithWarmupScheduler``.
    """
    caller = "composer.cosine_with_warmup"
    times = _warmup_and_total(caller, run_length, t_warmup, t_max)
    check_covers_run(caller, run_length, t_max, 1.0, alpha_f)
    return _prepend_warmup(times, curves.cosine(1.0, alpha_f, _decay_length(times)))


def polynomial_with_warmup(
    run_length: RunLength, t_warmup: Length, power: float = 2.0, t_max: Length = "1dur", alpha_f: float = 0.0
) -> Schedule:
    """Return a linear warm-up from 0 to 1 at ``t_warmup``, then a polynomial decay to ``alpha_f`` at ``t_max``.

    Formula: ``t / t_warmup`` for ``t < t_warmup``, else ``alpha_f + (1 - alpha_f) * (1 - tau) ** power``, where
    ``tau = min(1, (t - t_warmup) / (t_max - t_warmup))``

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.composer.polynomial_with_warmup(
        ...     dt.schedules.RunLength(total="100ba"), "20ba"
        ... )
        >>> [schedule(t) for t in (0, 10, 20, 60, 100)]
        [0.0, 0.5, 1.0, 0.25, 0.0]

    Raises:
        ConfigError: ``run_length`` cannot convert a length, the warm-up does not end before ``t_max``, ``power`` is not
            positive, ``alpha_f`` is not finite, or the run continues with a factor of 0.

    Source: Composer, ``PolynomialWithWarmupScheduler``.
    """
    caller = "composer.polynomial_with_warmup"
    times = _warmup_and_total(caller, run_length, t_warmup, t_max)
    check_covers_run(caller, run_length, t_max, 1.0, alpha_f)
    return _prepend_warmup(times, curves.polynomial(1.0, alpha_f, _decay_length(times), power=power))


def multi_step_with_warmup(
    run_length: RunLength, t_warmup: Length, milestones: Sequence[Length], gamma: float = 0.1
) -> Schedule:
    """Return a linear warm-up from 0 to 1 at ``t_warmup``, then factors that are multiplied by ``gamma`` at each milestone.

    Formula: ``t / t_warmup`` for ``t < t_warmup``, else ``gamma ** n``, where ``n`` milestones are reached

    Example:
        >>> import dtrain as dt
        >>> run = dt.schedules.RunLength(total="10ep", steps_per_epoch=10)
        >>> schedule = dt.schedules.composer.multi_step_with_warmup(run, "1ep", ["3ep", "6ep"])
        >>> [round(schedule(t), 3) for t in (0, 5, 10, 30, 60)]
        [0.0, 0.5, 1.0, 0.1, 0.01]

    Raises:
        ConfigError: ``run_length`` cannot convert a length, ``milestones`` is empty, does not increase or begins during the
            warm-up, or ``gamma`` is not finite.

    Source: Composer, ``MultiStepWithWarmupScheduler``. Composer only warns of a milestone during the warm-up.
    """
    caller = "composer.multi_step_with_warmup"
    lengths = name_milestones(caller, milestones)
    times = parse_lengths(caller, run_length, {"t_warmup": t_warmup, **lengths})
    stair = curves.multi_step(1.0, gamma, [times[name] for name in lengths])
    if times["t_warmup"] >= times["milestones[0]"]:
        raise ConfigError(
            f"{caller}: t_warmup must be before the first milestone, got t_warmup={t_warmup} and "
            f"milestones[0]={milestones[0]}. Remove that milestone or shorten the warm-up."
        )
    return times.to_schedule(curves.warmup(stair, times["t_warmup"]))


def _warmup_and_total(caller: str, run_length: RunLength, t_warmup: Length, t_max: Length) -> Lengths:
    times = parse_lengths(caller, run_length, {"t_warmup": t_warmup, "t_max": t_max})
    if times.fractions["t_warmup"] >= times.fractions["t_max"]:
        raise ConfigError(
            f"{caller}: t_warmup must be before t_max, got {t_warmup=} and {t_max=} "
            f"({times['t_warmup']} and {times['t_max']} {times.unit}). Shorten the warm-up."
        )
    return times


def _decay_length(times: Lengths) -> float:
    return float(times.fractions["t_max"] - times.fractions["t_warmup"])


def _prepend_warmup(times: Lengths, decay: Schedule) -> Schedule:
    return times.to_schedule(curves.warmup(decay, times["t_warmup"], shifted=True))
