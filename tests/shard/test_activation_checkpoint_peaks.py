"""Peaks of a step with each option, counted by the memory budget."""

import gc

import pytest
import torch
from torch import Tensor, nn

from dtrain.dist.dtensor import to_local
from dtrain.dist.mesh import build_mesh
from dtrain.shard.activations import checkpoint_activations
from dtrain.shard.fsdp import shard_model
from dtrain.state import init_state
from dtrain.step.microbatch_step import microbatch_step
from dtrain.testing.checks import UNLIMITED, memory_budget
from dtrain.typing import LossSum

DIM, BLOCKS, SAMPLES = 32, 8, 256


class Block(nn.Module):
    """Five activations for backward to one that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(torch.sin(self.up(x))))


def loss_fn(model: nn.Module, batch: Tensor) -> LossSum:
    return LossSum(total=model(batch).square().sum(), weight=float(len(batch)))


def peak(strategy: str, **options) -> tuple[int, float]:
    """Return the most bytes that a step held beyond those before it; and the norm of the gradient."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    if options:
        checkpoint_activations(net, blocks=Block, **options)
    net = shard_model(net, build_mesh(), strategy=strategy, blocks=Block)
    state = init_state(net, torch.optim.SGD(net.parameters(), lr=0.1))
    batch = torch.randn(SAMPLES, DIM, generator=torch.Generator().manual_seed(1))
    gc.collect()
    with memory_budget(UNLIMITED, existing=net.parameters()) as budget:
        before = budget.live
        microbatch_step(state, batch, loss_fn=loss_fn)
        norm = sum(to_local(p.grad).square().sum().item() for p in net.parameters())
        return budget.peak - before, norm


ACTIVATION = SAMPLES * DIM * 4


def measured() -> dict[str, list[int | bool]]:
    peaks = {}
    for strategy in ("full_shard", "replicate"):
        none, norm = peak(strategy)
        again = [peak(strategy, every=2), peak(strategy, keep="matmuls"), peak(strategy, every=1)]
        peaks[strategy] = [none, *(bytes_ for bytes_, _ in again), all(other == norm for _, other in again)]
    return peaks


@pytest.mark.costly
def test_peak_memory_drops_by_the_recomputed_activations(ranks):
    for peaks in ranks(2).run(measured):
        for none, second, matmuls, every, same in peaks.values():
            assert same
            assert every < second < none
            assert every < matmuls < none
            # Of each block two inputs of operators, each two wide, and its own input, which stays. Gradients come as these go.
            assert none - every >= 3 * (BLOCKS - 1) * ACTIVATION
