"""Constant, linear and cosine, and a warm-up in front of any schedule.

Each factory checks its arguments once and returns a pure function ``t -> float`` that also takes fractions, and times before
the beginning and behind the end.
"""

from __future__ import annotations

import math
from typing import Literal

from dtrain.errors import ConfigError
from dtrain.schedules.checks import check_finite, check_positive
from dtrain.schedules.hyper import is_number
from dtrain.schedules.shapes import curve
from dtrain.schedules.units import in_unit, shared_unit
from dtrain.types import Schedule

_WHOLE = "it is the length of the whole decay"


def constant(value: float) -> Schedule:
    """``value`` at every ``t``.

    Formula: ``value``

    Raises:
        ConfigError: ``value`` is not a finite number.

    Source: as ``torch.optim.lr_scheduler.ConstantLR`` before its end.

    Example:
        >>> constant(0.5)(0), constant(0.5)(1e9)
        (0.5, 0.5)
    """
    check_finite("constant", value=value)
    return lambda t: value


def linear(start: float, end: float, steps: float) -> Schedule:
    """A straight line from ``start`` to ``end``, and ``end`` from ``t = steps`` on.

    Ten steps from 1 to 0 use 1.0, 0.9, ..., 0.1: the value is that of the step about to run.

    Formula: ``start + (end - start) * min(t / steps, 1)``

    Raises:
        ConfigError: ``steps`` is not positive, or a value is not a finite number.

    Source: as ``torch.optim.lr_scheduler.LinearLR``.

    Example:
        >>> [round(linear(1.0, 0.0, 10)(t), 3) for t in (0, 1, 9, 10, 11)]
        [1.0, 0.9, 0.1, 0.0, 0.0]
    """
    check_positive("linear", _WHOLE, steps=steps)
    line = curve("linear", "linear", start, end, ("linear",))
    return lambda t: line(t / steps)


def cosine(start: float, end: float, steps: float) -> Schedule:
    """The falling half of a cosine from ``start`` to ``end``, and ``end`` from ``t = steps`` on.

    Formula: ``end + (start - end) * (1 + cos(pi * min(t / steps, 1))) / 2``

    Raises:
        ConfigError: ``steps`` is not positive, or a value is not a finite number.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5 without restarts. Unlike
    ``torch.optim.lr_scheduler.CosineAnnealingLR`` it does not rise again behind its end.

    Example:
        >>> [round(cosine(1.0, 0.1, 100)(t), 3) for t in (0, 50, 100, 200)]
        [1.0, 0.55, 0.1, 0.1]
    """
    check_positive("cosine", _WHOLE, steps=steps)
    half = curve("cosine", "cosine", start, end, ("cosine",))
    return lambda t: half(t / steps)


def with_warmup(
    schedule: Schedule,
    steps: float,
    *,
    start: float = 0.0,
    shape: Literal["linear", "cosine", "exponential"] = "linear",
    shifted: bool = False,
) -> Schedule:
    """``schedule`` behind a warm-up of ``steps``, which ends where the schedule goes on, without a jump.

    The schedule is not shifted by default: one made for the whole run still ends with the run, and its first ``steps`` are
    replaced. With ``shifted`` it begins when the warm-up is over, and ends ``steps`` later than it would alone. ``steps = 0``
    changes nothing.

    Formula: for ``t < steps``, with ``s = t / steps`` and ``top = schedule(steps)``, or ``schedule(0)`` where it is shifted:
    ``top * (start + (1 - start) * s)`` (linear), ``top * (1 + (start - 1) * (1 + cos(pi * s)) / 2)`` (cosine),
    ``top * start ** (1 - s)`` (exponential). Then ``schedule(t)``, or ``schedule(t - steps)``.

    Args:
        schedule: any schedule; one that is measured in tokens is warmed up for that many tokens.
        steps: length of the warm-up, at least 0.
        start: which share of ``top`` it begins at, at least 0.
        shape: the way up.
        shifted: whether ``schedule`` begins behind the warm-up.

    Raises:
        ConfigError: ``steps`` or ``start`` is negative, an unknown shape, an exponential from 0, or no schedule.

    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.2 (gradual warm-up).

    Example:
        >>> warm = with_warmup(linear(1.0, 0.0, 100), 10)
        >>> [round(warm(t), 3) for t in (0, 5, 10, 50, 100)]
        [0.0, 0.45, 0.9, 0.5, 0.0]
        >>> behind = with_warmup(linear(1.0, 0.0, 100), 10, start=0.5, shifted=True)
        >>> [round(behind(t), 3) for t in (0, 5, 10, 60, 110)]
        [0.5, 0.75, 1.0, 0.5, 0.0]
    """
    unit = shared_unit("with_warmup", schedule)
    if not is_number(steps) or not 0 <= steps < math.inf:
        raise ConfigError(f"with_warmup: steps must be at least 0, got {steps=}")
    if not is_number(start) or not 0 <= start < math.inf:
        raise ConfigError(f"with_warmup: start must be at least 0, got {start=}; it is a share of where the warm-up ends")
    rise = curve("with_warmup", shape, start, 1.0, ("linear", "cosine", "exponential"))
    if steps == 0:
        return schedule
    begin = steps if shifted else 0

    def at(t: float) -> float:
        return schedule(steps - begin) * rise(t / steps) if t < steps else schedule(t - begin)

    return in_unit(unit, at)
