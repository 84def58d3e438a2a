"""Plans against what real ranks hold: the same model, laid out alike, on two and four processes."""

import pytest
import torch

from dtrain.dist.init import init_dist
from dtrain.dist.mesh import build_mesh
from dtrain.planning.estimate import estimate_memory
from dtrain.shard.fsdp import shard_model
from dtrain.shard.precision import Precision
from dtrain.step.compose import compose_step
from planning.workloads import WORKLOADS, measured

TOLERANCE = 0.1  # of what is measured: the bound; most cases are far inside it

QUICK = [
    pytest.param("gpt", 2, 4, 2, {"strategy": "full_shard"}, id="gpt-full_shard"),
    pytest.param("gpt", 2, 2, 1, {"strategy": "replicate"}, id="gpt-replicate"),
    pytest.param("convs", 2, 4, 2, {"strategy": "shard_grad_op"}, id="convs-shard_grad_op"),
    pytest.param("gpt", 2, 4, 1, {"strategy": "full_shard", "checkpoint": "nothing"}, id="gpt-checkpoint"),
    pytest.param("gpt", 2, 4, 2, {"strategy": "full_shard", "precision": "bf16", "accumulate": "sharded"}, id="gpt-bf16"),
    pytest.param("tied", 2, 3, 2, {"strategy": "full_shard"}, id="tied"),
]
STRATEGIES = ("full_shard", "shard_grad_op", "replicate", "hybrid_shard")
SLOW = [
    pytest.param(name, world, size, count, {"strategy": strategy, **more}, id=f"{name}-{strategy}-{world}-{size}x{count}-{i}")
    for name in WORKLOADS
    for strategy in STRATEGIES
    for world in (2, 4)
    for i, (size, count, more) in enumerate(
        (
            (6, 1, {}),
            (3, 4, {"accumulate": "sharded"}),
            # BatchNorm is a unit of its own in low precision, and blocks with one inside keep nothing or everything.
            (2, 3, {"precision": "bf16", "checkpoint": "nothing" if name == "convs" else "matmuls"}),
        )
    )
]


def off(ranks, name: str, world: int, size: int, count: int, setting: dict) -> float:
    """By how much the plan is wrong, as a share of what the rank that holds most has."""
    setting = {**setting, "dp_replicate": 2 if setting["strategy"] == "hybrid_shard" else 1}
    real = max(ranks(world).run(measured, name, size, count, setting))
    low = setting.pop("precision", None)
    plan = estimate_memory(
        WORKLOADS[name],
        world_size=world,
        microbatch_size=size,
        microbatches=count,
        device="cpu",
        precision=Precision.preset("DEFAULT", low) if low else None,
        **setting,
    )
    print(f"{name} {setting}: planned {plan.peak}, measured {real}, off {plan.peak / real - 1:+.4f}")
    return abs(plan.peak / real - 1)


@pytest.mark.parametrize(("name", "world", "size", "count", "setting"), QUICK)
def test_estimated_peak_matches_measured_ranks(ranks, name, world, size, count, setting):
    assert off(ranks, name, world, size, count, setting) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world", "size", "count", "setting"), SLOW)
def test_estimated_peak_matches_measured_ranks_for_every_setting(ranks, name, world, size, count, setting):
    assert off(ranks, name, world, size, count, setting) <= TOLERANCE


def on_gpu(size: int) -> int:
    """The most bytes that torch's allocator has handed out in a step of the real model on a GPU."""
    workload = WORKLOADS["gpt"]
    model = shard_model(workload.model().cuda(), build_mesh(), blocks=workload.blocks)
    step = compose_step(workload.loss_fn, workload.transforms)
    state = step.init(model, workload.optimizer(model.parameters()))
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        state, _ = step(state, workload.batch(size))
    return torch.cuda.max_memory_allocated()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_estimated_peak_matches_a_gpu():
    size = 256
    with init_dist(device="cuda"):
        real = on_gpu(size)
    plan = estimate_memory(WORKLOADS["gpt"], world_size=1, microbatch_size=size)
    assert abs(plan.peak / real - 1) <= TOLERANCE, f"planned {plan.peak}, measured {real}"
