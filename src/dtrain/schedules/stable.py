"""Warm-up, a long stable phase, and a decay whose moment need not be known before."""

from __future__ import annotations

import math
from typing import Literal

from dtrain.errors import ConfigError
from dtrain.schedules.checks import check_positive
from dtrain.schedules.hyper import is_number
from dtrain.schedules.shapes import curve
from dtrain.types import Schedule


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
