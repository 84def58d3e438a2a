"""Measure a run: throughput, MFU, memory, gradient norms, loss spikes, desync of replicas, early stopping.

    meters = [dt.monitors.throughput(), dt.monitors.memory_stats, dt.monitors.eta("3ep")]
    for batch in loader:
        state, metrics = step(state, batch)
        log(state.clock.step, dt.monitors.collect(state, dt.reduce_metrics(metrics), *meters))

Monitors of tensors inside the step (``norms``, ``watch_loss``) are transforms for ``dt.compose_step``.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.monitors.activations import activation_stats as activation_stats
    from dtrain.monitors.desync import check_desync as check_desync
    from dtrain.monitors.early_stopping import early_stop as early_stop
    from dtrain.monitors.early_stopping import threshold_stop as threshold_stop
    from dtrain.monitors.flops import count_flops as count_flops
    from dtrain.monitors.flops import peak_flops as peak_flops
    from dtrain.monitors.flops import transformer_flops as transformer_flops
    from dtrain.monitors.hardware import local_memory_stats as local_memory_stats
    from dtrain.monitors.hardware import memory_stats as memory_stats
    from dtrain.monitors.hardware import system_metrics as system_metrics
    from dtrain.monitors.loss_spikes import watch_loss as watch_loss
    from dtrain.monitors.meters import Meter as Meter
    from dtrain.monitors.meters import batch_balance as batch_balance
    from dtrain.monitors.meters import collect as collect
    from dtrain.monitors.meters import eta as eta
    from dtrain.monitors.meters import learning_rates as learning_rates
    from dtrain.monitors.meters import mfu as mfu
    from dtrain.monitors.meters import throughput as throughput
    from dtrain.monitors.reduce_metrics import gather_metric_states as gather_metric_states
    from dtrain.monitors.reduce_metrics import perplexity as perplexity
    from dtrain.monitors.reduce_metrics import rollout_mismatch as rollout_mismatch
    from dtrain.monitors.reduce_metrics import token_accuracy as token_accuracy
    from dtrain.monitors.reduce_metrics import tokens_per_second as tokens_per_second
    from dtrain.monitors.tensor_norms import norms as norms

__getattr__, __dir__ = attach(__name__, __file__)
