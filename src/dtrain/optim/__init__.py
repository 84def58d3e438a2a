"""Optimizers and parameter groups that torch does not have.

    model = dt.shard_model(model, dt.build_mesh(), blocks=(Block,))
    head = dt.optim.ParamGroup("head", "head.**", {"lr": 1e-3})
    groups = dt.optim.param_groups(model, head, dt.optim.ParamGroup("rest"), weight_decay=1e-5)
    optimizer = dt.optim.DecoupledAdamW(groups, lr=3e-4)

All optimizers support sharded parameters (FSDP2, tensor parallelism) and ``dt.save_sharded``.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.optim.decoupled import DecoupledAdamW as DecoupledAdamW
    from dtrain.optim.decoupled import DecoupledSGDW as DecoupledSGDW
    from dtrain.optim.groups import ParamGroup as ParamGroup
    from dtrain.optim.groups import muon_groups as muon_groups
    from dtrain.optim.groups import param_groups as param_groups
    from dtrain.optim.muon import MatrixOptimizer as MatrixOptimizer
    from dtrain.optim.muon import Muon as Muon
    from dtrain.optim.muon import orthogonalize as orthogonalize

__getattr__, __dir__ = attach(__name__, __file__)
