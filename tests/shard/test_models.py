"""Gradients of unusual models under every strategy equal those of the plain model in one process."""

import pytest
import torch

from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.shard.fsdp import shard_model
from dtrain.shard.fsdp2_private import fsdp_param_groups
from dtrain.state import init_state
from dtrain.step.microbatch_step import microbatch_step
from dtrain.step.optimizer import optimizer_step
from shard.models import CASES, SAMPLES, WEIGHTS, batch, difference, make, reference

TOLERANCE = 1e-12  # norm of the difference over norm of the gradient, in float64; rounding gives about 1e-15
STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "replicate")


def mesh_for(strategy: str):
    world = get_dist_info().world_size
    return build_mesh(dp_replicate=world // 2 if world > 2 else world) if strategy == "hybrid_shard" else build_mesh()


def share(whole: dict) -> dict:
    rank, world = get_dist_info().rank, get_dist_info().world_size
    return {key: value[rank * SAMPLES // world : (rank + 1) * SAMPLES // world] for key, value in whole.items()}


def compare(name: str, strategies: list) -> dict[str, list]:
    """By strategy and mode: units, error, and which parameters have a gradient where the reference has none or the reverse."""
    results = {}
    expected = reference(name, WEIGHTS)
    for strategy in strategies:
        for accumulate in ("local", "sharded"):
            net = shard_model(make(name), mesh_for(strategy), strategy=strategy, accumulate=accumulate, **CASES[name].options)
            state = init_state(net, torch.optim.AdamW(net.parameters(), lr=0.1))
            for size in (2, None):  # the second time with the state that the first has left in FSDP2
                state, _ = microbatch_step(state, share(batch(name, WEIGHTS)), loss_fn=CASES[name].loss, microbatch_size=size)
            odd = [key for key, p in state.params.items() if (p.grad is None) != (expected[key] is None)]
            names_fit = sorted(state.params) == sorted(expected)
            results[f"{strategy} {accumulate}"] = [len(fsdp_param_groups(net)), difference(name, state.params), odd, names_fit]
            optimizer_step(state, {})
    return results


OTHERS = [strategy for strategy in STRATEGIES if strategy != "hybrid_shard"]
WORLDS = {"1": (1, OTHERS), "2": (2, list(STRATEGIES)), "4-hybrid": (4, ["hybrid_shard"]), "4-others": (4, OTHERS)}
QUICK = {"1": {"called twice", "everything"}, "4-hybrid": {"nested", "tied", "frozen", "some unused", "everything"}}


@pytest.mark.parametrize(
    ("name", "world_size", "strategies"),
    [
        pytest.param(name, *world, id=f"{name}-{of}", marks=() if of == "2" or name in QUICK.get(of, ()) else pytest.mark.slow)
        for name in CASES
        for of, world in WORLDS.items()  # 4-hybrid: cut and copied at once
    ],
)
def test_sharded_gradient_equals_the_single_process_gradient(ranks, name, world_size, strategies):
    for result in ranks(world_size).run(compare, name, strategies):
        for case, (units, error, odd, same_names) in result.items():
            assert error <= TOLERANCE, case
            # Plain parameters have no units of FSDP2.
            expected = 0 if case.startswith("replicate") else CASES[name].units
            assert (odd, same_names, units) == ([], True, expected), case
