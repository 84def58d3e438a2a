"""Schedules: basic curves, several phases (warm-up, WSD, restarts, one cycle), combinations of schedules, and their plot.

Each factory checks its arguments once and returns a pure function ``t -> float``. The function also accepts fractions, negative
times, and times after its end.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dtrain.arguments import check_choice, check_int, check_number
from dtrain.errors import ConfigError
from dtrain.packages import missing_extra_error
from dtrain.schedules.durations import UNITS
from dtrain.schedules.hyperparameters import (
    STEP_UNIT,
    attach_unit,
    check_increasing,
    check_sequence,
    common_unit,
    is_number,
    warn_if_absolute_lr,
)
from dtrain.typing import Schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STEPS_ADVICE = "Give the length of the whole decay."
# More points than a screen has columns, so that no jump looks like a slope.
_MAX_POINTS = 2000


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
    inner: Callable[[float], float] = {
        "linear": lambda s: start + (end - start) * s,
        "cosine": lambda s: end + (start - end) * (1.0 + math.cos(math.pi * s)) / 2.0,
        "1-sqrt": lambda s: end + (start - end) * (1.0 - math.sqrt(s)),
        "exponential": lambda s: float(start * (end / start) ** s),
    }[shape]

    def value(progress: float) -> float:
        if progress <= 0:
            return start
        return inner(progress) if progress < 1 else end

    return value


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


def sequential(schedules: Sequence[Schedule], boundaries: Sequence[float], *, shifted: bool = True) -> Schedule:
    """Return a schedule that runs ``schedules`` one after another and switches at each of ``boundaries``.

    Formula: ``schedules[i](t - boundaries[i - 1])``, where ``i`` boundaries are at most ``t``, and ``schedules[0](t)`` if none
    is; ``schedules[i](t)`` if not ``shifted``

    Args:
        schedules: at least one schedule.
        boundaries: increasing times of the switches, one fewer than schedules.
        shifted: if True, each schedule sees the time since its own beginning; if False, the time of the whole run.

    Example:
        >>> import dtrain as dt
        >>> up, down = dt.schedules.linear(0.0, 1.0, 10), dt.schedules.linear(1.0, 0.0, 10)
        >>> schedule = dt.schedules.sequential([up, dt.schedules.constant(1.0), down], [10, 90])
        >>> [round(schedule(t), 3) for t in (0, 5, 10, 90, 95, 100)]
        [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]

    Raises:
        ConfigError: ``schedules`` is empty, ``boundaries`` has the wrong length or does not increase, or the schedules have
            different units.

    Source: as ``torch.optim.lr_scheduler.SequentialLR``.
    """
    check_sequence("sequential", "schedules", schedules)
    check_sequence("sequential", "boundaries", boundaries)
    parts, times = tuple(schedules), tuple(boundaries)
    if not parts or len(times) != len(parts) - 1:
        raise ConfigError(
            f"sequential: boundaries must be one fewer than schedules, got {len(times)} boundaries and {len(parts)} schedules. "
            "Give a step for each change of schedule."
        )
    check_increasing("sequential", "boundaries", times)
    unit = common_unit("sequential", *parts)
    begins = (0, *times) if shifted else (0,) * len(parts)

    def value(t: float) -> float:
        index = bisect_right(times, t)
        return parts[index](t - begins[index])

    return attach_unit(unit, value)


def multiply(schedule: Schedule, factor: float) -> Schedule:
    """Return ``schedule`` with all values multiplied by ``factor``.

    Formula: ``factor * schedule(t)``

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.multiply(dt.schedules.linear(1.0, 0.0, 10), 0.5)
        >>> [schedule(t) for t in (0, 5, 10)]
        [0.5, 0.25, 0.0]

    Raises:
        ConfigError: ``schedule`` is not a function, or ``factor`` is not a finite number.

    Source: arithmetic; a base rate times a schedule of factors.
    """
    unit = common_unit("multiply", schedule)
    check_number("multiply", "factor", factor)
    return attach_unit(unit, lambda t: factor * schedule(t))


def time_scale(schedule: Schedule, ratio: float) -> Schedule:
    """Return ``schedule`` stretched in time: ``ratio=2`` takes twice as long.

    The whole schedule is stretched, including a warm-up. This is Composer's ``scale_schedule_ratio`` with
    ``scale_warmup=True``. Composer also scales the run, so give the run ``ratio`` times its length.

    Formula: ``schedule(t / ratio)``

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.time_scale(dt.schedules.linear(1.0, 0.0, 10), 2.0)
        >>> [schedule(t) for t in (0, 5, 10, 20)]
        [1.0, 0.75, 0.5, 0.0]

    Raises:
        ConfigError: ``schedule`` is not a function, or ``ratio`` is not positive.

    Source: Composer's scale schedule ratio, with the warm-up scaled.
    """
    unit = common_unit("time_scale", schedule)
    check_number("time_scale", "ratio", ratio, above=0, advice="Give the new duration divided by the old duration.")
    return attach_unit(unit, lambda t: schedule(t / ratio))


def clip(schedule: Schedule, *, low: float = -math.inf, high: float = math.inf) -> Schedule:
    """Return ``schedule`` with its values clipped to ``low`` and ``high``.

    Formula: ``min(max(schedule(t), low), high)``

    Example:
        >>> import dtrain as dt
        >>> schedule = dt.schedules.clip(dt.schedules.linear(1.0, 0.0, 10), low=0.1, high=0.75)
        >>> [schedule(t) for t in (0, 5, 10)]
        [0.75, 0.5, 0.1]

    Raises:
        ConfigError: ``schedule`` is not a function, no limit is given, a limit is not a number, or ``low`` is above ``high``.

    Source: arithmetic; ``min_lr`` of many recipes is a lower limit.
    """
    unit = common_unit("clip", schedule)
    for name, limit in (("low", low), ("high", high)):
        if not is_number(limit) or abs(limit) != math.inf:
            check_number("clip", name, limit)
    if not low <= high or (low, high) == (-math.inf, math.inf):
        raise ConfigError(f"clip: low must be at most high, got {low=} and {high=}. Give low=, high= or both.")
    return attach_unit(unit, lambda t: min(max(schedule(t), low), high))


def to_lambda_lr(schedule: Schedule | Sequence[Schedule], optimizer: Optimizer) -> LambdaLR:
    """Return a torch scheduler that multiplies the learning rate of each parameter group by ``schedule``.

    The optimizer has the rate of step 0 right after this call. Call the scheduler's ``step()`` once after each
    ``optimizer.step()``. Its ``state_dict`` contains the number of steps, but not the schedule.

    Formula: ``initial_lr * schedule(number of calls of step())``

    Args:
        schedule: a schedule of steps, or one schedule per parameter group.
        optimizer: optimizer with the base rates.

    Example:
        >>> import dtrain as dt
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
        >>> scheduler, rates = (
        ...     dt.schedules.to_lambda_lr(dt.schedules.linear(1.0, 0.0, 4), optimizer),
        ...     [],
        ... )
        >>> for step in range(5):
        ...     rates.append(optimizer.param_groups[0]["lr"])
        ...     optimizer.step()
        ...     scheduler.step()
        >>> rates
        [0.5, 0.375, 0.25, 0.125, 0.0]

    Mutates: ``lr`` of the optimizer's groups, now and at each ``step()``.

    Raises:
        ConfigError: ``schedule`` is not a function, the number of schedules differs from the number of groups, or the unit is
            not steps. A torch scheduler counts steps only.

    Warns: UserWarning if the values look like learning rates instead of factors, as in ``scale_lr``.

    Source: ``torch.optim.lr_scheduler.LambdaLR``.
    """
    groups = len(optimizer.param_groups)
    schedules = [schedule] * groups if callable(schedule) else list(schedule)
    if len(schedules) != groups:
        raise ConfigError(
            f"to_lambda_lr: schedule must have one entry per parameter group, got {len(schedules)} for {groups}. "
            "Pass one schedule for all groups, or a list with an entry per group."
        )
    if (unit := common_unit("to_lambda_lr", *schedules)) != STEP_UNIT:
        raise ConfigError(
            f"to_lambda_lr: schedule must be a function of steps, got a schedule of {unit}. Use dt.transforms.scale_lr instead."
        )
    warn_if_absolute_lr("to_lambda_lr", schedules, range(groups), optimizer.param_groups)
    return LambdaLR(optimizer, [_as_function(entry) for entry in schedules])


def _as_function(schedule: Schedule) -> Callable[[int], float]:
    # LambdaLR saves the attributes of a callable object in its state_dict, but not those of a function.
    return lambda step: schedule(step)


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


def plot(schedules: Schedule | Mapping[str, Schedule], steps: int, *, points: int = _MAX_POINTS) -> Figure:
    """Return a matplotlib figure of the values at the steps 0, 1, ..., ``steps - 1``.

    The function needs no display and changes no global state of matplotlib. ``figure.savefig("lr.png")`` writes the figure. A
    notebook shows the figure.

    Formula: ``(t, schedule(t))`` for ``t`` in ``sample_times(steps, points)``

    Args:
        schedules: one schedule, or schedules by their names in the legend; all with the same unit.
        steps: length of the run in the unit of the schedules.
        points: largest number of values; longer runs are sampled evenly, including the first and last step.

    Example:
        >>> import dtrain as dt
        >>> figure = dt.schedules.plot(dt.schedules.linear(1.0, 0.0, 4), 4)
        >>> line = figure.axes[0].lines[0]
        >>> [(int(t), float(value)) for t, value in zip(*line.get_data())]
        [(0, 1.0), (1, 0.75), (2, 0.5), (3, 0.25)]

    Raises:
        ConfigError: no schedule is given, the schedules have different units, ``steps`` or ``points`` is not an int or too
            small, a value is not a finite number, or matplotlib is not installed.

    Source: as the figures in the papers of the schedules: value over step.
    """
    named = dict(schedules) if isinstance(schedules, Mapping) else {"": schedules}
    if not named:
        raise ConfigError("plot: schedules must not be empty, got {}. Give {'lr': dt.schedules.linear(1.0, 0.0, 1000)}.")
    label = axis_label("plot", *named.values())
    times = sample_times(steps, points)
    lines = {name: evaluate_at(f"plot: {name!r}" if name else "plot", schedule, times) for name, schedule in named.items()}
    # Do not use pyplot: pyplot keeps a global list of figures and may need a display.
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra_error("plot: needs the package matplotlib", "plot") from None
    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, values in lines.items():
        axes.plot(times, values, label=name or None)
    axes.set_xlabel(label)
    axes.grid(visible=True, alpha=0.3)
    if any(named):
        axes.legend()
    return figure


def axis_label(caller: str, *schedules: Schedule) -> str:
    """Return the axis label: the unit of ``schedules`` in words.

    Raises:
        ConfigError: no schedules, or schedules with different units.
    """
    unit = common_unit(caller, *schedules)
    return "steps" if unit == STEP_UNIT else UNITS[unit]


def sample_times(steps: int, points: int) -> list[int]:
    """Return all steps, or ``points`` evenly spaced steps including the first and last step.

    Raises:
        ConfigError: ``steps`` or ``points`` is not an int, ``steps`` is below 1, or ``points`` is below 2.
    """
    check_int("plot", "steps", steps)
    check_int("plot", "points", points, minimum=2)
    if steps <= points:
        return list(range(steps))
    return [index * (steps - 1) // (points - 1) for index in range(points)]


def evaluate_at(caller: str, schedule: Schedule, times: list[int]) -> list[float]:
    """Return the values of ``schedule`` at ``times``.

    Raises:
        ConfigError: a value is not a finite number.
    """
    values = [schedule(t) for t in times]
    for t, value in zip(times, values, strict=True):
        if not is_number(value) or not math.isfinite(value):
            raise ConfigError(f"{caller}: the schedule must return a finite number, got {value!r} at {t}. Fix the schedule.")
    return values
