"""Schedules in Composer's form: factors of the base rate, with lengths as durations (``t_max="1dur"``, ``t_warmup="10ba"``).

Each takes ``run`` first, what ``loader.run_length("3ep")`` gives, since nobody knows how long an epoch or a share of the run is
before the run is known; then Composer's arguments under their names, in their order, with their defaults. What comes back is a
schedule like any other: of the step about to run, or, where all lengths are in samples, in tokens or in seconds, of the clock's
count of these.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.schedules.composer.decays import constant as constant
    from dtrain.schedules.composer.decays import cosine as cosine
    from dtrain.schedules.composer.decays import cosine_warm_restarts as cosine_warm_restarts
    from dtrain.schedules.composer.decays import exponential as exponential
    from dtrain.schedules.composer.decays import linear as linear
    from dtrain.schedules.composer.decays import multi_step as multi_step
    from dtrain.schedules.composer.decays import polynomial as polynomial
    from dtrain.schedules.composer.decays import step as step
    from dtrain.schedules.composer.warmups import constant_with_warmup as constant_with_warmup
    from dtrain.schedules.composer.warmups import cosine_with_warmup as cosine_with_warmup
    from dtrain.schedules.composer.warmups import linear_with_warmup as linear_with_warmup
    from dtrain.schedules.composer.warmups import multi_step_with_warmup as multi_step_with_warmup
    from dtrain.schedules.composer.warmups import polynomial_with_warmup as polynomial_with_warmup

__getattr__, __dir__ = attach(__name__, __file__)
