"""Decays that are no straight line and no cosine: polynomial, exponential, inverse square root."""

from __future__ import annotations

import math
from collections.abc import Callable

from dtrain.errors import ConfigError
from dtrain.schedules.checks import check_finite, check_positive
from dtrain.types import Schedule


def polynomial(start: float, end: float, steps: float, *, power: float) -> Schedule:
    """From ``start`` to ``end`` as a power of the share of the time that is left, and ``end`` from ``t = steps`` on.

    Formula: ``end + (start - end) * (1 - min(t / steps, 1)) ** power``

    Raises:
        ConfigError: ``steps`` or ``power`` is not positive, or a value is not a finite number.

    Source: as ``torch.optim.lr_scheduler.PolynomialLR``.

    Example:
        >>> [round(polynomial(1.0, 0.0, 10, power=2.0)(t), 3) for t in (0, 5, 9, 10, 11)]
        [1.0, 0.25, 0.01, 0.0, 0.0]
    """
    check_finite("polynomial", start=start, end=end)
    check_positive("polynomial", "steps are the whole decay, power 1 is a straight line", steps=steps, power=power)

    def at(t: float) -> float:
        left = 1.0 - min(max(t / steps, 0.0), 1.0)
        return float(end + (start - end) * left**power)

    return at


def exponential(start: float, gamma: float, period: float = 1, *, end: float | None = None) -> Schedule:
    """``start``, times ``gamma`` for each ``period``, continuously, also within a period; never beyond ``end``.

    Formula: ``start * gamma ** (t / period)``, and ``end`` once that is reached.

    Args:
        start: the value at ``t = 0``, above 0.
        gamma: the factor of one period: below 1 a decay, above 1 a growth, which needs an ``end``.
        period: its length.
        end: where it stays; without one it goes on for ever.

    Raises:
        ConfigError: an argument that is not positive, growth without an end, or an end on the other side of ``start``.

    Source: as ``torch.optim.lr_scheduler.ExponentialLR``, at fractions too.

    Example:
        >>> decay = exponential(1.0, 0.25, 10, end=0.1)
        >>> [round(decay(t), 3) for t in (0, 5, 10, 20)]
        [1.0, 0.5, 0.25, 0.1]
    """
    check_positive("exponential", "it is the time in which the value changes by gamma", period=period)
    after = geometric("exponential", start, gamma, end)
    return lambda t: after(t / period)


def inverse_sqrt(start: float, hold: float) -> Schedule:
    """``start`` until ``t = hold``, then falling as ``1 / sqrt(t)``, for as long as training goes on.

    Behind a warm-up of the same length, ``with_warmup(inverse_sqrt(1.0, w), w)``, it is the schedule of the Transformer:
    ``min(t / w, sqrt(w / t))``.

    Formula: ``start * sqrt(hold / max(t, hold))``

    Raises:
        ConfigError: ``hold`` is not positive, or ``start`` not a finite number.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 3.1.2; Vaswani et al. 2017, arXiv:1706.03762, section 5.3, with the
    warm-up.

    Example:
        >>> [inverse_sqrt(1.0, 100)(t) for t in (0, 100, 400, 10_000)]
        [1.0, 1.0, 0.5, 0.1]
    """
    check_finite("inverse_sqrt", start=start)
    check_positive("inverse_sqrt", "it is the time from which on the value falls", hold=hold)
    return lambda t: start * math.sqrt(hold / max(t, hold))


def geometric(where: str, start: float, gamma: float, end: float | None) -> Callable[[float], float]:
    """``start * gamma ** n`` as a function of ``n``, from 0 on, and never beyond ``end``.

    Raises:
        ConfigError: ``start`` or ``gamma`` is not positive, growth without an end, or an end on the other side of ``start``.
    """
    check_positive(where, "its values are products", start=start, gamma=gamma)
    if end is None:
        if gamma > 1:
            raise ConfigError(f"{where}: growth needs an end, got {gamma=}; give end=, where the value stays")
        return lambda n: float(start * gamma ** max(n, 0))
    check_finite(where, end=end)
    if end < 0 or (end - start) * (gamma - 1) < 0 or (gamma == 1 and end != start):
        raise ConfigError(f"{where}: {gamma=} does not lead from {start=} to {end=}; give an end on the way")
    # The powers are not taken behind the end: those of a growth would be too large for a float.
    last = math.log(end / start) / math.log(gamma) if end > 0 and gamma != 1 else math.inf
    nearer = max if gamma < 1 else min
    return lambda n: end if n >= last else nearer(float(start * gamma ** max(n, 0)), end)
