"""The ways from one value to another that decays, warm-ups and cycles are made of.

Constant, linear and cosine, and a warm-up in front of any schedule.

Each factory checks its arguments once and returns a pure function ``t -> float`` that also takes fractions, and times before
the beginning and behind the end.

Decays that are no straight line and no cosine: polynomial, exponential, inverse square root.

Schedules that jump: after every period, and at given times."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Literal

from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameter import (
    attach_unit,
    check_finite,
    check_increasing,
    check_positive,
    check_sequence,
    common_unit,
    is_number,
)
from dtrain.typing import Schedule


def curve(caller: str, shape: str, start: float, end: float, shapes: Sequence[str]) -> Callable[[float], float]:
    """The way from ``start`` to ``end`` by the share of it that is done; exactly these two at and beyond its ends.

    Raises:
        ConfigError: a shape that is not one of ``shapes``, a value that is not finite, or an exponential from or to 0.
    """
    check_finite(caller, start=start, end=end)
    if shape not in shapes:
        raise ConfigError(f"{caller}: shape must be one of {', '.join(shapes)}, got {shape!r}")
    if shape == "exponential" and not (start > 0 and end > 0):
        raise ConfigError(f"{caller}: an exponential needs values above 0, got {start=} and {end=}; it never comes to 0")
    inner = {"linear": _linear, "cosine": _cosine, "1-sqrt": _one_minus_sqrt, "exponential": _exponential}[shape]

    def at(share: float) -> float:
        if share <= 0:
            return start
        return inner(start, end, share) if share < 1 else end

    return at


def _linear(start: float, end: float, share: float) -> float:
    return start + (end - start) * share


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1.0 + math.cos(math.pi * share)) / 2.0


def _one_minus_sqrt(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1.0 - math.sqrt(share))


def _exponential(start: float, end: float, share: float) -> float:
    return float(start * (end / start) ** share)


_STEPS_ADVICE = "it is the length of the whole decay"


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
    check_positive("linear", _STEPS_ADVICE, steps=steps)
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
    check_positive("cosine", _STEPS_ADVICE, steps=steps)
    half = curve("cosine", "cosine", start, end, ("cosine",))
    return lambda t: half(t / steps)


def warmup(
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
        >>> warm = warmup(linear(1.0, 0.0, 100), 10)
        >>> [round(warm(t), 3) for t in (0, 5, 10, 50, 100)]
        [0.0, 0.45, 0.9, 0.5, 0.0]
        >>> behind = warmup(linear(1.0, 0.0, 100), 10, start=0.5, shifted=True)
        >>> [round(behind(t), 3) for t in (0, 5, 10, 60, 110)]
        [0.5, 0.75, 1.0, 0.5, 0.0]
    """
    unit = common_unit("warmup", schedule)
    if not is_number(steps) or not 0 <= steps < math.inf:
        raise ConfigError(f"warmup: steps must be at least 0, got {steps=}")
    if not is_number(start) or not 0 <= start < math.inf:
        raise ConfigError(f"warmup: start must be at least 0, got {start=}; it is a share of where the warm-up ends")
    rise = curve("warmup", shape, start, 1.0, ("linear", "cosine", "exponential"))
    if steps == 0:
        return schedule
    begin = steps if shifted else 0

    def at(t: float) -> float:
        return schedule(steps - begin) * rise(t / steps) if t < steps else schedule(t - begin)

    return attach_unit(unit, at)


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

    Behind a warm-up of the same length, ``warmup(inverse_sqrt(1.0, w), w)``, it is the schedule of the Transformer:
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


def geometric(caller: str, start: float, gamma: float, end: float | None) -> Callable[[float], float]:
    """``start * gamma ** n`` as a function of ``n``, from 0 on, and never beyond ``end``.

    Raises:
        ConfigError: ``start`` or ``gamma`` is not positive, growth without an end, or an end on the other side of ``start``.
    """
    check_positive(caller, "its values are products", start=start, gamma=gamma)
    if end is None:
        if gamma > 1:
            raise ConfigError(f"{caller}: growth needs an end, got {gamma=}; give end=, where the value stays")
        return lambda n: float(start * gamma ** max(n, 0))
    check_finite(caller, end=end)
    if end < 0 or (end - start) * (gamma - 1) < 0 or (gamma == 1 and end != start):
        raise ConfigError(f"{caller}: {gamma=} does not lead from {start=} to {end=}; give an end on the way")
    # The powers are not taken behind the end: those of a growth would be too large for a float.
    last = math.log(end / start) / math.log(gamma) if end > 0 and gamma != 1 else math.inf
    nearer = max if gamma < 1 else min
    return lambda n: end if n >= last else nearer(float(start * gamma ** max(n, 0)), end)


def step_decay(start: float, gamma: float, period: float, *, end: float | None = None) -> Schedule:
    """``start``, times ``gamma`` after each whole ``period``; never beyond ``end``.

    Formula: ``start * gamma ** floor(t / period)``, and ``end`` once that is reached.

    Args:
        start: the value of the first period, above 0.
        gamma: the factor of a jump: below 1 a decay, above 1 a growth (of a batch size), which needs an ``end``.
        period: time between jumps.
        end: where it stays; without one it goes on for ever.

    Raises:
        ConfigError: an argument that is not positive, growth without an end, or an end on the other side of ``start``.

    Source: as ``torch.optim.lr_scheduler.StepLR``.

    Example:
        >>> [step_decay(1.0, 0.5, 10)(t) for t in (0, 9, 10, 20)]
        [1.0, 1.0, 0.5, 0.25]
        >>> [step_decay(256, 2, 10, end=1000)(t) for t in (0, 10, 20, 30)]
        [256.0, 512.0, 1000, 1000]
    """
    check_positive("step_decay", "it is the time between two jumps", period=period)
    after = geometric("step_decay", start, gamma, end)
    return lambda t: after(math.floor(t / period))


def multi_step(start: float, gamma: float, milestones: Sequence[float]) -> Schedule:
    """``start``, times ``gamma`` at each of ``milestones``.

    Formula: ``start * gamma ** n``, where ``n`` milestones are at most ``t``

    Args:
        start: the value before the first milestone.
        gamma: the factor of a jump.
        milestones: when it jumps, each later than the one before; the step with this number has the new value.

    Raises:
        ConfigError: a value that is not a finite number, no milestones, or some that do not increase.

    Source: as ``torch.optim.lr_scheduler.MultiStepLR``.

    Example:
        >>> [round(multi_step(1.0, 0.1, [30, 60])(t), 3) for t in (0, 29, 30, 60, 1000)]
        [1.0, 1.0, 0.1, 0.01, 0.01]
    """
    check_finite("multi_step", start=start, gamma=gamma)
    check_sequence("multi_step", "milestones", milestones)
    times = tuple(milestones)
    if not times:
        raise ConfigError("multi_step: needs at least one milestone, got none; a value that never changes is constant(...)")
    check_increasing("multi_step", "milestones", times)
    return lambda t: float(start * gamma ** bisect_right(times, t))
