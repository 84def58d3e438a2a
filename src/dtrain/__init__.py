"""dtrain: distributed-training primitives for people who write their own PyTorch loop.

Names are loaded when they are first used, so ``import dtrain`` imports no torch, and does nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.algorithms.gradients.clip import clip_by_norm
    from dtrain.algorithms.precision.autocast import autocast
    from dtrain.algorithms.precision.loss_scale import loss_scale
    from dtrain.algorithms.rates.scale_lr import scale_lr
    from dtrain.algorithms.weights.ema import ema, update_ema_
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
        DistError,
        DoesNotFitError,
        DtrainError,
        PeerError,
        RankError,
        ShardError,
        StaleStateError,
        StepError,
    )
    from dtrain.launch.call import spawn
    from dtrain.losses import mean_loss, token_cross_entropy
    from dtrain.memory.failure import is_out_of_memory
    from dtrain.memory.snapshot import write_snapshot
    from dtrain.observe.metrics import gather_metric_states, reduce_metrics, tokens_per_second
    from dtrain.observe.progress import progress_line
    from dtrain.observe.sinks import jsonl, read_jsonl
    from dtrain.planning.estimate import MemoryEstimate, estimate_memory
    from dtrain.planning.search import compare_strategies, largest_microbatch
    from dtrain.planning.workload import Workload
    from dtrain.pulse import beat
    from dtrain.schedules.basic import constant, cosine, linear, with_warmup
    from dtrain.schedules.hyper import measured_in
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
    from dtrain.state import ShardSpec, TrainState
    from dtrain.step.auto import auto_microbatch
    from dtrain.step.auto_eval import auto_batch_eval
    from dtrain.step.compose import Step, compose_step
    from dtrain.step.evaluate import evaluate
    from dtrain.step.in_backward import step_in_backward
    from dtrain.step.microbatch import microbatch_step
    from dtrain.step.optimizer import apply_gradients, clip_grad_norm_, optimizer_step, set_lr_
    from dtrain.step.sizing import SizeReport, find_microbatch_size
    from dtrain.step.stop import should_stop
    from dtrain.tensors import global_norm
    from dtrain.transform import GradFn, GradStep, StepContext, Transform, UpdateFn
    from dtrain.types import Batch, LossFn, LossSum, Metric, Metrics, Params, Plain, Schedule, Slice, WeightFn, add_metrics

__version__ = "0.1.0"

_HOME = {
    "algorithms.gradients.clip": "clip_by_norm",
    "algorithms.precision.autocast": "autocast",
    "algorithms.precision.loss_scale": "loss_scale",
    "algorithms.rates.scale_lr": "scale_lr",
    "algorithms.weights.ema": "ema update_ema_",
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
        "DistError DoesNotFitError DtrainError PeerError RankError ShardError StaleStateError "
        "StepError"
    ),
    "launch.call": "spawn",
    "losses": "mean_loss token_cross_entropy",
    "memory.failure": "is_out_of_memory",
    "memory.snapshot": "write_snapshot",
    "observe.metrics": "gather_metric_states reduce_metrics tokens_per_second",
    "observe.progress": "progress_line",
    "observe.sinks": "jsonl read_jsonl",
    "planning.estimate": "MemoryEstimate estimate_memory",
    "planning.search": "compare_strategies largest_microbatch",
    "planning.workload": "Workload",
    "pulse": "beat",
    "schedules.basic": "constant cosine linear with_warmup",
    "schedules.hyper": "measured_in",
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
    "state": "ShardSpec TrainState",
    "step.auto": "auto_microbatch",
    "step.auto_eval": "auto_batch_eval",
    "step.compose": "Step compose_step",
    "step.evaluate": "evaluate",
    "step.in_backward": "step_in_backward",
    "step.microbatch": "microbatch_step",
    "step.optimizer": "apply_gradients clip_grad_norm_ optimizer_step set_lr_",
    "step.sizing": "SizeReport find_microbatch_size",
    "step.stop": "should_stop",
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
    "Determinism",
    "DistError",
    "DistInfo",
    "DocumentBounds",
    "DoesNotFitError",
    "DtrainError",
    "Duration",
    "ElasticSampler",
    "GradFn",
    "GradStep",
    "LoadedWeights",
    "Loader",
    "LossFn",
    "LossSum",
    "MemoryEstimate",
    "Metric",
    "Metrics",
    "Mixture",
    "Order",
    "PackedTokens",
    "Params",
    "PeerError",
    "Plain",
    "Precision",
    "RankError",
    "Restored",
    "RunLength",
    "SampleTransform",
    "SaveHandle",
    "SavedStep",
    "Schedule",
    "ShardError",
    "ShardSpec",
    "ShardedDataset",
    "ShuffleQuality",
    "SizeReport",
    "Slice",
    "StaleStateError",
    "Step",
    "StepContext",
    "StepError",
    "Tf32",
    "TokenStream",
    "TrainState",
    "Transform",
    "UpdateFn",
    "WeightFn",
    "Workload",
    "WrittenShards",
    "add_metrics",
    "all_gather_by_rank",
    "all_gather_json",
    "all_gather_ragged",
    "all_gather_with_grad",
    "apply_gradients",
    "auto_batch_eval",
    "auto_microbatch",
    "autocast",
    "batch_spec",
    "beat",
    "between",
    "build_loader",
    "build_mesh",
    "checkpoint_activations",
    "clip_by_norm",
    "clip_grad_norm_",
    "compare_strategies",
    "compile_blocks",
    "compose_step",
    "constant",
    "context_parallel",
    "convert_checkpoint",
    "convert_to_fp8",
    "cosine",
    "data_rank",
    "derive_seed",
    "describe",
    "document_bounds",
    "document_mask",
    "ema",
    "estimate_memory",
    "evaluate",
    "evaluating",
    "every",
    "find_microbatch_size",
    "full_params",
    "gather_json",
    "gather_metric_states",
    "gather_ragged",
    "generator",
    "global_norm",
    "init_dist",
    "is_out_of_memory",
    "jsonl",
    "largest_microbatch",
    "latest_checkpoint",
    "linear",
    "list_checkpoints",
    "load_sharded",
    "load_weights_",
    "local_rank_zero_first",
    "loss_scale",
    "masked",
    "materialize",
    "mean_loss",
    "measured_in",
    "memory_mapped",
    "microbatch_step",
    "mix",
    "offload_activations",
    "on_batch",
    "optimizer_step",
    "pack_tokens",
    "prefetch_to_device",
    "progress_line",
    "prune_checkpoints",
    "read_jsonl",
    "reduce_max",
    "reduce_mean",
    "reduce_metrics",
    "reduce_sum",
    "rng_state",
    "save_sharded",
    "scale_lr",
    "seed_all",
    "seeded",
    "set_lr_",
    "set_rng_state",
    "shard_model",
    "should_stop",
    "shuffle_quality",
    "spawn",
    "split_batch",
    "step_in_backward",
    "token_cross_entropy",
    "tokens_per_second",
    "unsharded",
    "update_ema_",
    "use_deterministic",
    "use_tf32",
    "verify_checkpoint",
    "with_warmup",
    "write_shards",
    "write_snapshot",
]
