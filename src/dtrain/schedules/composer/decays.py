"""Composer's schedules without a warm-up."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dtrain.durations import RunLength
from dtrain.errors import ConfigError
from dtrain.schedules import basic, cycles, decays, stairs
from dtrain.schedules.checks import check_finite
from dtrain.schedules.composer.lengths import Length, check_covers, lengths, named
from dtrain.schedules.hyper import is_number
from dtrain.types import Schedule


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
    until = lengths(where, run, {"t_max": t_max})
    end = until["t_max"]
    return until.schedule(lambda t: alpha if t < end else 1.0)


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
    within = lengths(where, run, {"t_max": t_max})
    check_covers(where, run, t_max, alpha_i, alpha_f)
    return within.schedule(basic.linear(alpha_i, alpha_f, within["t_max"]))


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
    within = lengths(where, run, {"t_max": t_max})
    check_covers(where, run, t_max, 1.0, alpha_f)
    return within.schedule(basic.cosine(1.0, alpha_f, within["t_max"]))


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
    first = lengths(where, run, {"t_0": t_0})
    return first.schedule(cycles.cosine_restarts(1.0, alpha_f, first["t_0"], multiplier=t_mult))


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
    within = lengths(where, run, {"t_max": t_max})
    check_covers(where, run, t_max, 1.0, alpha_f)
    return within.schedule(decays.polynomial(1.0, alpha_f, within["t_max"], power=power))


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
    _check_falls(where, gamma)
    period = lengths(where, run, {"decay_period": decay_period})
    return period.schedule(decays.exponential(1.0, gamma, period["decay_period"]))


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
    _check_falls(where, gamma)
    period = lengths(where, run, {"step_size": step_size})
    after, size = decays.geometric(where, 1.0, gamma, None), period.exact["step_size"]
    return period.schedule(lambda t: after(math.floor(t / size)))  # exact: 0.3 steps go ten times into 3 of them


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
    times = lengths(where, run, named(where, "milestones", milestones))
    return times.schedule(stairs.multi_step(1.0, gamma, [times[name] for name in times.exact]))


def _check_falls(where: str, gamma: float) -> None:
    if not is_number(gamma) or not 0 < gamma <= 1:
        raise ConfigError(
            f"{where}: gamma must be above 0 and at most 1, got {gamma=}; to grow, take step_decay or exponential of dtrain "
            "with an end=, where the value stays"
        )
