"""Warm-up, a long stable phase, and a decay whose moment need not be known before.

Schedules that rise again: cosine with warm restarts, and one cycle."""

from __future__ import annotations

import math
from typing import Literal

from dtrain.errors import ConfigError
from dtrain.schedules.curves import curve
from dtrain.schedules.hyperparameter import check_positive, is_number
from dtrain.typing import Schedule


def warmup_stable_decay(
    peak: float,
    *,
    warmup: float,
    decay_start: float | None = None,
    decay: float = 0,
    end: float = 0.0,
    shape: Literal["linear", "cosine", "1-sqrt", "exponential"] = "linear",
) -> Schedule:
    """A straight line from 0 to ``peak``, then ``peak`` until ``decay_start``, then ``decay`` steps down to ``end``, for good.

    Before ``decay_start`` nothing depends on it, nor on the decay: a run without one, the trunk, can be forked at any of its
    checkpoints, by a schedule whose ``decay_start`` is the step of that checkpoint. The fork equals a run that was planned so.

    Formula: ``peak * t / warmup`` for ``t < warmup``; ``peak`` for ``t < decay_start``; then, with
    ``s = min((t - decay_start) / decay, 1)``: ``peak + (end - peak) * s`` (linear),
    ``end + (peak - end) * (1 + cos(pi * s)) / 2`` (cosine), ``end + (peak - end) * (1 - sqrt(s))`` (1-sqrt),
    ``peak * (end / peak) ** s`` (exponential)

    Args:
        peak: the value of the stable phase.
        warmup: length of the warm-up, at least 0.
        decay_start: when the decay begins, not before the warm-up is over; None: never.
        decay: its length.
        end: where it ends; above 0 for an exponential.
        shape: the way down.

    Raises:
        ConfigError: a length that is negative, a decay that begins in the warm-up, one without a length or without a beginning,
            an unknown shape, an exponential to 0, or a value that is not finite.

    Source: Hu et al. 2024, arXiv:2404.06395, section 4; shapes: Hägele et al. 2024, arXiv:2405.18392, section 3.

    Example:
        >>> trunk = warmup_stable_decay(1.0, warmup=10)
        >>> fork = warmup_stable_decay(1.0, warmup=10, decay_start=100, decay=20)
        >>> [(round(trunk(t), 3), round(fork(t), 3)) for t in (5, 100, 105, 120)]
        [(0.5, 0.5), (1.0, 1.0), (1.0, 0.75), (1.0, 0.0)]
    """
    where, shapes = "warmup_stable_decay", ("linear", "cosine", "1-sqrt", "exponential")
    if not is_number(warmup) or not 0 <= warmup < math.inf:
        raise ConfigError(f"{where}: warmup must be at least 0, got {warmup=}")
    up, down = curve(where, "linear", 0.0, peak, shapes), curve(where, shape, peak, end, shapes)
    if decay_start is None:
        if decay != 0:
            raise ConfigError(f"{where}: {decay=} needs a decay_start; without one the value stays at its peak")
        return lambda t: up(t / warmup) if max(t, 0) < warmup else peak
    if not is_number(decay_start) or not warmup <= decay_start < math.inf:
        raise ConfigError(f"{where}: decay_start must not be before the warm-up is over, got {decay_start=} and {warmup=}")
    check_positive(where, "it is the length of the decay", decay=decay)

    def at(t: float) -> float:
        return up(t / warmup) if max(t, 0) < warmup else down((t - decay_start) / decay)

    return at


def cosine_restarts(start: float, end: float, period: float, *, multiplier: float = 1) -> Schedule:
    """The falling half of a cosine from ``start`` to ``end``, again and again, each ``multiplier`` times as long.

    The step that a restart falls on has the value ``start``; ``end`` itself is never used.

    Formula: ``end + (start - end) * (1 + cos(pi * (t - t_i) / (period * multiplier ** i))) / 2``, where cycle ``i``, counted
    from 0, begins at ``t_i = period * (1 + multiplier + ... + multiplier ** (i - 1))``

    Raises:
        ConfigError: ``period`` is not positive, ``multiplier`` is below 1, or a value is not a finite number.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5.

    Example:
        >>> schedule = cosine_restarts(1.0, 0.0, 10, multiplier=2)
        >>> [round(schedule(t), 3) for t in (0, 5, 10, 20, 30)]
        [1.0, 0.5, 1.0, 0.5, 1.0]
    """
    check_positive("cosine_restarts", "it is the length of the first cycle", period=period)
    if not is_number(multiplier) or not 1 <= multiplier < math.inf:
        raise ConfigError(f"cosine_restarts: multiplier must be at least 1, got {multiplier=}; shorter cycles would pile up")
    fall = curve("cosine_restarts", "cosine", start, end, ("cosine",))
    return lambda t: fall(_cycle_progress(max(t, 0.0), period, multiplier))


def _cycle_progress(t: float, period: float, multiplier: float) -> float:
    """How much of the cycle that ``t`` is in is done."""
    if multiplier == 1:
        return t % period / period

    def begin(cycle: int) -> float:
        return float(period * (multiplier**cycle - 1) / (multiplier - 1))

    cycle = int(math.log1p(t / period * (multiplier - 1)) / math.log(multiplier))
    while begin(cycle + 1) <= t:  # the logarithm may be off by a rounding
        cycle += 1
    while begin(cycle) > t:
        cycle -= 1
    return (t - begin(cycle)) / (period * multiplier**cycle)


def one_cycle(
    start: float,
    peak: float,
    end: float,
    steps: float,
    *,
    rise: float = 0.3,
    shape: Literal["linear", "cosine"] = "cosine",
    three_phase: bool = False,
) -> Schedule:
    """From ``start`` up to ``peak`` and down to ``end``, once, and ``end`` from ``t = steps`` on.

    Of the rate and, the other way round, of the momentum: ``one_cycle(0.95, 0.85, 0.95, steps)``.

    Formula: from ``start`` to ``peak`` until ``rise * steps``, then from ``peak`` to ``end`` until ``steps``; with
    ``three_phase`` from ``peak`` back to ``start`` until ``2 * rise * steps``, and from there to ``end``. A way from a to b of
    which the share s is done is at ``a + (b - a) * s`` (linear) or ``b + (a - b) * (1 + cos(pi * s)) / 2`` (cosine).

    Args:
        start: the value at ``t = 0``; 1/25 of the peak is usual.
        peak: the value at ``t = rise * steps``.
        end: the value at ``t = steps``; 1/10_000 of the start is usual.
        steps: length of the whole cycle.
        rise: which share of it leads up; below 1, and with ``three_phase`` below 1/2.
        shape: of all ways.
        three_phase: whether it comes back to ``start`` before it ends.

    Raises:
        ConfigError: ``steps`` is not positive, ``rise`` out of its range, an unknown shape, or a value that is not finite.

    Source: Smith and Topin 2018, arXiv:1708.07120, section 3 (three phases, linear). ``torch.optim.lr_scheduler.OneCycleLR``
    with ``total_steps = n`` and ``pct_start = p`` is ``steps = n - 1`` and ``rise = (p * n - 1) / (n - 1)``.

    Example:
        >>> schedule = one_cycle(0.2, 1.0, 0.0, 10, rise=0.4, shape="linear")
        >>> [round(schedule(t), 3) for t in (0, 2, 4, 7, 10)]
        [0.2, 0.6, 1.0, 0.5, 0.0]
    """
    check_positive("one_cycle", "it is the length of the whole cycle", steps=steps)
    most = 0.5 if three_phase else 1
    if not is_number(rise) or not 0 < rise < most:
        raise ConfigError(f"one_cycle: rise must be above 0 and below {most}, got {rise=}; it is a share of the steps")
    middle, shapes = start if three_phase else end, ("linear", "cosine")
    up, down = curve("one_cycle", shape, start, peak, shapes), curve("one_cycle", shape, peak, middle, shapes)
    out = curve("one_cycle", shape, middle, end, shapes)
    turn, back = rise * steps, (2 * rise if three_phase else 1) * steps

    def at(t: float) -> float:
        if t < turn:
            return up(t / turn)
        return down((t - turn) / (back - turn)) if t < back or not three_phase else out((t - back) / (steps - back))

    return at
