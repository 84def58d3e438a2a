"""Schedules in Composer's form: factors of the base rate, with lengths as durations (``t_max="1dur"``, ``t_warmup="10ba"``).

Each takes ``run`` first, what ``loader.run_length("3ep")`` gives, since nobody knows how long an epoch or a share of the run is
before the run is known; then Composer's arguments under their names, in their order, with their defaults. What comes back is a
schedule like any other: of the step about to run, or, where all lengths are in samples, in tokens or in seconds, of the clock's
count of these.
"""

from __future__ import annotations

from dtrain.schedules.composer.decays import (
    constant,
    cosine,
    cosine_warm_restarts,
    exponential,
    linear,
    multi_step,
    polynomial,
    step,
)
from dtrain.schedules.composer.warmups import (
    constant_with_warmup,
    cosine_with_warmup,
    linear_with_warmup,
    multi_step_with_warmup,
    polynomial_with_warmup,
)

__all__ = [
    "constant",
    "constant_with_warmup",
    "cosine",
    "cosine_warm_restarts",
    "cosine_with_warmup",
    "exponential",
    "linear",
    "linear_with_warmup",
    "multi_step",
    "multi_step_with_warmup",
    "polynomial",
    "polynomial_with_warmup",
    "step",
]
