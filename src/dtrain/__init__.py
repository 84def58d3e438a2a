"""Distributed-training primitives for PyTorch training loops that you write yourself.

    import dtrain as dt

    with dt.init_dist():
        model = dt.shard_model(build_model(), dt.build_mesh())
        optimizer = torch.optim.AdamW(model.parameters())
        step = dt.compose_step(loss_fn, [dt.transforms.clip_by_norm(1.0), dt.auto_microbatch()])
        state = step.init(model, optimizer, loader=loader)
        state = dt.load_sharded("ckpt", state, missing_ok=True)
        for batch in loader.until("3ep"):
            state, metrics = step(state, batch)
        dt.save_sharded("ckpt", state)

``dtrain`` holds the words of a training loop. All other names are in the sub-packages listed first below, for example
``dt.schedules.cosine`` in ``dtrain/schedules``. Names load on first use: ``import dtrain`` imports neither torch nor any
sub-package.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain import checkpoint as checkpoint
    from dtrain import data as data
    from dtrain import dist as dist
    from dtrain import errors as errors
    from dtrain import experts as experts
    from dtrain import launch as launch
    from dtrain import loggers as loggers
    from dtrain import memory as memory
    from dtrain import monitors as monitors
    from dtrain import optim as optim
    from dtrain import planning as planning
    from dtrain import profiling as profiling
    from dtrain import prove as prove
    from dtrain import run as run
    from dtrain import schedules as schedules
    from dtrain import shard as shard
    from dtrain import step as step
    from dtrain import surgery as surgery
    from dtrain import testing as testing
    from dtrain import transforms as transforms
    from dtrain import typing as typing
    from dtrain.checkpoint.checkpoint_info import latest_checkpoint as latest_checkpoint
    from dtrain.checkpoint.load import load_sharded as load_sharded
    from dtrain.checkpoint.load_weights import load_weights_ as load_weights_
    from dtrain.checkpoint.save import Checkpointer as Checkpointer
    from dtrain.checkpoint.save import save_sharded as save_sharded
    from dtrain.data.batch import batch_spec as batch_spec
    from dtrain.data.loader import build_loader as build_loader
    from dtrain.dist.init import init_dist as init_dist
    from dtrain.dist.mesh import build_mesh as build_mesh
    from dtrain.dist.rng import seed_all as seed_all
    from dtrain.launch.spawn_function import spawn as spawn
    from dtrain.losses import cross_entropy as cross_entropy
    from dtrain.losses import linear_cross_entropy as linear_cross_entropy
    from dtrain.losses import linear_token_log_probs as linear_token_log_probs
    from dtrain.losses import mean_loss as mean_loss
    from dtrain.losses import soft_cross_entropy as soft_cross_entropy
    from dtrain.losses import sum_loss as sum_loss
    from dtrain.losses import token_log_probs as token_log_probs
    from dtrain.losses import transformers_loss as transformers_loss
    from dtrain.monitors.reduce_metrics import reduce_metrics as reduce_metrics
    from dtrain.run.run_dir import open_run as open_run
    from dtrain.shard.activations import compile_blocks as compile_blocks
    from dtrain.shard.fsdp import shard_model as shard_model
    from dtrain.shard.materialize import materialize as materialize
    from dtrain.shard.precision import Precision as Precision
    from dtrain.shard.unshard import describe as describe
    from dtrain.shard.unshard import eval_mode as eval_mode
    from dtrain.shard.unshard import full_params as full_params
    from dtrain.spans import span as span
    from dtrain.state import TrainState as TrainState
    from dtrain.step.auto_microbatch import auto_microbatch as auto_microbatch
    from dtrain.step.compose import compose_step as compose_step
    from dtrain.step.compose import should_stop as should_stop
    from dtrain.step.evaluate import evaluate as evaluate
    from dtrain.step.microbatch_step import microbatch_step as microbatch_step
    from dtrain.step.optimizer import apply_gradients as apply_gradients
    from dtrain.step.optimizer import clip_grad_norm_ as clip_grad_norm_
    from dtrain.step.optimizer import optimizer_step as optimizer_step
    from dtrain.step.transform import Transform as Transform
    from dtrain.typing import LossSum as LossSum

__version__ = "0.1.0"

__getattr__, __dir__ = attach(__name__, __file__)
