"""dtrain: distributed-training primitives for people who write their own PyTorch loop.

Names are loaded when they are first used, so ``import dtrain`` imports no torch, and does nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.algorithms.clip import clip_by_norm
    from dtrain.algorithms.ema import ema, update_ema_
    from dtrain.algorithms.scale_lr import scale_lr
    from dtrain.batch import BatchSpec, batch_spec, split_batch
    from dtrain.checkpoint.find import Committed, latest_checkpoint, list_checkpoints
    from dtrain.checkpoint.load import Restored, load_sharded
    from dtrain.checkpoint.save import SaveHandle, save_sharded
    from dtrain.checkpoint.verify import verify_checkpoint
    from dtrain.clock import Clock, Duration
    from dtrain.data.loader import Loader, build_loader
    from dtrain.data.sampler import ElasticSampler
    from dtrain.dist.collectives import all_gather_json
    from dtrain.dist.init import DistInfo, init_dist
    from dtrain.dist.mesh import build_mesh
    from dtrain.dist.rng import seed_all
    from dtrain.errors import (
        CheckpointError,
        CheckpointMismatchError,
        ConfigError,
        DamagedCheckpointError,
        DistError,
        DtrainError,
        PeerError,
        RankError,
        StaleStateError,
        StepError,
    )
    from dtrain.losses import mean_loss, token_cross_entropy
    from dtrain.observe.metrics import reduce_metrics, tokens_per_second
    from dtrain.observe.progress import progress_line
    from dtrain.observe.sinks import jsonl, read_jsonl
    from dtrain.schedules.basic import cosine, linear, with_warmup
    from dtrain.shard.fsdp import evaluating, shard_model
    from dtrain.shard.materialize import materialize
    from dtrain.shard.precision import Precision
    from dtrain.state import ShardSpec, TrainState
    from dtrain.step.compose import Step, compose_step
    from dtrain.step.evaluate import evaluate
    from dtrain.step.microbatch import microbatch_step
    from dtrain.step.optimizer import apply_gradients, clip_grad_norm_, optimizer_step, set_lr_
    from dtrain.tensors import global_norm
    from dtrain.transform import GradFn, GradStep, StepContext, Transform, UpdateFn
    from dtrain.types import Batch, LossFn, LossSum, Metric, Metrics, Params, Plain, Schedule, Slice

__version__ = "0.1.0"

_HOME = {
    "algorithms.clip": "clip_by_norm",
    "algorithms.ema": "ema update_ema_",
    "algorithms.scale_lr": "scale_lr",
    "batch": "BatchSpec batch_spec split_batch",
    "checkpoint.find": "Committed latest_checkpoint list_checkpoints",
    "checkpoint.load": "Restored load_sharded",
    "checkpoint.save": "SaveHandle save_sharded",
    "checkpoint.verify": "verify_checkpoint",
    "clock": "Clock Duration",
    "data.loader": "Loader build_loader",
    "data.sampler": "ElasticSampler",
    "dist.collectives": "all_gather_json",
    "dist.init": "DistInfo init_dist",
    "dist.mesh": "build_mesh",
    "dist.rng": "seed_all",
    "errors": "CheckpointError CheckpointMismatchError ConfigError DamagedCheckpointError DistError DtrainError PeerError "
    "RankError StaleStateError StepError",
    "losses": "mean_loss token_cross_entropy",
    "observe.metrics": "reduce_metrics tokens_per_second",
    "observe.progress": "progress_line",
    "observe.sinks": "jsonl read_jsonl",
    "schedules.basic": "cosine linear with_warmup",
    "shard.fsdp": "evaluating shard_model",
    "shard.materialize": "materialize",
    "shard.precision": "Precision",
    "state": "ShardSpec TrainState",
    "step.compose": "Step compose_step",
    "step.evaluate": "evaluate",
    "step.microbatch": "microbatch_step",
    "step.optimizer": "apply_gradients clip_grad_norm_ optimizer_step set_lr_",
    "tensors": "global_norm",
    "transform": "GradFn GradStep StepContext Transform UpdateFn",
    "types": "Batch LossFn LossSum Metric Metrics Params Plain Schedule Slice",
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
    "CheckpointError",
    "CheckpointMismatchError",
    "Clock",
    "Committed",
    "ConfigError",
    "DamagedCheckpointError",
    "DistError",
    "DistInfo",
    "DtrainError",
    "Duration",
    "ElasticSampler",
    "GradFn",
    "GradStep",
    "Loader",
    "LossFn",
    "LossSum",
    "Metric",
    "Metrics",
    "Params",
    "PeerError",
    "Plain",
    "Precision",
    "RankError",
    "Restored",
    "SaveHandle",
    "Schedule",
    "ShardSpec",
    "Slice",
    "StaleStateError",
    "Step",
    "StepContext",
    "StepError",
    "TrainState",
    "Transform",
    "UpdateFn",
    "all_gather_json",
    "apply_gradients",
    "batch_spec",
    "build_loader",
    "build_mesh",
    "clip_by_norm",
    "clip_grad_norm_",
    "compose_step",
    "cosine",
    "ema",
    "evaluate",
    "evaluating",
    "global_norm",
    "init_dist",
    "jsonl",
    "latest_checkpoint",
    "linear",
    "list_checkpoints",
    "load_sharded",
    "materialize",
    "mean_loss",
    "microbatch_step",
    "optimizer_step",
    "progress_line",
    "read_jsonl",
    "reduce_metrics",
    "save_sharded",
    "scale_lr",
    "seed_all",
    "set_lr_",
    "shard_model",
    "split_batch",
    "token_cross_entropy",
    "tokens_per_second",
    "update_ema_",
    "verify_checkpoint",
    "with_warmup",
]
