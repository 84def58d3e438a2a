"""Composer's schedules with a warm-up: from 0 in a straight line, then what the name says, over what is left of ``t_max``.

Composer's documentation divides by ``t_max`` behind a warm-up; here, as in what it computes, the decay ends at ``t_max``.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtrain.durations import RunLength
from dtrain.errors import ConfigError
from dtrain.schedules import curves
from dtrain.schedules.composer.decays import Length, Lengths, check_covers_run, name_each, parse_lengths
from dtrain.schedules.hyperparameter import check_finite
from dtrain.typing import Schedule


def constant_with_warmup(run: RunLength, t_warmup: Length, alpha: float = 1.0, t_max: Length = "1dur") -> Schedule:
    """A straight line of factors from 0 to ``alpha`` until ``t_warmup``, then ``alpha`` before ``t_max``, and 1 from there on.

    Formula: ``alpha * t / t_warmup`` for ``t < t_warmup``, ``alpha`` for ``t < t_max``, else ``1.0``

    Raises:
        ConfigError: a length that cannot be told, a warm-up that ends behind ``t_max``, or ``alpha`` is not a finite number.

    Source: Composer, ``ConstantWithWarmupScheduler``.

    Example:
        >>> run = RunLength(total="10ba")
        >>> [constant_with_warmup(run, "4ba", 0.5)(t) for t in (0, 2, 4, 9)]
        [0.0, 0.25, 0.5, 0.5]
    """
    where = "composer.constant_with_warmup"
    check_finite(where, alpha=alpha)
    times = _warmup_and_total(where, run, t_warmup, t_max)
    end = times["t_max"]
    return times.to_schedule(curves.warmup(lambda t: alpha if t < end else 1.0, times["t_warmup"]))


def linear_with_warmup(
    run: RunLength, t_warmup: Length, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: Length = "1dur"
) -> Schedule:
    """A straight line of factors from 0 to ``alpha_i`` until ``t_warmup``, and another one to ``alpha_f`` at ``t_max``.

    Formula: ``alpha_i * t / t_warmup`` for ``t < t_warmup``, else ``alpha_i + (alpha_f - alpha_i) * tau``, where
    ``tau = min(1, (t - t_warmup) / (t_max - t_warmup))``

    Raises:
        ConfigError: a length that cannot be told, a warm-up that is not over before ``t_max``, a factor that is not finite, or
            a run that goes on at a factor of 0.

    Source: Composer, ``LinearWithWarmupScheduler``.

    Example:
        >>> run = RunLength(total="100ba")
        >>> [linear_with_warmup(run, "20ba")(t) for t in (0, 10, 20, 60, 100)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    where = "composer.linear_with_warmup"
    times = _warmup_and_total(where, run, t_warmup, t_max)
    check_covers_run(where, run, t_max, alpha_i, alpha_f)
    return _prepend_warmup(times, curves.linear(alpha_i, alpha_f, _decay_length(times)))


def cosine_with_warmup(run: RunLength, t_warmup: Length, t_max: Length = "1dur", alpha_f: float = 0.0) -> Schedule:
    """A straight line of factors from 0 to 1 until ``t_warmup``, and the falling half of a cosine to ``alpha_f`` at ``t_max``.

    Formula: ``t / t_warmup`` for ``t < t_warmup``, else ``alpha_f + (1 - alpha_f) * (1 + cos(pi * tau)) / 2``, where
    ``tau = min(1, (t - t_warmup) / (t_max - t_warmup))``

    Raises:
        ConfigError: a length that cannot be told, a warm-up that is not over before ``t_max``, ``alpha_f`` is not finite, or a
            run that goes on at a factor of 0.

    Source: Composer, ``CosineAnnealingWithWarmupScheduler``.

    Example:
        >>> run = RunLength(total="100ba")
        >>> [round(cosine_with_warmup(run, "0.2dur", alpha_f=0.1)(t), 3) for t in (0, 10, 20, 60, 100)]
        [0.0, 0.5, 1.0, 0.55, 0.1]
    """
    where = "composer.cosine_with_warmup"
    times = _warmup_and_total(where, run, t_warmup, t_max)
    check_covers_run(where, run, t_max, 1.0, alpha_f)
    return _prepend_warmup(times, curves.cosine(1.0, alpha_f, _decay_length(times)))


def polynomial_with_warmup(
    run: RunLength, t_warmup: Length, power: float = 2.0, t_max: Length = "1dur", alpha_f: float = 0.0
) -> Schedule:
    """A straight line of factors from 0 to 1 until ``t_warmup``, then to ``alpha_f`` at ``t_max`` as a power of what is left.

    Formula: ``t / t_warmup`` for ``t < t_warmup``, else ``alpha_f + (1 - alpha_f) * (1 - tau) ** power``, where
    ``tau = min(1, (t - t_warmup) / (t_max - t_warmup))``

    Raises:
        ConfigError: a length that cannot be told, a warm-up that is not over before ``t_max``, ``power`` is not positive,
            ``alpha_f`` not finite, or a run that goes on at a factor of 0.

    Source: Composer, ``PolynomialWithWarmupScheduler``.

    Example:
        >>> run = RunLength(total="100ba")
        >>> [polynomial_with_warmup(run, "20ba")(t) for t in (0, 10, 20, 60, 100)]
        [0.0, 0.5, 1.0, 0.25, 0.0]
    """
    where = "composer.polynomial_with_warmup"
    times = _warmup_and_total(where, run, t_warmup, t_max)
    check_covers_run(where, run, t_max, 1.0, alpha_f)
    return _prepend_warmup(times, curves.polynomial(1.0, alpha_f, _decay_length(times), power=power))


def multi_step_with_warmup(run: RunLength, t_warmup: Length, milestones: Sequence[Length], gamma: float = 0.1) -> Schedule:
    """A straight line of factors from 0 to 1 until ``t_warmup``, then ``gamma`` once more from each of ``milestones`` on.

    Formula: ``t / t_warmup`` for ``t < t_warmup``, else ``gamma ** n``, where ``n`` milestones are reached

    Raises:
        ConfigError: a length that cannot be told, no milestones, some that do not increase, one before the end of the
            warm-up, or ``gamma`` is not finite.

    Source: Composer, ``MultiStepWithWarmupScheduler``, which only warns of a milestone within the warm-up.

    Example:
        >>> run = RunLength(total="10ep", steps_per_epoch=10)
        >>> [round(multi_step_with_warmup(run, "1ep", ["3ep", "6ep"])(t), 3) for t in (0, 5, 10, 30, 60)]
        [0.0, 0.5, 1.0, 0.1, 0.01]
    """
    where = "composer.multi_step_with_warmup"
    marks = name_each(where, "milestones", milestones)
    times = parse_lengths(where, run, {"t_warmup": t_warmup, **marks})
    stair = curves.multi_step(1.0, gamma, [times[name] for name in marks])
    if times["t_warmup"] >= times["milestones[0]"]:
        raise ConfigError(
            f"{where}: the warm-up must be over before the first milestone, got t_warmup={t_warmup} and "
            f"milestones[0]={milestones[0]}; leave that milestone out, or warm up for less"
        )
    return times.to_schedule(curves.warmup(stair, times["t_warmup"]))


def _warmup_and_total(caller: str, run: RunLength, t_warmup: Length, t_max: Length) -> Lengths:
    times = parse_lengths(caller, run, {"t_warmup": t_warmup, "t_max": t_max})
    if times.fractions["t_warmup"] >= times.fractions["t_max"]:
        raise ConfigError(
            f"{caller}: the warm-up must be over before t_max, got {t_warmup=} and {t_max=}, "
            f"which are {times['t_warmup']} and {times['t_max']} {times.unit}; warm up for less"
        )
    return times


def _decay_length(times: Lengths) -> float:
    return float(times.fractions["t_max"] - times.fractions["t_warmup"])


def _prepend_warmup(times: Lengths, decay: Schedule) -> Schedule:
    return times.to_schedule(curves.warmup(decay, times["t_warmup"], shifted=True))
