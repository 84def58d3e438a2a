"""Shard a model with FSDP2 and tensor parallelism, save memory of activations, and copy a model in memory.

    dt.shard.checkpoint_activations(model, blocks=(Block,))
    model = dt.shard_model(model, mesh, blocks=(Block,), comm_config=dt.shard.CommConfig(backward_prefetch=2))
    with dt.shard.unshard_params(model):
        norms = {name: param.norm() for name, param in model.named_parameters()}
    best = dt.shard.snapshot(model, offload=True)
    dt.shard.restore_(model, best)

``dt.shard_model`` is the function of most loops. It stores a ``ShardSpec`` on the model.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.shard.activations import checkpoint_activations as checkpoint_activations
    from dtrain.shard.activations import offload_activations as offload_activations
    from dtrain.shard.fsdp import CommConfig as CommConfig
    from dtrain.shard.precision import convert_to_fp8 as convert_to_fp8
    from dtrain.shard.sequence_attention import document_attention as document_attention
    from dtrain.shard.sequence_attention import register_attention as register_attention
    from dtrain.shard.snapshots import restore_ as restore_
    from dtrain.shard.snapshots import snapshot as snapshot
    from dtrain.shard.snapshots import use_snapshot as use_snapshot
    from dtrain.shard.spec import ShardSpec as ShardSpec
    from dtrain.shard.unshard import unshard_params as unshard_params

__getattr__, __dir__ = attach(__name__, __file__)
