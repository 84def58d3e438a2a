"""MosaicML Composer's schedulers: factors of the base rate, with durations as lengths (``t_max="1dur"``, ``t_warmup="10ba"``).

    run = loader.run_length("3ep")
    lr = dt.schedules.composer.cosine_with_warmup(run, t_warmup="0.1dur")
    step = dt.compose_step(loss_fn, [dt.transforms.scale_lr(lr)])

The first argument is the length of the run, which converts epochs and fractions of the run. Composer's arguments follow with
Composer's names, order and defaults. The result is a schedule of steps. If all lengths are in samples, in tokens or in seconds,
the result is a schedule of the clock's count in that unit.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.schedules.composer.schedulers import constant as constant
    from dtrain.schedules.composer.schedulers import constant_with_warmup as constant_with_warmup
    from dtrain.schedules.composer.schedulers import cosine as cosine
    from dtrain.schedules.composer.schedulers import cosine_warm_restarts as cosine_warm_restarts
    from dtrain.schedules.composer.schedulers import cosine_with_warmup as cosine_with_warmup
    from dtrain.schedules.composer.schedulers import exponential as exponential
    from dtrain.schedules.composer.schedulers import linear as linear
    from dtrain.schedules.composer.schedulers import linear_with_warmup as linear_with_warmup
    from dtrain.schedules.composer.schedulers import multi_step as multi_step
    from dtrain.schedules.composer.schedulers import multi_step_with_warmup as multi_step_with_warmup
    from dtrain.schedules.composer.schedulers import polynomial as polynomial
    from dtrain.schedules.composer.schedulers import polynomial_with_warmup as polynomial_with_warmup
    from dtrain.schedules.composer.schedulers import step as step

__getattr__, __dir__ = attach(__name__, __file__)
