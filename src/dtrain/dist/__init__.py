"""Exchange JSON and tensors between ranks, and control random numbers and determinism.

    with dt.init_dist() as info:
        mesh = dt.build_mesh()
        counts = dt.dist.all_gather_json({"rank": info.rank, "samples": 7})
        total = dt.dist.reduce_sum(torch.tensor(3.0))
        noise = torch.randn(8, generator=dt.dist.generator("cpu", 1, "noise"))

A collective that fails on one rank raises an error on all ranks.
"""

from typing import TYPE_CHECKING

from dtrain.lazy_imports import attach

if TYPE_CHECKING:
    from dtrain.dist.collectives import all_gather_json as all_gather_json
    from dtrain.dist.collectives import broadcast_json as broadcast_json
    from dtrain.dist.collectives import gather_json as gather_json
    from dtrain.dist.collectives import local_rank_zero_first as local_rank_zero_first
    from dtrain.dist.collectives import reduce_max as reduce_max
    from dtrain.dist.collectives import reduce_mean as reduce_mean
    from dtrain.dist.collectives import reduce_sum as reduce_sum
    from dtrain.dist.dtensor import global_norm as global_norm
    from dtrain.dist.init import DistInfo as DistInfo
    from dtrain.dist.mesh import data_rank as data_rank
    from dtrain.dist.ragged import all_gather_by_rank as all_gather_by_rank
    from dtrain.dist.ragged import all_gather_ragged as all_gather_ragged
    from dtrain.dist.ragged import all_gather_with_grad as all_gather_with_grad
    from dtrain.dist.ragged import gather_ragged as gather_ragged
    from dtrain.dist.rng import Determinism as Determinism
    from dtrain.dist.rng import Tf32 as Tf32
    from dtrain.dist.rng import derive_seed as derive_seed
    from dtrain.dist.rng import generator as generator
    from dtrain.dist.rng import rng_state as rng_state
    from dtrain.dist.rng import set_rng_state as set_rng_state
    from dtrain.dist.rng import use_deterministic as use_deterministic
    from dtrain.dist.rng import use_tf32 as use_tf32

__getattr__, __dir__ = attach(__name__, __file__)
