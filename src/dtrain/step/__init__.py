"""Build a training step from its parts: gradients, metrics, the size of a microbatch, an update inside of backward.

    result = dt.step.find_microbatch_size(state, batch, loss_fn=loss_fn)
    dt.step.set_lr_(optimizer, 3e-4)
    state, metrics = dt.microbatch_step(state, batch, loss_fn=loss_fn, microbatch_size=result.size)
    metrics |= {"tokens": dt.step.make_metric(512.0, 1.0, state.device)}
    state, metrics = dt.apply_gradients(state, metrics)

``dt.compose_step`` makes the step of most loops. The names here are for loops and transforms that you write yourself.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.step.auto_microbatch import MicrobatchSearchResult as MicrobatchSearchResult
    from dtrain.step.auto_microbatch import find_microbatch_size as find_microbatch_size
    from dtrain.step.compose import Step as Step
    from dtrain.step.compose import optimizer_in_backward as optimizer_in_backward
    from dtrain.step.count_first import count_first_step as count_first_step
    from dtrain.step.evaluate import auto_batch_eval as auto_batch_eval
    from dtrain.step.grad_cache import grad_cache_step as grad_cache_step
    from dtrain.step.microbatch_search import ProbeResult as ProbeResult
    from dtrain.step.microbatch_search import RankMemory as RankMemory
    from dtrain.step.normalization import add_metrics as add_metrics
    from dtrain.step.normalization import make_metric as make_metric
    from dtrain.step.optimizer import set_lr_ as set_lr_
    from dtrain.step.transform import GradFn as GradFn
    from dtrain.step.transform import GradStep as GradStep
    from dtrain.step.transform import StepContext as StepContext
    from dtrain.step.transform import UpdateFn as UpdateFn
    from dtrain.step.transform import random_like as random_like

__getattr__, __dir__ = attach(__name__, __file__)
