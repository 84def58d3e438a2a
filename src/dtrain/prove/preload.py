"""Import what most scripts import, in the process whose forks are the ranks of a proof. Has no names of its own."""

# ruff: noqa: F401 - the modules are imported for the forks

import torch._dynamo
import torch.distributed.fsdp
import torch.nn.parallel
import torch.utils.data

import dtrain.checkpoint.load
import dtrain.checkpoint.load_weights
import dtrain.checkpoint.save
import dtrain.data.loader
import dtrain.loggers.records
import dtrain.loggers.text
import dtrain.losses
import dtrain.monitors.reduce_metrics
import dtrain.prove.dtrain_hooks
import dtrain.prove.runs
import dtrain.prove.torch_hooks
import dtrain.run.run_dir
import dtrain.shard.fsdp
import dtrain.shard.materialize
import dtrain.step.auto_microbatch
import dtrain.step.compose
import dtrain.step.evaluate
import dtrain.transforms
