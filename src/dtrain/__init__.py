"""dtrain: distributed-training primitives for people who write their own PyTorch loop.

Names are loaded when they are first used, so ``import dtrain`` imports no torch, and does nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.algorithms.batches.augmix import augmix, augmix_batch
    from dtrain.algorithms.batches.colout import colout, colout_batch
    from dtrain.algorithms.batches.cutmix import cutmix, cutmix_batch
    from dtrain.algorithms.batches.cutout import cutout, cutout_batch
    from dtrain.algorithms.batches.label_smoothing import label_smoothing, smooth_labels
    from dtrain.algorithms.batches.mixup import mix_samples, mixup, mixup_batch
    from dtrain.algorithms.batches.progressive_resizing import progressive_resizing, resize_batch
    from dtrain.algorithms.batches.rand_augment import rand_augment, rand_augment_batch
    from dtrain.algorithms.batches.selective_backprop import select_by_loss, selective_backprop
    from dtrain.algorithms.batches.sequence_length import sequence_length_warmup, shorten_batch
    from dtrain.algorithms.batches.targets import as_probabilities
    from dtrain.algorithms.gradients.adaptive_clip import adaptive_clip, clip_grad_adaptive_
    from dtrain.algorithms.gradients.by_value import clip_by_value, clip_grad_value_
    from dtrain.algorithms.gradients.centralize import centralize_gradients, centralize_gradients_
    from dtrain.algorithms.gradients.clip import clip_by_norm
    from dtrain.algorithms.gradients.noise_scale import noise_and_signal, noise_scale
    from dtrain.algorithms.gradients.nonfinite import nonfinite
    from dtrain.algorithms.gradients.sam import perturb_, restore_, sam
    from dtrain.algorithms.precision.autocast import autocast
    from dtrain.algorithms.precision.loss_scale import loss_scale
    from dtrain.algorithms.rates.scale_lr import scale_lr
    from dtrain.algorithms.rates.scale_option import scale_option, set_option
    from dtrain.algorithms.weights.apart import average_replicas_, join_replicas, split_replicas
    from dtrain.algorithms.weights.batch_norm import update_batch_norm_
    from dtrain.algorithms.weights.diloco import diloco, outer_step_
    from dtrain.algorithms.weights.ema import ema, update_ema_
    from dtrain.algorithms.weights.freeze import freeze, freeze_layers
    from dtrain.algorithms.weights.local_sgd import local_sgd
    from dtrain.algorithms.weights.swa import swa, update_swa_
    from dtrain.algorithms.weights.swap import swap_in_, swapped
    from dtrain.batch import BatchSpec, batch_spec, split_batch
    from dtrain.checkpoint.convert.convert import Converted, convert_checkpoint
    from dtrain.checkpoint.find import Committed, latest_checkpoint, list_checkpoints
    from dtrain.checkpoint.job import SavedStep
    from dtrain.checkpoint.load import Restored, load_sharded
    from dtrain.checkpoint.retention import prune_checkpoints
    from dtrain.checkpoint.save import SaveHandle, save_sharded
    from dtrain.checkpoint.verify import verify_checkpoint
    from dtrain.checkpoint.weights import LoadedWeights, load_weights_
    from dtrain.clock import Clock
    from dtrain.combinators import between, every, masked, on_batch
    from dtrain.data.loading.build import build_loader
    from dtrain.data.loading.device import prefetch_to_device
    from dtrain.data.loading.loader import Loader
    from dtrain.data.mapped import memory_mapped
    from dtrain.data.order.base import Order
    from dtrain.data.order.blocks import BlockShuffle
    from dtrain.data.order.quality import ShuffleQuality, shuffle_quality
    from dtrain.data.order.sampler import ElasticSampler
    from dtrain.data.order.sources import Mixture, mix
    from dtrain.data.packing.attention import DocumentBounds, document_bounds, document_mask
    from dtrain.data.packing.packed import PackedTokens
    from dtrain.data.packing.stream import TokenStream, pack_tokens
    from dtrain.data.stream.dataset import ShardedDataset
    from dtrain.data.stream.formats.write import WrittenShards, write_shards
    from dtrain.data.transforms import SampleTransform, seeded
    from dtrain.dist.collectives import all_gather_json, gather_json
    from dtrain.dist.determinism import Determinism, use_deterministic
    from dtrain.dist.differentiable import all_gather_with_grad
    from dtrain.dist.init import DistInfo, init_dist
    from dtrain.dist.mesh import build_mesh, data_rank
    from dtrain.dist.ragged import all_gather_by_rank, all_gather_ragged, gather_ragged
    from dtrain.dist.reduce import reduce_max, reduce_mean, reduce_sum
    from dtrain.dist.rng import derive_seed, generator, rng_state, seed_all, set_rng_state
    from dtrain.dist.tf32 import Tf32, use_tf32
    from dtrain.dist.turns import local_rank_zero_first
    from dtrain.durations import Duration, RunLength
    from dtrain.errors import (
        CheckpointError,
        CheckpointMismatchError,
        ConfigError,
        DamagedCheckpointError,
        DataError,
        DesyncError,
        DistError,
        DoesNotFitError,
        DtrainError,
        NonFiniteError,
        PeerError,
        RankError,
        ShardError,
        StaleStateError,
        StepError,
    )
    from dtrain.launch.call import spawn
    from dtrain.launch.hang.asking import explain_hang
    from dtrain.losses import jensen_shannon, mean_loss, soft_cross_entropy, token_cross_entropy
    from dtrain.memory.failure import is_out_of_memory
    from dtrain.memory.snapshot import write_snapshot
    from dtrain.observe.inside.activations import activation_stats
    from dtrain.observe.inside.desync import desync_check, desync_guard
    from dtrain.observe.inside.loss import watch_loss
    from dtrain.observe.inside.norms import norms
    from dtrain.observe.meters.counted import measure_flops
    from dtrain.observe.meters.flops import transformer_flops
    from dtrain.observe.meters.left import time_left
    from dtrain.observe.meters.memory import memory_here, memory_stats
    from dtrain.observe.meters.mfu import mfu
    from dtrain.observe.meters.peaks import device_peak
    from dtrain.observe.meters.rates import learning_rates
    from dtrain.observe.meters.readings import Meter, readings
    from dtrain.observe.meters.system import system_metrics
    from dtrain.observe.meters.throughput import throughput
    from dtrain.observe.metrics import gather_metric_states, reduce_metrics, tokens_per_second
    from dtrain.observe.profiling.out_of_memory import snapshot_on_oom
    from dtrain.observe.profiling.phases import cyclic
    from dtrain.observe.profiling.profile import Profile, profile, profiled
    from dtrain.observe.progress import progress_line
    from dtrain.observe.run.opened import Run, open_run
    from dtrain.observe.run.upload import upload_run
    from dtrain.observe.sinks import (
        DroppedSink,
        InMemory,
        Sink,
        close_sink,
        console,
        csv_file,
        dropped_sinks,
        guarded,
        in_memory,
        jsonl,
        mlflow,
        progress_bar,
        read_jsonl,
        tee,
        tensorboard,
        text_file,
        wandb,
    )
    from dtrain.observe.stops.metric import EarlyStop, ThresholdStop, early_stop, threshold_stop
    from dtrain.optim.decoupled import DecoupledAdamW, DecoupledSGDW
    from dtrain.optim.groups import Group, param_groups
    from dtrain.optim.muon import Muon, orthogonalize
    from dtrain.optim.muon_groups import muon_groups
    from dtrain.planning.estimate import MemoryEstimate, estimate_memory
    from dtrain.planning.search import compare_strategies, largest_microbatch
    from dtrain.planning.workload import Workload
    from dtrain.pulse import beat
    from dtrain.report.trace.merge import merge_traces
    from dtrain.report.trace.share import KernelShare, kernel_share
    from dtrain.report.trace.timeline import memory_timeline
    from dtrain.report.trace.verdict import Verdict, verdict
    from dtrain.schedules.adapt import to_lambda_lr
    from dtrain.schedules.basic import constant, cosine, linear, with_warmup
    from dtrain.schedules.combine import clamp, join, scale, stretch
    from dtrain.schedules.cycles import cosine_restarts, one_cycle
    from dtrain.schedules.decays import exponential, inverse_sqrt, polynomial
    from dtrain.schedules.hyper import measured_in
    from dtrain.schedules.plot import plot_schedule
    from dtrain.schedules.stable import warmup_stable_decay
    from dtrain.schedules.stairs import multi_step, step_decay
    from dtrain.scores import perplexity, token_accuracy
    from dtrain.shard.communication import Communication
    from dtrain.shard.compile import compile_blocks
    from dtrain.shard.context_parallel import context_parallel
    from dtrain.shard.describe import describe
    from dtrain.shard.fp8 import convert_to_fp8
    from dtrain.shard.fsdp import shard_model
    from dtrain.shard.materialize import materialize
    from dtrain.shard.memory import checkpoint_activations, offload_activations
    from dtrain.shard.precision import Precision
    from dtrain.shard.whole import evaluating, full_params, unsharded
    from dtrain.spans import span
    from dtrain.state import ShardSpec, TrainState
    from dtrain.step.auto import auto_microbatch
    from dtrain.step.auto_eval import auto_batch_eval
    from dtrain.step.cached import cached_microbatch_step
    from dtrain.step.compose import Step, compose_step
    from dtrain.step.evaluate import evaluate
    from dtrain.step.in_backward import step_in_backward
    from dtrain.step.microbatch import microbatch_step
    from dtrain.step.optimizer import apply_gradients, clip_grad_norm_, optimizer_step, set_lr_
    from dtrain.step.sizing import SizeReport, find_microbatch_size
    from dtrain.step.stop import should_stop
    from dtrain.surgery.alibi import alibi
    from dtrain.surgery.alibi_multihead import AlibiMultiheadAttention
    from dtrain.surgery.attention_bias import alibi_bias, alibi_slopes, with_alibi
    from dtrain.surgery.blur_pool import blur_2d, blur_kernel, blur_pool
    from dtrain.surgery.channels_last import channels_last
    from dtrain.surgery.factorize import factorize, factorize_matrix
    from dtrain.surgery.fused_norm import fused_layer_norm
    from dtrain.surgery.gated_linear_units import GatedLinearUnit, gated_linear_units
    from dtrain.surgery.ghost_batch_norm import ghost_batch_norm, ghost_batches
    from dtrain.surgery.gyro_dropout import GyroDropout, drop_by_masks, gyro_dropout, subnetwork_masks
    from dtrain.surgery.low_precision_norm import (
        LowPrecisionGroupNorm,
        LowPrecisionLayerNorm,
        LowPrecisionRMSNorm,
        low_precision_group_norm,
        low_precision_layer_norm,
    )
    from dtrain.surgery.replace import Replaced, replace_modules
    from dtrain.surgery.squeeze_excite import squeeze_excite
    from dtrain.surgery.stochastic_depth import drop_rates, stochastic_depth
    from dtrain.surgery.weight_standardization import standardize_weight, weight_standardization
    from dtrain.tensors import global_norm
    from dtrain.transform import GradFn, GradStep, StepContext, Transform, UpdateFn
    from dtrain.types import Batch, LossFn, LossSum, Metric, Metrics, Params, Plain, Schedule, Slice, WeightFn, add_metrics

__version__ = "0.1.0"

_HOME = {
    "algorithms.batches.augmix": "augmix augmix_batch",
    "algorithms.batches.colout": "colout colout_batch",
    "algorithms.batches.cutmix": "cutmix cutmix_batch",
    "algorithms.batches.cutout": "cutout cutout_batch",
    "algorithms.batches.label_smoothing": "label_smoothing smooth_labels",
    "algorithms.batches.mixup": "mix_samples mixup mixup_batch",
    "algorithms.batches.progressive_resizing": "progressive_resizing resize_batch",
    "algorithms.batches.rand_augment": "rand_augment rand_augment_batch",
    "algorithms.batches.selective_backprop": "select_by_loss selective_backprop",
    "algorithms.batches.sequence_length": "sequence_length_warmup shorten_batch",
    "algorithms.batches.targets": "as_probabilities",
    "algorithms.gradients.adaptive_clip": "adaptive_clip clip_grad_adaptive_",
    "algorithms.gradients.by_value": "clip_by_value clip_grad_value_",
    "algorithms.gradients.centralize": "centralize_gradients centralize_gradients_",
    "algorithms.gradients.clip": "clip_by_norm",
    "algorithms.gradients.noise_scale": "noise_and_signal noise_scale",
    "algorithms.gradients.nonfinite": "nonfinite",
    "algorithms.gradients.sam": "perturb_ restore_ sam",
    "algorithms.precision.autocast": "autocast",
    "algorithms.precision.loss_scale": "loss_scale",
    "algorithms.rates.scale_lr": "scale_lr",
    "algorithms.rates.scale_option": "scale_option set_option",
    "algorithms.weights.apart": "average_replicas_ join_replicas split_replicas",
    "algorithms.weights.batch_norm": "update_batch_norm_",
    "algorithms.weights.diloco": "diloco outer_step_",
    "algorithms.weights.ema": "ema update_ema_",
    "algorithms.weights.freeze": "freeze freeze_layers",
    "algorithms.weights.local_sgd": "local_sgd",
    "algorithms.weights.swa": "swa update_swa_",
    "algorithms.weights.swap": "swap_in_ swapped",
    "batch": "BatchSpec batch_spec split_batch",
    "checkpoint.convert.convert": "Converted convert_checkpoint",
    "checkpoint.find": "Committed latest_checkpoint list_checkpoints",
    "checkpoint.job": "SavedStep",
    "checkpoint.load": "Restored load_sharded",
    "checkpoint.retention": "prune_checkpoints",
    "checkpoint.save": "SaveHandle save_sharded",
    "checkpoint.verify": "verify_checkpoint",
    "checkpoint.weights": "LoadedWeights load_weights_",
    "clock": "Clock",
    "combinators": "between every masked on_batch",
    "data.loading.build": "build_loader",
    "data.loading.device": "prefetch_to_device",
    "data.loading.loader": "Loader",
    "data.mapped": "memory_mapped",
    "data.order.base": "Order",
    "data.order.blocks": "BlockShuffle",
    "data.order.quality": "ShuffleQuality shuffle_quality",
    "data.order.sampler": "ElasticSampler",
    "data.order.sources": "Mixture mix",
    "data.packing.attention": "DocumentBounds document_bounds document_mask",
    "data.packing.packed": "PackedTokens",
    "data.packing.stream": "TokenStream pack_tokens",
    "data.stream.dataset": "ShardedDataset",
    "data.stream.formats.write": "WrittenShards write_shards",
    "data.transforms": "SampleTransform seeded",
    "dist.collectives": "all_gather_json gather_json",
    "dist.determinism": "Determinism use_deterministic",
    "dist.differentiable": "all_gather_with_grad",
    "dist.init": "DistInfo init_dist",
    "dist.mesh": "build_mesh data_rank",
    "dist.ragged": "all_gather_by_rank all_gather_ragged gather_ragged",
    "dist.reduce": "reduce_max reduce_mean reduce_sum",
    "dist.rng": "derive_seed generator rng_state seed_all set_rng_state",
    "dist.tf32": "Tf32 use_tf32",
    "dist.turns": "local_rank_zero_first",
    "durations": "Duration RunLength",
    "errors": (
        "CheckpointError CheckpointMismatchError ConfigError DamagedCheckpointError DataError "
        "DesyncError DistError DoesNotFitError DtrainError NonFiniteError PeerError RankError ShardError "
        "StaleStateError StepError"
    ),
    "launch.call": "spawn",
    "launch.hang.asking": "explain_hang",
    "losses": "jensen_shannon mean_loss soft_cross_entropy token_cross_entropy",
    "memory.failure": "is_out_of_memory",
    "memory.snapshot": "write_snapshot",
    "observe.inside.activations": "activation_stats",
    "observe.inside.desync": "desync_check desync_guard",
    "observe.inside.loss": "watch_loss",
    "observe.inside.norms": "norms",
    "observe.meters.counted": "measure_flops",
    "observe.meters.flops": "transformer_flops",
    "observe.meters.left": "time_left",
    "observe.meters.memory": "memory_here memory_stats",
    "observe.meters.mfu": "mfu",
    "observe.meters.peaks": "device_peak",
    "observe.meters.rates": "learning_rates",
    "observe.meters.readings": "Meter readings",
    "observe.meters.system": "system_metrics",
    "observe.meters.throughput": "throughput",
    "observe.metrics": "gather_metric_states reduce_metrics tokens_per_second",
    "observe.profiling.out_of_memory": "snapshot_on_oom",
    "observe.profiling.phases": "cyclic",
    "observe.profiling.profile": "Profile profile profiled",
    "observe.progress": "progress_line",
    "observe.run.opened": "Run open_run",
    "observe.run.upload": "upload_run",
    "observe.sinks": (
        "DroppedSink InMemory Sink close_sink console csv_file dropped_sinks guarded in_memory "
        "jsonl mlflow progress_bar read_jsonl tee tensorboard text_file wandb"
    ),
    "observe.stops.metric": "EarlyStop ThresholdStop early_stop threshold_stop",
    "optim.decoupled": "DecoupledAdamW DecoupledSGDW",
    "optim.groups": "Group param_groups",
    "optim.muon": "Muon orthogonalize",
    "optim.muon_groups": "muon_groups",
    "planning.estimate": "MemoryEstimate estimate_memory",
    "planning.search": "compare_strategies largest_microbatch",
    "planning.workload": "Workload",
    "pulse": "beat",
    "report.trace.merge": "merge_traces",
    "report.trace.share": "KernelShare kernel_share",
    "report.trace.timeline": "memory_timeline",
    "report.trace.verdict": "Verdict verdict",
    "schedules.adapt": "to_lambda_lr",
    "schedules.basic": "constant cosine linear with_warmup",
    "schedules.combine": "clamp join scale stretch",
    "schedules.cycles": "cosine_restarts one_cycle",
    "schedules.decays": "exponential inverse_sqrt polynomial",
    "schedules.hyper": "measured_in",
    "schedules.plot": "plot_schedule",
    "schedules.stable": "warmup_stable_decay",
    "schedules.stairs": "multi_step step_decay",
    "scores": "perplexity token_accuracy",
    "shard.communication": "Communication",
    "shard.compile": "compile_blocks",
    "shard.context_parallel": "context_parallel",
    "shard.describe": "describe",
    "shard.fp8": "convert_to_fp8",
    "shard.fsdp": "shard_model",
    "shard.materialize": "materialize",
    "shard.memory": "checkpoint_activations offload_activations",
    "shard.precision": "Precision",
    "shard.whole": "evaluating full_params unsharded",
    "spans": "span",
    "state": "ShardSpec TrainState",
    "step.auto": "auto_microbatch",
    "step.auto_eval": "auto_batch_eval",
    "step.cached": "cached_microbatch_step",
    "step.compose": "Step compose_step",
    "step.evaluate": "evaluate",
    "step.in_backward": "step_in_backward",
    "step.microbatch": "microbatch_step",
    "step.optimizer": "apply_gradients clip_grad_norm_ optimizer_step set_lr_",
    "step.sizing": "SizeReport find_microbatch_size",
    "step.stop": "should_stop",
    "surgery.alibi": "alibi",
    "surgery.alibi_multihead": "AlibiMultiheadAttention",
    "surgery.attention_bias": "alibi_bias alibi_slopes with_alibi",
    "surgery.blur_pool": "blur_2d blur_kernel blur_pool",
    "surgery.channels_last": "channels_last",
    "surgery.factorize": "factorize factorize_matrix",
    "surgery.fused_norm": "fused_layer_norm",
    "surgery.gated_linear_units": "GatedLinearUnit gated_linear_units",
    "surgery.ghost_batch_norm": "ghost_batch_norm ghost_batches",
    "surgery.gyro_dropout": "GyroDropout drop_by_masks gyro_dropout subnetwork_masks",
    "surgery.low_precision_norm": (
        "LowPrecisionGroupNorm LowPrecisionLayerNorm LowPrecisionRMSNorm low_precision_group_norm low_precision_layer_norm"
    ),
    "surgery.replace": "Replaced replace_modules",
    "surgery.squeeze_excite": "squeeze_excite",
    "surgery.stochastic_depth": "drop_rates stochastic_depth",
    "surgery.weight_standardization": "standardize_weight weight_standardization",
    "tensors": "global_norm",
    "transform": "GradFn GradStep StepContext Transform UpdateFn",
    "types": "Batch LossFn LossSum Metric Metrics Params Plain Schedule Slice WeightFn add_metrics",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dtrain' has no attribute {name!r}")
    value = getattr(import_module(f"dtrain.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


__all__ = [
    "AlibiMultiheadAttention",
    "Batch",
    "BatchSpec",
    "BlockShuffle",
    "CheckpointError",
    "CheckpointMismatchError",
    "Clock",
    "Committed",
    "Communication",
    "ConfigError",
    "Converted",
    "DamagedCheckpointError",
    "DataError",
    "DecoupledAdamW",
    "DecoupledSGDW",
    "DesyncError",
    "Determinism",
    "DistError",
    "DistInfo",
    "DocumentBounds",
    "DoesNotFitError",
    "DroppedSink",
    "DtrainError",
    "Duration",
    "EarlyStop",
    "ElasticSampler",
    "GatedLinearUnit",
    "GradFn",
    "GradStep",
    "Group",
    "GyroDropout",
    "InMemory",
    "KernelShare",
    "LoadedWeights",
    "Loader",
    "LossFn",
    "LossSum",
    "LowPrecisionGroupNorm",
    "LowPrecisionLayerNorm",
    "LowPrecisionRMSNorm",
    "MemoryEstimate",
    "Meter",
    "Metric",
    "Metrics",
    "Mixture",
    "Muon",
    "NonFiniteError",
    "Order",
    "PackedTokens",
    "Params",
    "PeerError",
    "Plain",
    "Precision",
    "Profile",
    "RankError",
    "Replaced",
    "Restored",
    "Run",
    "RunLength",
    "SampleTransform",
    "SaveHandle",
    "SavedStep",
    "Schedule",
    "ShardError",
    "ShardSpec",
    "ShardedDataset",
    "ShuffleQuality",
    "Sink",
    "SizeReport",
    "Slice",
    "StaleStateError",
    "Step",
    "StepContext",
    "StepError",
    "Tf32",
    "ThresholdStop",
    "TokenStream",
    "TrainState",
    "Transform",
    "UpdateFn",
    "Verdict",
    "WeightFn",
    "Workload",
    "WrittenShards",
    "activation_stats",
    "adaptive_clip",
    "add_metrics",
    "alibi",
    "alibi_bias",
    "alibi_slopes",
    "all_gather_by_rank",
    "all_gather_json",
    "all_gather_ragged",
    "all_gather_with_grad",
    "apply_gradients",
    "as_probabilities",
    "augmix",
    "augmix_batch",
    "auto_batch_eval",
    "auto_microbatch",
    "autocast",
    "average_replicas_",
    "batch_spec",
    "beat",
    "between",
    "blur_2d",
    "blur_kernel",
    "blur_pool",
    "build_loader",
    "build_mesh",
    "cached_microbatch_step",
    "centralize_gradients",
    "centralize_gradients_",
    "channels_last",
    "checkpoint_activations",
    "clamp",
    "clip_by_norm",
    "clip_by_value",
    "clip_grad_adaptive_",
    "clip_grad_norm_",
    "clip_grad_value_",
    "close_sink",
    "colout",
    "colout_batch",
    "compare_strategies",
    "compile_blocks",
    "compose_step",
    "console",
    "constant",
    "context_parallel",
    "convert_checkpoint",
    "convert_to_fp8",
    "cosine",
    "cosine_restarts",
    "csv_file",
    "cutmix",
    "cutmix_batch",
    "cutout",
    "cutout_batch",
    "cyclic",
    "data_rank",
    "derive_seed",
    "describe",
    "desync_check",
    "desync_guard",
    "device_peak",
    "diloco",
    "document_bounds",
    "document_mask",
    "drop_by_masks",
    "drop_rates",
    "dropped_sinks",
    "early_stop",
    "ema",
    "estimate_memory",
    "evaluate",
    "evaluating",
    "every",
    "explain_hang",
    "exponential",
    "factorize",
    "factorize_matrix",
    "find_microbatch_size",
    "freeze",
    "freeze_layers",
    "full_params",
    "fused_layer_norm",
    "gated_linear_units",
    "gather_json",
    "gather_metric_states",
    "gather_ragged",
    "generator",
    "ghost_batch_norm",
    "ghost_batches",
    "global_norm",
    "guarded",
    "gyro_dropout",
    "in_memory",
    "init_dist",
    "inverse_sqrt",
    "is_out_of_memory",
    "jensen_shannon",
    "join",
    "join_replicas",
    "jsonl",
    "kernel_share",
    "label_smoothing",
    "largest_microbatch",
    "latest_checkpoint",
    "learning_rates",
    "linear",
    "list_checkpoints",
    "load_sharded",
    "load_weights_",
    "local_rank_zero_first",
    "local_sgd",
    "loss_scale",
    "low_precision_group_norm",
    "low_precision_layer_norm",
    "masked",
    "materialize",
    "mean_loss",
    "measure_flops",
    "measured_in",
    "memory_here",
    "memory_mapped",
    "memory_stats",
    "memory_timeline",
    "merge_traces",
    "mfu",
    "microbatch_step",
    "mix",
    "mix_samples",
    "mixup",
    "mixup_batch",
    "mlflow",
    "multi_step",
    "muon_groups",
    "noise_and_signal",
    "noise_scale",
    "nonfinite",
    "norms",
    "offload_activations",
    "on_batch",
    "one_cycle",
    "open_run",
    "optimizer_step",
    "orthogonalize",
    "outer_step_",
    "pack_tokens",
    "param_groups",
    "perplexity",
    "perturb_",
    "plot_schedule",
    "polynomial",
    "prefetch_to_device",
    "profile",
    "profiled",
    "progress_bar",
    "progress_line",
    "progressive_resizing",
    "prune_checkpoints",
    "rand_augment",
    "rand_augment_batch",
    "read_jsonl",
    "readings",
    "reduce_max",
    "reduce_mean",
    "reduce_metrics",
    "reduce_sum",
    "replace_modules",
    "resize_batch",
    "restore_",
    "rng_state",
    "sam",
    "save_sharded",
    "scale",
    "scale_lr",
    "scale_option",
    "seed_all",
    "seeded",
    "select_by_loss",
    "selective_backprop",
    "sequence_length_warmup",
    "set_lr_",
    "set_option",
    "set_rng_state",
    "shard_model",
    "shorten_batch",
    "should_stop",
    "shuffle_quality",
    "smooth_labels",
    "snapshot_on_oom",
    "soft_cross_entropy",
    "span",
    "spawn",
    "split_batch",
    "split_replicas",
    "squeeze_excite",
    "standardize_weight",
    "step_decay",
    "step_in_backward",
    "stochastic_depth",
    "stretch",
    "subnetwork_masks",
    "swa",
    "swap_in_",
    "swapped",
    "system_metrics",
    "tee",
    "tensorboard",
    "text_file",
    "threshold_stop",
    "throughput",
    "time_left",
    "to_lambda_lr",
    "token_accuracy",
    "token_cross_entropy",
    "tokens_per_second",
    "transformer_flops",
    "unsharded",
    "update_batch_norm_",
    "update_ema_",
    "update_swa_",
    "upload_run",
    "use_deterministic",
    "use_tf32",
    "verdict",
    "verify_checkpoint",
    "wandb",
    "warmup_stable_decay",
    "watch_loss",
    "weight_standardization",
    "with_alibi",
    "with_warmup",
    "write_shards",
    "write_snapshot",
]
