"""Basic schedules: constant, linear, cosine, polynomial, exponential, inverse square root, steps.

Each factory checks its arguments once and returns a pure function ``t -> float``. The function also accepts fractions, negative
times, and times after its end.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

from dtrain.arguments import check_choice, check_number
from dtrain.errors import ConfigError
from dtrain.schedules.hyperparameters import (
    check_increasing,
    check_sequence,
)
from dtrain.typing import Schedule


def curve(caller: str, shape: str, start: float, end: float, shapes: Sequence[str]) -> Callable[[float], float]:
    """Return a function from progress (0 to 1) to a value between ``start`` and ``end``, exact at both ends.

    Raises:
        ConfigError: ``shape`` is not in ``shapes``, a value is not finite, or an exponential starts or ends at 0.
    """
    check_number(caller, "start", start)
    check_number(caller, "end", end)
    check_choice(caller, "shape", shape, shapes)
    if shape == "exponential" and not (start > 0 and end > 0):
        raise ConfigError(
            f"{caller}: the values of an exponential must be above 0, got {start=} and {end=}. Use linear or cosine to reach 0."
        )
    inner = {"linear": _linear, "cosine": _cosine, "1-sqrt": _one_minus_sqrt, "exponential": _exponential}[shape]

    def value(progress: float) -> float:
        if progress <= 0:
            return start
        return inner(start, end, progress) if progress < 1 else end

    return value


def _linear(start: float, end: float, progress: float) -> float:
    return start + (end - start) * progress


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1.0 + math.cos(math.pi * progress)) / 2.0


def _one_minus_sqrt(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1.0 - math.sqrt(progress))


def _exponential(start: float, end: float, progress: float) -> float:
    return float(start * (end / start) ** progress)


_STEPS_ADVICE = "Give the length of the whole decay."


def constant(value: float) -> Schedule:
    """Return a schedule with the same value at every ``t``.

    Formula: ``value``

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.constant(0.5)
        >>> schedule(0), schedule(1e9)
        (0.5, 0.5)

    Raises:
        ConfigError: ``value`` is not a finite number.

    Source: as ``torch.optim.lr_scheduler.ConstantLR`` before its end.

    Suggested values:
        T5 fine-tuning: ``constant(1.0)`` of a rate of 1e-3 (Raffel et al. 2020, arXiv:1910.10683, section 3.1.3)
        QLoRA fine-tuning: ``constant(1.0)`` of a rate of 2e-4 for 7B and 13B (Dettmers et al. 2023, arXiv:2305.14314, appendix
            B)
    When not to use: the run is long: a rate that falls at the end gives a lower loss. Add a decay with ``warmup_stable_decay``.
    """
    check_number("constant", "value", value)
    return lambda t: value


def linear(start: float, end: float, steps: float) -> Schedule:
    """Return a straight line from ``start`` to ``end``. The value is ``end`` from ``t = steps`` on.

    A line of ten steps from 1 to 0 has the values 1.0, 0.9, ..., 0.1, because each value is for the next step.

    Formula: ``start + (end - start) * min(t / steps, 1)``

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.linear(1.0, 0.0, 10)
        >>> [round(schedule(t), 3) for t in (0, 1, 9, 10, 11)]
        [1.0, 0.9, 0.1, 0.0, 0.0]

    Raises:
        ConfigError: ``steps`` is not positive, or a value is not a finite number.

    Source: as ``torch.optim.lr_scheduler.LinearLR``.

    Suggested values:
        BERT pre-training: ``warmup(linear(1.0, 0.0, 1_000_000), 10_000)`` (Devlin et al. 2019, arXiv:1810.04805, appendix A.2)
        MosaicBERT: ``warmup(linear(1.0, 0.02, steps), 0.06 * steps)`` (Portes et al. 2023, the authors' configuration)
    When not to use: the length of the run is not known: the end of the line is part of the schedule. ``warmup_stable_decay``
        can decay at any time.
    """
    check_number("linear", "steps", steps, above=0, advice=_STEPS_ADVICE)
    line = curve("linear", "linear", start, end, ("linear",))
    return lambda t: line(t / steps)


def cosine(start: float, end: float, steps: float) -> Schedule:
    """Return a half cosine from ``start`` to ``end``. The value is ``end`` from ``t = steps`` on.

    Formula: ``end + (start - end) * (1 + cos(pi * min(t / steps, 1))) / 2``

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.cosine(1.0, 0.1, 100)
        >>> [round(schedule(t), 3) for t in (0, 50, 100, 200)]
        [1.0, 0.55, 0.1, 0.1]

    Raises:
        ConfigError: ``steps`` is not positive, or a value is not a finite number.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5 without restarts. Unlike
    ``torch.optim.lr_scheduler.CosineAnnealingLR`` the value does not rise again after the end.

    Suggested values:
        LLaMA pre-training: ``cosine(1.0, 0.1, steps)`` after 2000 steps of warm-up (Touvron et al. 2023, arXiv:2302.13971,
            section 2.3)
        ImageNet, ResNet-50, 120 epochs: ``cosine(1.0, 0.0, steps)`` after 5 epochs of warm-up (He et al. 2019,
            arXiv:1812.01187, section 5.1)
    When not to use: the length of the run is not known: a run that ends early or is extended has the wrong rate.
        ``warmup_stable_decay`` can decay at any time.
    """
    check_number("cosine", "steps", steps, above=0, advice=_STEPS_ADVICE)
    half = curve("cosine", "cosine", start, end, ("cosine",))
    return lambda t: half(t / steps)


def polynomial(start: float, end: float, steps: float, *, power: float) -> Schedule:
    """Return a polynomial decay from ``start`` to ``end``. The value is ``end`` from ``t = steps`` on.

    Formula: ``end + (start - end) * (1 - min(t / steps, 1)) ** power``

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.polynomial(1.0, 0.0, 10, power=2.0)
        >>> [round(schedule(t), 3) for t in (0, 5, 9, 10, 11)]
        [1.0, 0.25, 0.01, 0.0, 0.0]

    Raises:
        ConfigError: ``steps`` or ``power`` is not positive, or a value is not a finite number.

    Source: as ``torch.optim.lr_scheduler.PolynomialLR``.

    Suggested values:
        DeepLab, segmentation: ``polynomial(1.0, 0.0, steps, power=0.9)`` (Chen et al. 2017, arXiv:1606.00915, section 4.1)
        ImageNet, large batches with LARS: ``polynomial(1.0, 0.0, steps, power=2)`` (You et al. 2017, arXiv:1708.03888)
    When not to use: ``power`` is 1: ``linear`` is the same. The length of the run must be known, too.
    """
    check_number("polynomial", "start", start)
    check_number("polynomial", "end", end)
    check_number("polynomial", "steps", steps, above=0, advice=_STEPS_ADVICE)
    check_number("polynomial", "power", power, above=0, advice="Give power=1 for a straight line.")

    def value(t: float) -> float:
        remaining = 1.0 - min(max(t / steps, 0.0), 1.0)
        return float(end + (start - end) * remaining**power)

    return value


def exponential(start: float, gamma: float, every: float = 1, *, end: float | None = None) -> Schedule:
    """Return an exponential decay or growth: a factor of ``gamma`` per ``every``, limited by ``end``.

    Formula: ``start * gamma ** (t / every)``, and ``end`` after that value is reached. ``t / every`` is not rounded.

    Args:
        start: value at ``t = 0``, above 0.
        gamma: factor per period: a decay below 1, a growth above 1. A growth needs an ``end``.
        every: length of a period.
        end: last value; None decays without an end.

    Example:
        >>> import dtrain as dt
        >>> decay = dt.schedules.exponential(1.0, 0.25, 10, end=0.1)
        >>> [round(decay(t), 3) for t in (0, 5, 10, 20)]
        [1.0, 0.5, 0.25, 0.1]

    Raises:
        ConfigError: an argument is not positive, a growth has no end, or ``gamma`` leads away from ``end``.

    Source: as ``torch.optim.lr_scheduler.ExponentialLR``, also at fractions.

    Suggested values:
        NeRF, 5e-4 to 5e-5 over the run: ``exponential(1.0, 0.1, steps)`` (Mildenhall et al. 2020, arXiv:2003.08934, section
            5.3)
        Tacotron 2, 1e-3 to 1e-5 from step 50,000 on: ``exponential(1.0, gamma, end=0.01)`` after ``constant`` (Shen et al.
            2018, arXiv:1712.05884, section 3.1)
    When not to use: the run is much longer than planned: without ``end`` the rate becomes so small that nothing is learned.
    """
    check_number("exponential", "every", every, above=0, advice="Give the time in which the value changes by gamma.")
    after = geometric("exponential", start, gamma, end)
    return lambda t: after(t / every)


def inverse_sqrt(start: float, hold: float) -> Schedule:
    """Return a schedule that stays at ``start`` until ``t = hold`` and then falls as ``1 / sqrt(t)`` without an end.

    With a warm-up of the same length, ``warmup(inverse_sqrt(1.0, w), w)``, the result is the Transformer's schedule
    ``min(t / w, sqrt(w / t))``.

    Formula: ``start * sqrt(hold / max(t, hold))``

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.inverse_sqrt(1.0, 100)
        >>> [schedule(t) for t in (0, 100, 400, 10_000)]
        [1.0, 1.0, 0.5, 0.1]

    Raises:
        ConfigError: ``hold`` is not positive, or ``start`` is not a finite number.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 3.1.2; with the warm-up, Vaswani et al. 2017, arXiv:1706.03762,
    section 5.3.

    Suggested values:
        T5 pre-training: ``inverse_sqrt(1.0, 10_000)`` of a rate of 0.01 (Raffel et al. 2020, section 3.1.2)
        WMT 2014, Transformer: ``warmup(inverse_sqrt(1.0, 4000), 4000)`` (Vaswani et al. 2017, section 5.3)
    When not to use: the length of the run is known and the final loss counts: the rate is still large at the end.
    """
    check_number("inverse_sqrt", "start", start)
    check_number("inverse_sqrt", "hold", hold, above=0, advice="Give the time at which the decay begins.")
    return lambda t: start * math.sqrt(hold / max(t, hold))


def geometric(caller: str, start: float, gamma: float, end: float | None) -> Callable[[float], float]:
    """Return ``start * gamma ** n`` as a function of ``n >= 0``, limited by ``end``.

    Raises:
        ConfigError: ``start`` or ``gamma`` is not positive, a growth has no end, or ``gamma`` leads away from ``end``.
    """
    check_number(caller, "start", start, above=0, advice="The values are products of both.")
    check_number(caller, "gamma", gamma, above=0, advice="The values are products of both.")
    if end is None:
        if gamma > 1:
            raise ConfigError(f"{caller}: a growth must have an end, got {gamma=}. Give end=, the last value.")
        return lambda n: float(start * gamma ** max(n, 0))
    check_number(caller, "end", end)
    if end < 0 or (end - start) * (gamma - 1) < 0 or (gamma == 1 and end != start):
        raise ConfigError(f"{caller}: gamma must lead from start to end, got {gamma=}, {start=} and {end=}. Give another end.")
    # Return `end` without the power after the end, because the power of a growth overflows a float.
    last = math.log(end / start) / math.log(gamma) if end > 0 and gamma != 1 else math.inf
    nearer = max if gamma < 1 else min
    return lambda n: end if n >= last else nearer(float(start * gamma ** max(n, 0)), end)


def step_decay(start: float, gamma: float, every: float, *, end: float | None = None) -> Schedule:
    """Return a schedule that multiplies ``start`` by ``gamma`` after each whole ``every``, limited by ``end``.

    Formula: ``start * gamma ** floor(t / every)``, and ``end`` after that value is reached.

    Args:
        start: value of the first period, above 0.
        gamma: factor of a jump: a decay below 1, a growth (of a batch size) above 1. A growth needs an ``end``.
        every: time between jumps.
        end: last value; None decays without an end.

    Example:
        >>> import dtrain as dt
        >>> decay = dt.schedules.step_decay(1.0, 0.5, 10)
        >>> [decay(t) for t in (0, 9, 10, 20)]
        [1.0, 1.0, 0.5, 0.25]
        >>> growth = dt.schedules.step_decay(256, 2, 10, end=1000)
        >>> [growth(t) for t in (0, 10, 20, 30)]
        [256.0, 512.0, 1000, 1000]

    Raises:
        ConfigError: an argument is not positive, a growth has no end, or ``gamma`` leads away from ``end``.

    Source: as ``torch.optim.lr_scheduler.StepLR``.

    Suggested values:
        ImageNet, ResNet-50: ``step_decay(1.0, 0.1, 30)`` by epochs (PyTorch's ``examples/imagenet``)
        ImageNet, EfficientNet: ``step_decay(1.0, 0.97, 2.4)`` by epochs (Tan and Le 2019, arXiv:1905.11946, section 5.2)
    When not to use: jumps of the rate disturb the loss late in a run: ``exponential`` falls by the same factor without jumps.
    """
    check_number("step_decay", "every", every, above=0, advice="Give the time between two jumps.")
    after = geometric("step_decay", start, gamma, end)
    return lambda t: after(math.floor(t / every))


def multi_step(start: float, gamma: float, milestones: Sequence[float]) -> Schedule:
    """Return a schedule that multiplies ``start`` by ``gamma`` at each milestone.

    Formula: ``start * gamma ** n``, where ``n`` milestones are at most ``t``

    Args:
        start: value before the first milestone.
        gamma: factor of a jump.
        milestones: increasing times of the jumps; the step with this number has the new value.

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.multi_step(1.0, 0.1, [30, 60])
        >>> [round(schedule(t), 3) for t in (0, 29, 30, 60, 1000)]
        [1.0, 1.0, 0.1, 0.01, 0.01]

    Raises:
        ConfigError: a value is not a finite number, or ``milestones`` is empty or does not increase.

    Source: as ``torch.optim.lr_scheduler.MultiStepLR``.

    Suggested values:
        ImageNet, ResNet-50, 90 epochs: ``multi_step(1.0, 0.1, [30, 60, 80])`` by epochs (Goyal et al. 2017, arXiv:1706.02677,
            section 5.1)
        CIFAR-10, ResNet, 64k steps: ``multi_step(1.0, 0.1, [32_000, 48_000])`` (He et al. 2016, arXiv:1512.03385, section 4.2)
    When not to use: nobody has searched milestones for this length of run: ``cosine`` needs none.
    """
    check_number("multi_step", "start", start)
    check_number("multi_step", "gamma", gamma)
    check_sequence("multi_step", "milestones", milestones)
    times = tuple(milestones)
    if not times:
        raise ConfigError("multi_step: milestones must not be empty, got none. For a fixed value use dt.schedules.constant.")
    check_increasing("multi_step", "milestones", times)
    return lambda t: float(start * gamma ** bisect_right(times, t))
