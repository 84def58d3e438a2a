"""Composer's schedulers with a linear warm-up from 0, followed by the decay over the remaining part of ``t_max``.

The decay ends at ``t_max``, as in Composer's code. Composer's documentation instead divides by ``t_max`` after the warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtrain.arguments import check_number
from dtrain.errors import ConfigError
from dtrain.schedules import curves, phases
from dtrain.schedules.composer.decays import Length, Lengths, check_covers_run, name_each, parse_lengths
from dtrain.schedules.durations import RunLength
from dtrain.typing import Schedule


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
    return times.to_schedule(phases.warmup(lambda t: alpha if t < end else 1.0, times["t_warmup"]))


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
    lengths = name_each(caller, "milestones", milestones)
    times = parse_lengths(caller, run_length, {"t_warmup": t_warmup, **lengths})
    stair = curves.multi_step(1.0, gamma, [times[name] for name in lengths])
    if times["t_warmup"] >= times["milestones[0]"]:
        raise ConfigError(
            f"{caller}: t_warmup must be before the first milestone, got t_warmup={t_warmup} and "
            f"milestones[0]={milestones[0]}. Remove that milestone or shorten the warm-up."
        )
    return times.to_schedule(phases.warmup(stair, times["t_warmup"]))


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
    return times.to_schedule(phases.warmup(decay, times["t_warmup"], shifted=True))
