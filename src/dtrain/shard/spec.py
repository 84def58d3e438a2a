"""Hold the layout of a model over ranks (``ShardSpec``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import ReplicaInfo
from dtrain.fqn import unwrap_module

Strategy = Literal["full_shard", "shard_grad_op", "hybrid_shard", "replicate", "none"]
Accumulate = Literal["local", "sharded"]
Buffers = Literal["broadcast", "mean", "sum", "own"]
# Attribute of a module in which shard_model stores the ShardSpec.
_SPEC_ATTRIBUTE = "_dtrain_spec"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardSpec:
    """Layout of a model over ranks. ``shard_model`` sets it; a plain model in one process has ``strategy="none"``.

    Args:
        strategy: strategy passed to ``shard_model``.
        mesh: whole mesh, None for a plain model.
        data_rank: this rank's index among the ranks with different data.
        data_ranks: number of such indices.
        ranks_per_batch: number of consecutive ranks that share a batch, along ``cp`` and ``tp``.
        counts_in_loss: if True, this rank's sums count. Ranks along ``tp`` compute equal sums, so only the first rank counts.
        accumulate: gradients between microbatches: whole (``"local"``) or as shards (``"sharded"``).
        buffers: synchronization of buffers that a forward changed, as passed to ``shard_model``; see ``buffer_choice``.
        ignored_params: names of parameters that FSDP2 ignores, so that they are whole on every rank.
        plain_params: if True, FSDP2 is not used, and all parameters are plain tensors, whole on every rank.
        compute_device: device of forward and backward if the parameters are offloaded, else None.
        replica_info: replicas that train separately, which sum gradients only within a replica; see ``split_replicas``. None
            otherwise, and always in the spec of ``shard_model``.
        documents: batch key of the documents that attention of a training step stays within; see ``context_parallel``. None
            otherwise.
    """

    strategy: Strategy = "none"
    mesh: DeviceMesh | None = field(default=None, repr=False)
    data_rank: int = 0
    data_ranks: int = 1
    ranks_per_batch: int = 1
    counts_in_loss: bool = True
    accumulate: Accumulate = "local"
    buffers: Buffers | Mapping[str, Buffers] | None = None
    ignored_params: tuple[str, ...] = ()
    plain_params: bool = False
    compute_device: torch.device | None = None
    replica_info: ReplicaInfo | None = field(default=None, repr=False)
    documents: str | None = None

    def __reduce__(self) -> tuple[type[ShardSpec], tuple[()]]:
        # A copy of a model is on no mesh.
        return ShardSpec, ()


def attach_spec(model: nn.Module, spec: ShardSpec) -> None:
    """Store ``spec`` on ``model``. Mutates: ``model`` (one attribute, not in the state dict)."""
    setattr(unwrap_module(model), _SPEC_ATTRIBUTE, spec)


def get_spec(model: nn.Module) -> ShardSpec:
    """Return the ``ShardSpec`` of a model, or the default spec if ``shard_model`` has not seen the model."""
    spec = unwrap_module(model).__dict__.get(_SPEC_ATTRIBUTE)
    return spec if isinstance(spec, ShardSpec) else ShardSpec()


def get_device(model: nn.Module) -> torch.device:
    """Return the device on which ``model`` computes. For a model without parameters, the device of this rank."""
    return get_spec(model).compute_device or next((param.device for param in model.parameters()), get_dist_info().device)
