"""The central promise: one gradient, for every split into microbatches and ranks, strategy, and weights.

Reference and candidate differ only in the split; the reference is written without dtrain, in one process, with one batch.
"""

import pytest
import torch
from torch import nn

from dtrain.data.batch import batch_spec
from dtrain.dist.dtensor import full_tensor
from dtrain.dist.init import get_dist_info
from dtrain.dist.mesh import build_mesh
from dtrain.shard.fsdp import shard_model
from dtrain.state import TrainState
from dtrain.step.microbatch_step import microbatch_step
from dtrain.typing import LossSum
from step.ragged import VOCAB, loss_fn, ragged_batch
from step.states import state_of

# Norm of the difference over norm of the gradient, over all parameters; rounding gives about 1e-15 and 1e-7.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5}
SIZES = (1, 2, 3, 5, None)
STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "replicate")

# The samples on the ranks: even, ragged, with a rank that has one microbatch fewer, with a rank that has none.
SPLITS = {
    1: [[11]],
    2: [[6, 5], [10, 1], [11, 0], [0, 11]],
    3: [[4, 4, 3], [0, 11, 0], [1, 2, 8]],
    4: [[3, 3, 3, 2], [0, 0, 1, 10]],
}


def model(dtype: str) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCAB))
    return net.to(getattr(torch, dtype))


def promised(batch: dict) -> torch.Tensor:
    return (batch["targets"] != -100).sum()


def by_samples(net: nn.Module, batch: dict) -> LossSum:
    """The usual mistake: a mean over tokens, weighted by samples."""
    loss = loss_fn(net, batch)
    count = len(batch["inputs"])
    return LossSum(total=loss.total / max(float(loss.weight), 1.0) * count, weight=count)


def reference(dtype: str) -> torch.Tensor:
    """torch's own mean over the tokens that count."""
    net, batch = model(dtype), ragged_batch()
    nn.functional.cross_entropy(net(batch["inputs"]).flatten(0, 1), batch["targets"].flatten(), ignore_index=-100).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def sharded(strategy: str, accumulate: str, dtype: str) -> TrainState:
    world = get_dist_info().world_size
    mesh = build_mesh(dp_replicate=2 if world == 4 else world) if strategy == "hybrid_shard" else build_mesh()
    return state_of(shard_model(model(dtype), mesh, strategy=strategy, accumulate=accumulate, blocks=(nn.Linear,)))


def difference(state: TrainState, counts: list, size: int | None, loss=loss_fn, **options) -> float:
    """The error of the gradient when rank r holds ``counts[r]`` of the samples."""
    rank = get_dist_info().rank
    first = sum(counts[:rank])
    batch = {key: value[first : first + counts[rank]] for key, value in ragged_batch().items()}
    microbatch_step(state, batch, loss_fn=loss, microbatch_size=size, **options)
    computed = torch.cat([full_tensor(p.grad).flatten() for p in state.params.values()])
    expected = reference(str(computed.dtype).removeprefix("torch."))
    return ((computed - expected).norm() / expected.norm()).item()


def differences(strategy: str, splits: list, dtype: str) -> list[float]:
    """One for every combination of split, size, accumulate mode, and weights known before or after backward."""
    errors = []
    for accumulate in ("local", "sharded"):
        state = sharded(strategy, accumulate, dtype)
        for counts in splits:
            for size in SIZES:
                for options in ({}, {"batch_spec": batch_spec(weight=promised)}):
                    errors.append(difference(state, counts, size, **options))
    return errors


QUICK = {(2, "full_shard"), (2, "replicate"), (4, "shard_grad_op"), (4, "hybrid_shard")}


def is_quick(world: int, strategy: str, dtype: str) -> bool:
    """float64 is the exact case: every strategy is quick there, and float32 once on several ranks."""
    return world == 1 or ((world, strategy) in QUICK and (dtype == "float64" or strategy == "replicate"))


CASES = [
    pytest.param(world, strategy, dtype, marks=() if is_quick(world, strategy, dtype) else pytest.mark.slow)
    for world in SPLITS
    for strategy in STRATEGIES
    for dtype in TOLERANCES
    if world > 1 or strategy != "hybrid_shard"
]


@pytest.mark.parametrize(("world_size", "strategy", "dtype"), CASES)
def test_gradient_equals_the_global_mean_gradient_for_every_split(ranks, world_size, strategy, dtype):
    for errors in ranks(world_size).run(differences, strategy, SPLITS[world_size], dtype):
        assert len(errors) == 4 * len(SIZES) * len(SPLITS[world_size])
        assert [error for error in errors if not error <= TOLERANCES[dtype]] == []  # a NaN fails, too


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("size", SIZES)
def test_plain_model_in_one_process_has_the_same_gradient(size, dtype):
    assert difference(state_of(model(dtype)), [11], size) <= TOLERANCES[dtype]


def mistaken(strategy: str, accumulate: str) -> float:
    return difference(sharded(strategy, accumulate, "float64"), [6, 5], 2, loss=by_samples)


@pytest.mark.parametrize("accumulate", ["local", "sharded"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sample_count_weighting_gives_a_wrong_gradient(ranks, strategy, accumulate):
    assert min(ranks(2).run(mistaken, strategy, accumulate)) > 1e-3
