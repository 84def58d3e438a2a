"""Clipping of the gradient by its global norm."""

from __future__ import annotations

import math

from dtrain.errors import ConfigError
from dtrain.schedules.basic import as_schedule
from dtrain.state import TrainState
from dtrain.step.optimizer import clip_grad_norm_
from dtrain.transform import Transform, UpdateFn
from dtrain.types import Metric, Metrics, Schedule, once


def clip_by_norm(max_norm: float | Schedule, *, eps: float = 1e-6) -> Transform:
    """Scale the gradient to a global L2 norm of at most ``max_norm`` before it is applied.

    Adds the metric ``grad_norm``, the norm before clipping. See ``clip_grad_norm_`` for the formula, the collectives and
    the source.

    Args:
        max_norm: > 0, or a schedule of such, read at the step about to run.
        eps: added to the norm in the quotient, >= 0.

    Raises:
        ConfigError: ``max_norm`` is not positive; of a schedule, in the step for which it is not. ``eps`` is negative or no
            finite number.
    """
    limit = as_schedule(max_norm, "clip_by_norm: max_norm")
    if not callable(max_norm) and not max_norm > 0:
        raise ConfigError(f"clip_by_norm: needs a positive max_norm, got {max_norm=}")
    if not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise ConfigError(f"clip_by_norm: needs a finite eps >= 0, got {eps=}")

    def update(inner: UpdateFn) -> UpdateFn:
        def clipped(state: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
            norm = clip_grad_norm_(state.params, limit(state.step), eps=eps)
            return inner(state, {**metrics, "grad_norm": Metric(norm, once(norm.device))})

        return clipped

    return Transform(name="clip_by_norm", update=update)
