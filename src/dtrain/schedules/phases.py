"""Schedules of several phases: warm-up, stable phase and decay (WSD); cosine with warm restarts; one cycle."""

from __future__ import annotations

import math
from typing import Literal

from dtrain.arguments import check_number
from dtrain.errors import ConfigError
from dtrain.schedules.curves import curve
from dtrain.schedules.hyperparameters import attach_unit, common_unit
from dtrain.typing import Schedule


def warmup(
    schedule: Schedule,
    steps: float,
    *,
    start: float = 0.0,
    shape: Literal["linear", "cosine", "exponential"] = "linear",
    shifted: bool = False,
) -> Schedule:
    """Return ``schedule`` with a warm-up of ``steps`` that ends at the schedule's value, without a jump.

    By default the schedule is not shifted: the warm-up replaces its first ``steps``, and a schedule for the whole run still
    ends with the run. If ``shifted``, the schedule begins after the warm-up and ends ``steps`` later. ``steps = 0`` changes
    nothing.

    Formula: for ``t < steps``, with ``s = t / steps`` and ``top = schedule(steps)``, or ``schedule(0)`` if shifted:
    ``top * (start + (1 - start) * s)`` (linear), ``top * (1 + (start - 1) * (1 + cos(pi * s)) / 2)`` (cosine),
    ``top * start ** (1 - s)`` (exponential). Then ``schedule(t)``, or ``schedule(t - steps)``.

    Args:
        schedule: any schedule; a schedule of tokens has a warm-up in tokens.
        steps: length of the warm-up, at least 0.
        start: first value of the warm-up as a fraction of ``top``, at least 0.
        shape: curve of the warm-up.
        shifted: if True, ``schedule`` begins after the warm-up.

    Example:
        >>> import dtrain as dt
        >>> line = dt.schedules.linear(1.0, 0.0, 100)
        >>> schedule = dt.schedules.warmup(line, 10)
        >>> [round(schedule(t), 3) for t in (0, 5, 10, 50, 100)]
        [0.0, 0.45, 0.9, 0.5, 0.0]
        >>> shifted = dt.schedules.warmup(line, 10, start=0.5, shifted=True)
        >>> [round(shifted(t), 3) for t in (0, 5, 10, 60, 110)]
        [0.5, 0.75, 1.0, 0.5, 0.0]

    Raises:
        ConfigError: ``steps`` or ``start`` is negative, ``shape`` is unknown, an exponential starts at 0, or ``schedule`` is
            not a function.

    Source: Goyal et al. 2017, arXiv:1706.02677, section 2.2 (gradual warm-up).

    Suggested values:
        ImageNet, batches up to 8192: 5 epochs, ``start`` as 256 over the batch size (Goyal et al. 2017, section 2.2)
        GPT-3: 375M tokens of 300B (Brown et al. 2020, arXiv:2005.14165, appendix B)
    When not to use: a run resumes with the optimizer's state: the schedule continues at its step, and a second warm-up loses
        time.
    """
    unit = common_unit("warmup", schedule)
    check_number("warmup", "steps", steps, minimum=0)
    check_number("warmup", "start", start, minimum=0, advice="Give a fraction of the value after the warm-up.")
    rise = curve("warmup", shape, start, 1.0, ("linear", "cosine", "exponential"))
    if steps == 0:
        return schedule
    begin = steps if shifted else 0

    def value(t: float) -> float:
        return schedule(steps - begin) * rise(t / steps) if t < steps else schedule(t - begin)

    return attach_unit(unit, value)


def warmup_stable_decay(
    peak: float,
    *,
    warmup: float,
    decay_start: float | None = None,
    decay: float = 0,
    end: float = 0.0,
    shape: Literal["linear", "cosine", "1-sqrt", "exponential"] = "linear",
) -> Schedule:
    """Return a linear warm-up to ``peak``, a stable phase, and a decay of ``decay`` steps to ``end`` from ``decay_start`` on.

    The values before ``decay_start`` do not depend on the decay. So a run without a decay (the trunk) can be forked at any
    checkpoint: the fork's ``decay_start`` is the checkpoint's step. The fork equals a run with this decay from the beginning.

    Formula: ``peak * t / warmup`` for ``t < warmup``; ``peak`` for ``t < decay_start``; then, with
    ``s = min((t - decay_start) / decay, 1)``: ``peak + (end - peak) * s`` (linear),
    ``end + (peak - end) * (1 + cos(pi * s)) / 2`` (cosine), ``end + (peak - end) * (1 - sqrt(s))`` (1-sqrt),
    ``peak * (end / peak) ** s`` (exponential)

    Args:
        peak: value of the stable phase.
        warmup: length of the warm-up, at least 0.
        decay_start: first step of the decay, not before the end of the warm-up; None never decays.
        decay: length of the decay.
        end: last value; above 0 for an exponential.
        shape: curve of the decay.

    Example:
        >>> import dtrain as dt
        >>> trunk = dt.schedules.warmup_stable_decay(1.0, warmup=10)
        >>> fork = dt.schedules.warmup_stable_decay(1.0, warmup=10, decay_start=100, decay=20)
        >>> [(round(trunk(t), 3), round(fork(t), 3)) for t in (5, 100, 105, 120)]
        [(0.5, 0.5), (1.0, 1.0), (1.0, 0.75), (1.0, 0.0)]

    Raises:
        ConfigError: a length is negative, the decay begins during the warm-up or lacks ``decay`` or ``decay_start``, ``shape``
            is unknown, an exponential ends at 0, or a value is not finite.

    Source: Hu et al. 2024, arXiv:2404.06395, section 4; shapes: Hägele et al. 2024, arXiv:2405.18392, section 3.

    Suggested values:
        MiniCPM: ``decay`` of the last 10 %, exponential (Hu et al. 2024, section 4)
        decoders of 33M to 360M: ``decay`` of the last 20 %, ``shape="1-sqrt"`` (Hägele et al. 2024, section 3)
    When not to use: models are compared in the stable phase: their losses are high until the decay. Compare after a decay.
    """
    caller, shapes = "warmup_stable_decay", ("linear", "cosine", "1-sqrt", "exponential")
    check_number(caller, "warmup", warmup, minimum=0)
    up, down = curve(caller, "linear", 0.0, peak, shapes), curve(caller, shape, peak, end, shapes)
    if decay_start is None:
        if decay != 0:
            raise ConfigError(f"{caller}: decay must be 0 without a decay_start, got {decay=}. Give decay_start= as well.")
        return lambda t: up(t / warmup) if max(t, 0) < warmup else peak
    check_number(caller, "decay_start", decay_start, minimum=warmup, advice="The decay follows the warm-up.")
    check_number(caller, "decay", decay, above=0, advice="Give the length of the decay.")

    def value(t: float) -> float:
        return up(t / warmup) if max(t, 0) < warmup else down((t - decay_start) / decay)

    return value


def cosine_restarts(start: float, end: float, every: float, *, multiplier: float = 1) -> Schedule:
    """Return repeated half cosines from ``start`` to ``end``, each ``multiplier`` times as long as the previous cycle.

    The step of a restart has the value ``start``. The value ``end`` is never reached.

    Formula: ``end + (start - end) * (1 + cos(pi * (t - t_i) / (every * multiplier ** i))) / 2``, where cycle ``i``, counted
    from 0, begins at ``t_i = every * (1 + multiplier + ... + multiplier ** (i - 1))``

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.cosine_restarts(1.0, 0.0, 10, multiplier=2)
        >>> [round(schedule(t), 3) for t in (0, 5, 10, 20, 30)]
        [1.0, 0.5, 1.0, 0.5, 1.0]

    Raises:
        ConfigError: ``every`` is not positive, ``multiplier`` is below 1, or a value is not a finite number.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5.

    Suggested values:
        CIFAR, WRN-28-10, 200 epochs: ``every`` of 10 epochs, ``multiplier=2`` (Loshchilov and Hutter 2017, section 4)
        the same, faster first results: ``every`` of 1 epoch, ``multiplier=2`` (Loshchilov and Hutter 2017, section 4)
    When not to use: only the last weights count: a run that stops in the middle of a cycle has a large rate and a worse model.
    """
    check_number("cosine_restarts", "every", every, above=0, advice="Give the length of the first cycle.")
    check_number("cosine_restarts", "multiplier", multiplier, minimum=1)
    fall = curve("cosine_restarts", "cosine", start, end, ("cosine",))
    return lambda t: fall(_cycle_progress(max(t, 0.0), every, multiplier))


def _cycle_progress(t: float, period: float, multiplier: float) -> float:
    """Return the fraction of the current cycle that has passed at ``t``."""
    if multiplier == 1:
        return t % period / period

    def begin(cycle: int) -> float:
        return float(period * (multiplier**cycle - 1) / (multiplier - 1))

    cycle = int(math.log1p(t / period * (multiplier - 1)) / math.log(multiplier))
    # The logarithm may be off by a rounding.
    while begin(cycle + 1) <= t:
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
    """Return one cycle from ``start`` up to ``peak`` and down to ``end``. The value is ``end`` from ``t = steps`` on.

    For a momentum, which moves opposite to the learning rate, use ``one_cycle(0.95, 0.85, 0.95, steps)``.

    Formula: from ``start`` to ``peak`` until ``rise * steps``, then from ``peak`` to ``end`` until ``steps``. With
    ``three_phase``: from ``peak`` back to ``start`` until ``2 * rise * steps``, then to ``end``. At progress s a phase from a
    to b has the value ``a + (b - a) * s`` (linear) or ``b + (a - b) * (1 + cos(pi * s)) / 2`` (cosine).

    Args:
        start: value at ``t = 0``; usually 1/25 of the peak.
        peak: value at ``t = rise * steps``.
        end: value at ``t = steps``; usually 1/10_000 of the start.
        steps: length of the whole cycle.
        rise: fraction of ``steps`` before the peak; below 1, with ``three_phase`` below 1/2.
        shape: curve of all phases.
        three_phase: if True, the value returns to ``start`` before the last phase.

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.one_cycle(0.2, 1.0, 0.0, 10, rise=0.4, shape="linear")
        >>> [round(schedule(t), 3) for t in (0, 2, 4, 7, 10)]
        [0.2, 0.6, 1.0, 0.5, 0.0]

    Raises:
        ConfigError: ``steps`` is not positive, ``rise`` is out of its range, ``shape`` is unknown, or a value is not finite.

    Source: Smith and Topin 2018, arXiv:1708.07120, section 3 (three phases, linear). ``torch.optim.lr_scheduler.OneCycleLR``
    with ``total_steps = n`` and ``pct_start = p`` is ``steps = n - 1`` and ``rise = (p * n - 1) / (n - 1)``.

    Suggested values:
        CIFAR-10, ResNet-56, SGD: ``start`` 0.1, ``peak`` 3.0 (Smith and Topin 2018, experiments)
        fast.ai and torch: ``one_cycle(1 / 25, 1.0, 4e-6, steps, rise=0.3)`` (``torch.optim.lr_scheduler.OneCycleLR``'s
            defaults)
    When not to use: the largest stable rate is not known: ``peak`` is near that limit. Search the limit with a short run first.
    """
    check_number("one_cycle", "steps", steps, above=0, advice="Give the length of the whole cycle.")
    check_number("one_cycle", "rise", rise, above=0, below=0.5 if three_phase else 1, advice="Give a fraction of steps.")
    middle, shapes = start if three_phase else end, ("linear", "cosine")
    up, down = curve("one_cycle", shape, start, peak, shapes), curve("one_cycle", shape, peak, middle, shapes)
    last = curve("one_cycle", shape, middle, end, shapes)
    up_end, down_end = rise * steps, (2 * rise if three_phase else 1) * steps

    def value(t: float) -> float:
        if t < up_end:
            return up(t / up_end)
        if t < down_end or not three_phase:
            return down((t - up_end) / (down_end - up_end))
        return last((t - down_end) / (steps - down_end))

    return value
