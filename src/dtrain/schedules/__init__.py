"""Schedules: pure functions from a step number to a value, for learning rates and other hyperparameters.

    lr = dt.schedules.warmup(dt.schedules.cosine(1.0, 0.1, 10_000), 500)
    lr(0), lr(500), lr(10_000)
    step = dt.compose_step(loss_fn, [dt.transforms.scale_lr(lr)])

The values of a learning-rate schedule are factors of the optimizer's rate. ``dt.schedules.composer`` has MosaicML Composer's
schedulers with Composer's names, arguments and defaults.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.schedules import composer as composer
    from dtrain.schedules.clock import Clock as Clock
    from dtrain.schedules.curves import clip as clip
    from dtrain.schedules.curves import constant as constant
    from dtrain.schedules.curves import cosine as cosine
    from dtrain.schedules.curves import cosine_restarts as cosine_restarts
    from dtrain.schedules.curves import exponential as exponential
    from dtrain.schedules.curves import inverse_sqrt as inverse_sqrt
    from dtrain.schedules.curves import linear as linear
    from dtrain.schedules.curves import multi_step as multi_step
    from dtrain.schedules.curves import multiply as multiply
    from dtrain.schedules.curves import one_cycle as one_cycle
    from dtrain.schedules.curves import plot as plot
    from dtrain.schedules.curves import polynomial as polynomial
    from dtrain.schedules.curves import sequential as sequential
    from dtrain.schedules.curves import step_decay as step_decay
    from dtrain.schedules.curves import time_scale as time_scale
    from dtrain.schedules.curves import to_lambda_lr as to_lambda_lr
    from dtrain.schedules.curves import warmup as warmup
    from dtrain.schedules.curves import warmup_stable_decay as warmup_stable_decay
    from dtrain.schedules.durations import Duration as Duration
    from dtrain.schedules.durations import RunLength as RunLength
    from dtrain.schedules.hyperparameters import Hyperparameter as Hyperparameter
    from dtrain.schedules.hyperparameters import hyperparameter as hyperparameter
    from dtrain.schedules.hyperparameters import with_unit as with_unit

__getattr__, __dir__ = attach(__name__, __file__)
